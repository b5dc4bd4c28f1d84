import json
import re

import pytest
import torch

from clearhead import cli

SMALL = ["--steps", "12", "--batch", "8"]


def run(capsys, *args):
    code = cli.main(["spectral", "toy", *SMALL, *args])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_run_prints_its_tables_and_leaves_a_whole_directory(tmp_path, capsys):
    out = tmp_path / "toy"
    code, shown, _ = run(capsys, "--pairs", "2", "--seeds", "2", "--sweep", "keys", "--out", str(out))
    assert code == 0
    assert re.search(r"pair +mode +target +sigma +cos query +cos key +logit/target +overlap +close modes", shown)
    assert "seed 0: " in shown and "seed 1: " in shown and "control: No head was trained" in shown
    assert "sweep over keys" in shown and "pairs with both cosines ≥ 0.98" in shown
    left = {path.name for path in out.iterdir()}
    assert {"config.json", "env.json", "metrics.jsonl", "summary.json", "page.html"} <= left
    assert json.loads((out / "config.json").read_text())["features"] == 40
    summary = json.loads((out / "summary.json").read_text())
    assert [seed["seed"] for seed in summary["seeds"]] == [0, 1]
    assert len(summary["seeds"][0]["query"]) == 2 and summary["seeds"][0]["outcome"]
    assert summary["without_head"]["outcome"] == "no head"
    assert [point["value"] for point in summary["sweep"]["points"]] == [2, 4, 8, 16, 32]
    assert {row["features"] for row in summary["anisotropy"]} == {100, 400}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {line["seed"] for line in lines} == {0, 1} and lines[0]["step"] == 0 and lines[-1]["step"] == 12
    assert "Toy model: 2 pairs of features" in (out / "page.html").read_text()


def test_the_same_run_is_made_again_and_another_is_refused(tmp_path, capsys):
    out = str(tmp_path / "toy")
    assert run(capsys, "--out", out)[0] == 0
    first = (tmp_path / "toy" / "metrics.jsonl").read_text()
    assert run(capsys, "--out", out)[0] == 0
    assert (tmp_path / "toy" / "metrics.jsonl").read_text() == first
    code, _, error = run(capsys, "--out", out, "--keys", "4")
    assert code == 2 and "keys: 8 -> 4" in error and "choose another directory with --out" in error
    assert cli.main(["spectral", "toy", "--from", out, "--out", str(tmp_path / "other")]) == 0
    assert (tmp_path / "other" / "metrics.jsonl").read_text() == first


def test_a_toy_without_a_head_is_its_own_control(tmp_path, capsys):
    code, shown, _ = run(capsys, "--attention-weight", "0", "--out", str(tmp_path))
    assert code == 0 and "seed 0: no head" in shown and "control:" not in shown
    assert json.loads((tmp_path / "summary.json").read_text())["without_head"] is None


def test_threads_are_those_asked_for_and_restored(tmp_path, capsys):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert run(capsys, "--out", str(tmp_path))[0] == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert json.loads((tmp_path / "env.json").read_text())["threads"] == 1


def test_a_plan_derives_every_size_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["spectral", "toy", "--pairs", "20", "--sweep", "head-width", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for row in ("features +100", "width +50", "attention weight +1,000", r"toys of the sweep \(head-width\) +4"):
        assert re.search(row, shown), row
    assert "runs/toy-20" in shown and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--head-width", "12"], "--head-width 12 is not possible: a token has 10 dimensions"),
        (["--rope", "constant", "--head-width", "3"], "give an even number"),
        (["--lr", "1e30"], "smaller --lr"),
    ],
)
def test_bad_input_is_one_message(args, says, tmp_path, capsys):
    code, _, error = run(capsys, *args, "--out", str(tmp_path / "toy"))
    assert code == 2 and says in error
