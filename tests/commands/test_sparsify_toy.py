import json
import re

import pytest
import torch

from clearhead import cli
from clearhead.data import addition

SMALL = ["--layers", "1", "--heads", "2", "--width", "8", "--dense-steps", "3", "--steps", "4"]


def run(capsys, *args):
    code = cli.main(["sparsify", "toy", *SMALL, *args])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_run_leaves_models_numbers_and_a_page_and_more_seeds_continue_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(addition, "HELD_OUT", 60)
    out = tmp_path / "toy"
    before = torch.get_num_threads()
    code, shown, _ = run(capsys, "--out", str(out))
    assert code == 0 and torch.get_num_threads() == before
    assert "seed 0: " in shown and "no state reached the accuracy" in shown
    assert "trained with as many random edges" in shown and "held: " in shown
    model = out / "seed-0" / "sparse" / "model" / "model.safetensors"
    assert model.exists() and (out / "seed-0" / "dense" / "model" / "config.json").exists()
    left = model.stat().st_mtime_ns
    summary = json.loads((out / "summary.json").read_text())
    seed = summary["seeds"][0]
    assert seed["random"]["trained"]["exact_match"] >= 0 and seed["random"]["same_weights"]["largest"] >= 0
    assert {row["layer"] for row in seed["classes"]} == {0} and len(seed["reading"]) == 9
    assert summary["largest_edge_share"] == seed["sparse"]["edge_share"]

    code, shown, _ = run(capsys, "--seeds", "2", "--out", str(out))
    assert code == 0 and "all 2 seeds:" in shown
    assert model.stat().st_mtime_ns == left and not (out / "seed-1" / "random").exists()
    again = json.loads((out / "summary.json").read_text())
    assert again["seeds"][0] == seed and again["seeds"][1]["random"]["trained"] is None
    text = (out / "page.html").read_text()
    assert "Addition of numbers below 100" in text and "head.1.0.1" in text
    assert json.loads((out / "config.json").read_text())["seeds"] == 2
    metrics = (out / "seed-0" / "sparse" / "metrics.jsonl").read_text().splitlines()
    assert {"edge_share", "accuracy", "multiplier", "kl"} <= json.loads(metrics[-1]).keys()

    code, _, error = run(capsys, "--tolerance", "0.1", "--out", str(out))
    assert code == 2 and "tolerance: 0.03 -> 0.1" in error


def test_a_plan_says_what_would_be_trained_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sparsify", "toy", "--seeds", "3", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for row in ("edges per sum, all open +576", "seeds +3", "runs/addition"):
        assert re.search(row, shown), row
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--width", "9"], "give a multiple of --heads 2"),
        (["--accuracy", "1.5"], "--accuracy 1.5 is not possible: give a share above 0"),
        (["--steps", "0"], "--steps 0 is not possible: give a number above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(args, says, tmp_path, capsys):
    code, _, error = run(capsys, *args, "--out", str(tmp_path))
    assert code == 2 and says in error
