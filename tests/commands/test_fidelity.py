"""`clearhead train sweep` and `clearhead fidelity`: from a grid to report and page, and what cannot be compared."""

import dataclasses
import json

import pytest
import torch

from clearhead import cli
from clearhead.commands.opening.attention_runs import TrainedRun, choose, find_runs, is_equal, most_alike, refuse_unlike
from clearhead.commands.printing.fidelity_report import across_layers, fits_of, report_of
from clearhead.config import TrainLorsa, TrainSae, TrainTranscoder
from clearhead.errors import ClearheadError
from clearhead.training.transcoder import train_transcoder
from tests.training.conftest import TINY, WORDS
from tests.view.synthetic_fidelity import synthetic_report


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("books")
    generator = torch.Generator().manual_seed(0)
    for number in range(12):
        picks = torch.randint(len(WORDS), (1200,), generator=generator).tolist()
        (folder / f"book-{number}.txt").write_text(" ".join(WORDS[i] for i in picks), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def sweep(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "sweep"
    options = ["--model", str(TINY), "--text", str(text), "--context", "32", "--device", "cpu", "--layer", "1"]
    grid = ["--kinds", "lorsa", "sae", "transcoder", "--heads", "64", "--k", "4", "--tokens", "768"]
    command = ["train", "sweep", *options, *grid, "--measured-tokens", "320", "--out", str(out)]
    assert cli.main(command) == 0
    return out, command


def test_a_sweep_leaves_ordinary_runs_and_repeats_none(sweep, capsys):
    out, command = sweep
    summary = json.loads((out / "summary.json").read_text())
    assert [row["kind"] for row in summary["runs"]] == ["lorsa", "sae", "transcoder"]
    for row in summary["runs"]:
        held = json.loads((out / row["run"] / "evaluation.json").read_text())
        assert held["fvu"] == row["fvu"] > 0 and held["split"] == "held_out"
    before = (out / summary["runs"][0]["run"] / "summary.json").stat().st_mtime_ns
    assert cli.main(command) == 0
    assert "1 of 3: 1-lorsa-h64-k4-data-s0 is finished" in capsys.readouterr().out
    assert (out / summary["runs"][0]["run"] / "summary.json").stat().st_mtime_ns == before


def test_a_plan_lists_trainings_and_what_is_finished(sweep, capsys):
    assert cli.main([*sweep[1], "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count(", finished") == 3 and "time of the trainings" not in said


def test_a_report_measures_what_evaluate_measures_and_view_opens_it(sweep, tmp_path, capsys):
    out = tmp_path / "report"
    command = ["fidelity", str(sweep[0]), "--tokens", "320", "--device", "cpu", "--out", str(out)]
    assert cli.main([*command, "--dry-run"]) == 0 and not out.exists()
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "too few layers for a rank correlation" in said and "R² of SAE error" in said
    report = report_of(out)
    evaluated = {row["run"]: row["fvu"] for row in json.loads((sweep[0] / "summary.json").read_text())["runs"]}
    assert {row["run"]: row["fvu"] for row in report["runs"]} == evaluated
    (layer,) = report["layers"]
    assert layer["main"].startswith("1-lorsa") and layer["partner"].startswith("1-sae")
    assert layer["compared"]["transcoder"]["equal"] and layer["compared"]["reference"] is None
    (out / "page.html").unlink()
    assert cli.main(["view", str(out)]) == 0 and 'aria-label="Runs"' in (out / "page.html").read_text()


def test_a_report_replaces_no_other_run(sweep, capsys):
    for verb in ("fidelity", "train sweep"):
        command = ["fidelity", str(sweep[0])] if verb == "fidelity" else sweep[1][:-2]
        run = sweep[0] / "1-lorsa-h64-k4-data-s0"
        before = (run / "config.json").read_text()
        assert cli.main([*command, "--out", str(run)]) == 2
        assert "holds a run of `clearhead train lorsa`" in capsys.readouterr().err
        assert (run / "config.json").read_text() == before


def test_runs_of_other_sites_are_left_out_of_a_folder_and_refused_alone(text, tmp_path):
    mlp = TrainTranscoder(model=str(TINY), text=str(text), layer=1, context=32, tokens=256, features=16, k=2)
    train_transcoder(dataclasses.replace(mlp, out=tmp_path / "runs" / "mlp", device="cpu"))
    train_transcoder(dataclasses.replace(mlp, site="attention", out=tmp_path / "runs" / "attention", device="cpu"))
    found, left = find_runs([tmp_path / "runs"])
    assert [run.name for run in found] == ["attention"] and "predicts mlp_out" in left[0][1]
    with pytest.raises(ClearheadError, match="it predicts mlp_out, not attn_out"):
        find_runs([tmp_path / "runs" / "mlp"])
    with pytest.raises(ClearheadError, match="holds no finished dictionary"):
        find_runs([text])
    with pytest.raises(ClearheadError, match="there is no directory"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(ClearheadError, match="name the runs"):
        find_runs([])


def test_a_lorsa_is_compared_with_what_had_its_budget(tmp_path):
    shared = {"layer": 3, "tokens": 1000, "k": 8}
    found = [
        TrainedRun(tmp_path, "reference", TrainLorsa(init="reference", heads=999, **shared)),
        TrainedRun(tmp_path, "small", TrainLorsa(heads=64, **shared)),
        TrainedRun(tmp_path, "main", TrainLorsa(heads=128, **shared)),
        TrainedRun(tmp_path, "seed", TrainLorsa(heads=128, seed=1, **shared)),
        TrainedRun(tmp_path, "longer", TrainSae(site="attn_out", **{**shared, "tokens": 9000})),
        TrainedRun(tmp_path, "sae", TrainSae(site="attn_out", **shared)),
    ]
    sizes = [999, 500, 1000, 1000, 1000, 950]
    chosen = choose(found, sizes)
    assert (found[chosen.main].name, found[chosen.partner].name) == ("main", "sae")
    assert is_equal(found, sizes, 2, 5) and not is_equal(found, sizes, 2, 4) and not is_equal(found, sizes, 2, 1)
    assert most_alike(found, sizes, 2, kind="lorsa", init="data", other_seed=True) == 3
    assert most_alike(found, sizes, 2, kind="transcoder") is None
    assert choose(found[4:], sizes[4:]) is None
    with pytest.raises(ClearheadError, match="differ in their context: 256 and 64"):
        refuse_unlike([found[0], TrainedRun(tmp_path, "other", TrainLorsa(context=64))])


def test_only_pairs_of_equal_budget_count_over_layers_and_series_differ_in_one_thing():
    report = synthetic_report()
    across = across_layers(report["runs"], report["layers"], 0)
    assert across["sae"]["layers"] == 6 and across["sae"]["lower"] == 0
    assert across["reference"] is None and across["transcoder"] is None  # other budgets, no run
    rows = [
        {**report["runs"][1], "parameters": size, "fvu": fvu} for size, fvu in ((100, 0.5), (200, 0.4), (400, 0.35))
    ]
    fits = fits_of([*rows, report["runs"][4]])
    (entry,) = fits
    assert entry["over"] == "parameters" and entry["fit"]["c"] == pytest.approx(0.3, abs=1e-3)
