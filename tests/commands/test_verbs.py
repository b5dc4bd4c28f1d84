"""Every verb at toy size, through the command line, on the small model: each takes what the one before it left."""

import json

import pytest

from clearhead import cli
from clearhead.atlas import Atlas
from clearhead.commands import analyze
from clearhead.config import Analyze
from clearhead.errors import ClearheadError

SMALL = ["--model", "clearhead-tiny", "--layer", "1", "--context", "32", "--device", "cpu"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("verbs")


@pytest.fixture(scope="module")
def text(place):
    """Three documents; the split by document needs more than one."""
    folder = place / "texts"
    folder.mkdir()
    for name, word in (("a", "cat"), ("b", "dog"), ("c", "owl"), ("d", "hen")):
        lines = [f"The {word} sat on mat {i} and saw the {word} of day {i * i}." for i in range(400)]
        (folder / f"{name}.txt").write_text("\n".join(lines))
    return str(folder)


@pytest.fixture(scope="module")
def store(place, text):
    out = str(place / "store")
    assert cli.main(["harvest", *SMALL, "--text", text, "--tokens", "4096", "--out", out]) == 0
    return out


@pytest.fixture(scope="module")
def run(place, text):
    out = str(place / "run")
    sizes = ["--heads", "128", "--k", "8", "--batch-tokens", "128", "--tokens", "4096"]
    assert cli.main(["train", "lorsa", *SMALL, *sizes, "--text", text, "--out", out]) == 0
    return out


@pytest.fixture(scope="module")
def evaluated(run):
    assert cli.main(["evaluate", run, "--tokens", "1024", "--downstream-tokens", "256", "--device", "cpu"]) == 0
    return run


@pytest.fixture(scope="module")
def analyzed(evaluated):
    assert cli.main(["analyze", evaluated, "--tokens", "1024", "--device", "cpu"]) == 0
    return evaluated


def test_harvest_then_train_from_the_store_equals_training_from_the_model(place, text, store, run):
    out = str(place / "from_store")
    assert cli.main(["train", "lorsa", "--from", run, "--store", store, "--out", out]) == 0
    direct, stored = ((place / name / "lorsa" / "model.safetensors").read_bytes() for name in ("run", "from_store"))
    assert direct == stored


def test_train_leaves_a_whole_run_directory(place, run):
    left = {path.name for path in (place / "run").iterdir()}
    assert {"config.json", "env.json", "metrics.jsonl", "checkpoints", "lorsa", "summary.json"} <= left
    assert json.loads((place / "run" / "config.json").read_text())["groups"] > 0


def test_training_again_into_the_same_directory_is_done_at_once_and_another_run_is_refused(run, capsys):
    assert cli.main(["train", "lorsa", "--from", run, "--out", run]) == 0
    assert cli.main(["train", "lorsa", "--from", run, "--out", run, "--k", "4"]) == 2
    assert "k: 8 -> 4" in capsys.readouterr().err
    assert cli.main(["train", "lorsa", "--from", run, "--out", run, "--no-resume"]) == 2


def test_evaluate_writes_numbers_with_their_origin(place, evaluated):
    written = json.loads((place / "run" / "evaluation.json").read_text())
    assert 0 < written["fvu"] < 2 and written["split"] == "held_out"
    assert written["config"]["verb"] == "evaluate" and written["environment"]["versions"]["torch"]


@pytest.mark.parametrize("text", ["[1]", '{"fvu": NaN}'])
def test_analyze_refuses_what_is_no_evaluation_before_it_works(text, tmp_path):
    (tmp_path / "evaluation.json").write_text(text)
    with pytest.raises(ClearheadError, match="run clearhead evaluate again"):
        analyze.write(Analyze(run=tmp_path))
    (tmp_path / "atlas").write_text("a file")
    with pytest.raises(ClearheadError, match="is a file"):
        analyze.write(Analyze(run=tmp_path))


def test_analyze_and_view_leave_an_atlas_and_a_page(place, analyzed, capsys):
    atlas = Atlas(place / "run" / "atlas")
    assert len(atlas.units("lorsa")) == 128
    metrics = {row["metric"] for row in atlas.sql("select metric from layers")}
    assert {"fvu", "ce_recovered"} <= metrics
    capsys.readouterr()
    assert cli.main(["view", analyzed]) == 0
    page = place / "run" / "page.html"
    assert capsys.readouterr().out == f"page: {page}\n"
    assert page.read_text().startswith("<!doctype html>") or page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("verb", ["evaluate", "analyze", "view"])
def test_dry_runs_of_a_run_say_where_results_go_and_write_nothing(verb, place, analyzed, capsys):
    before = {path: path.stat().st_mtime_ns for path in (place / "run").rglob("*")}
    assert cli.main([verb, analyzed, "--dry-run"]) == 0
    assert str(place / "run") in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (place / "run").rglob("*")} == before


def test_dry_run_of_a_training_predicts_size_and_time(place, text, capsys, monkeypatch):
    monkeypatch.chdir(place)
    before = sorted(place.iterdir())
    command = ["train", "lorsa", *SMALL, "--text", text, "--heads", "128", "--k", "8", "--batch-tokens", "128"]
    assert cli.main([*command, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    # width 128, 4 groups of 32: read and write vectors, queries, keys and their biases, b_V, b_D
    assert f"{2 * 128 * 128 + 2 * 4 * 32 * (128 + 1) + 128 + 128:,}" in shown
    assert "tokens/s, measured on 6 steps" in shown
    assert "runs/clearhead-tiny-1-h128-k8-data" in shown
    assert sorted(place.iterdir()) == before


def test_dry_run_of_a_harvest_says_its_size(place, text, capsys, monkeypatch):
    monkeypatch.chdir(place)
    assert cli.main(["harvest", *SMALL, "--text", text, "--tokens", "4096", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "4.23 MB" in shown and "stores/clearhead-tiny-1-texts" in shown
    assert not (place / "stores").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["evaluate", "nowhere"], "give one that `clearhead train lorsa` made"),
        (["view", "nowhere"], "`clearhead analyze RUN` writes an atlas"),
        (["train", "lorsa", "--model", "clearhead-tiny", "--layer", "7"], "there is no layer 7: the model has 2"),
        (["train", "lorsa", "--model", "no/such-model", "--dry-run"], "there is no model 'no/such-model'"),
        (["harvest", *SMALL, "--text", "no-such-file.txt"], "no-such-file.txt"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(args, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(args) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_run_says_how_to_finish_it(tmp_path, run, place, capsys):
    (tmp_path / "config.json").write_bytes((place / "run" / "config.json").read_bytes())
    assert cli.main(["evaluate", str(tmp_path)]) == 2
    assert f"clearhead train lorsa --from {tmp_path}" in capsys.readouterr().err


def test_a_run_without_an_atlas_says_which_verb_makes_one(tmp_path, capsys):
    (tmp_path / "lorsa").mkdir()
    assert cli.main(["view", str(tmp_path)]) == 2
    assert f"type: clearhead analyze {tmp_path}" in capsys.readouterr().err


def test_bench_zpattern_prints_and_keeps_its_numbers(tmp_path, capsys):
    sizes = ["--blocks", "2", "--context", "16", "--heads", "64", "--groups", "4", "--k", "4", "--repeats", "1"]
    assert cli.main(["bench", "zpattern", *sizes, "--d-model", "16", "--out", str(tmp_path)]) == 0
    (report,) = tmp_path.glob("*-zpattern.md")
    assert "seconds" in capsys.readouterr().out and "| activations | " in report.read_text()


def test_plans_of_the_benchmarks(capsys):
    assert cli.main(["bench", "lorsa", "--dry-run"]) == 0
    assert "8,388,608" in capsys.readouterr().out
    assert cli.main(["bench", "zpattern", "--dry-run"]) == 0
    assert "98,304" in capsys.readouterr().out
