"""What `evaluate`, `view` and `frontier` make of a sparse run, of its controls, and of what they cannot take."""

import dataclasses
import functools
import json
import shutil

import pytest
import torch

from clearhead import cli
from clearhead.commands import evaluate, evaluate_sparse
from clearhead.commands.frontier import SAME
from clearhead.config import Evaluate, Frontier, Sparsify
from clearhead.configfile import from_dict
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.runs import read_json, write_json
from clearhead.sparsify.posttrain import open_held_out, open_unwatched, posttrain
from tests.training.conftest import TINY, books

__all__ = ["books"]
OPTIONS = ["--tokens", "512", "--device", "cpu"]


@pytest.fixture(scope="module", autouse=True)
def _few_prompts():
    """Everything is measured, tasks on few prompts and samples once."""
    few = {"prompts": 8, "tasks": ("copy", "ioi"), "seeds": (0,), "laid_out_tokens": 256}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate_sparse, "evaluate", functools.partial(evaluate_sparse.evaluate, **few))
        patch.setattr(
            evaluate_sparse, "evaluate_control", functools.partial(evaluate_sparse.evaluate_control, prompts=8)
        )
        yield


@pytest.fixture(scope="module")
def training(books, tmp_path_factory):
    """Twelve steps, in which gates move fast enough to close edges."""
    torch.set_num_threads(1)
    return Sparsify(
        model=str(TINY),
        text=str(books),
        context=32,
        tokens=12 * 128,
        batch_tokens=128,
        tolerance=0.5,
        lr=1e-3,
        gate_lr_factor=300.0,
        device="cpu",
        out=tmp_path_factory.mktemp("runs") / "sparse",
    )


@pytest.fixture(scope="module")
def sparse(training):
    """A sparse run, evaluated."""
    posttrain(training)
    assert cli.main(["evaluate", str(training.out), *OPTIONS, "--retrieval", "16"]) == 0
    return training.out


@pytest.fixture(scope="module")
def controls(training, sparse):
    """A dense and a random control, evaluated."""
    for control, like in (("dense", None), ("random", sparse)):
        out = sparse.parent / control
        posttrain(dataclasses.replace(training, control=control, like=like, out=out))
        assert cli.main(["evaluate", str(out), *OPTIONS]) == 0
    return [sparse.parent / "dense", sparse.parent / "random"]


def changed(run, place, **values):
    """A copy of an evaluated run whose evaluation says something else."""
    place.mkdir()
    for name in ("config.json", "summary.json"):
        shutil.copy(run / name, place)
    write_json(place / "evaluation.json", read_json(run / "evaluation.json") | values)
    return place


def test_no_block_of_the_evaluation_was_watched(training, tmp_path):
    model = Model.load(str(TINY), self_test=False)
    watched = {tuple(row) for row in open_held_out(training, model).tolist()}
    rows, blocks = open_unwatched(model, training.text, context=32, tokens=1000)
    assert rows.shape == (32, 32) and blocks.split == "held_out"
    assert watched and not watched & {tuple(row) for row in rows.tolist()}
    every, blocks = open_unwatched(model, training.text, context=32, tokens=10**6)
    assert len(every) == len(blocks) - -(-len(blocks) // 8)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("the quiet river ran past an old mill " * 3)
    with pytest.raises(ClearheadError, match="none for evaluation; name a longer text with --text"):
        open_unwatched(model, str(tmp_path), context=32, tokens=64)


def test_evaluate_writes_what_was_measured_and_the_page(sparse):
    found = read_json(sparse / "evaluation.json")
    assert found["kind"] == "sparse" and found["split"] == "held_out" and found["base"] == str(TINY)
    assert found["tokens"] == 512 and found["context"] == 32 and found["text_sha256"]
    training = found["training"]
    assert (training["control"], training["tolerance"], training["hard_from_tokens"]) == ("none", 0.5, 11 * 128)
    assert 0 < found["edges"]["share"] < 1 and found["laid_out_tokens"] == 256
    assert "cannot hold" in found["retrieval"]["passkey"][0]["refused"]
    model = Model.load(str(sparse / "model"), self_test=False)
    tokens, _ = open_unwatched(model, found["text"], context=32, tokens=512)
    logits = model.run(tokens).logits[:, :-1]
    assert found["controls"]["base"] != found["ce"]["base"]  # on fewer tokens
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss) == pytest.approx(found["ce"]["hard"], rel=1e-5)
    sentences = read_json(sparse / "evaluation-sentences.json")
    assert len(sentences) == 2 and [layer["layer"] for layer in sentences[0]["layers"]] == [0, 1]
    assert "tolerance 0.5" in (sparse / "page.html").read_text()


def test_the_table_says_what_matters(sparse, capsys):
    assert cli.main(["evaluate", str(sparse), *OPTIONS, "--out", str(sparse.parent / "again.json")]) == 0
    shown = capsys.readouterr().out
    for line in (
        "hard gates",
        "tolerance 0.5",
        "open edges per query",
        "of 16.5",
        "rows without an edge",
        "closed edges",
    ):
        assert line in shown
    for line in ("first token's part", "base, largest of each row", "said again", "task copy", "task ioi"):
        assert line in shown
    assert "passkey" not in shown  # the context is below the shortest prompts
    assert {path.name for path in sparse.parent.glob("again*")} == {"again.json", "again-sentences.json", "again.html"}


def test_a_page_is_made_again_without_a_model(sparse, capsys, monkeypatch):
    monkeypatch.delattr(Model, "load")
    assert cli.main(["view", str(sparse), "--dry-run"]) == 0
    assert "evaluation.json" in capsys.readouterr().out
    assert cli.main(["view", str(sparse), "--out", str(sparse.parent / "other.html")]) == 0
    assert (sparse.parent / "other.html").read_bytes() == (sparse / "page.html").read_bytes()


def test_a_model_folder_alone_is_evaluated_on_a_given_text(training, sparse, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(sparse / "model", folder)
    assert cli.main(["evaluate", str(folder), *OPTIONS, "--text", training.text]) == 0
    assert "tolerance 0.5" in capsys.readouterr().out
    found = read_json(folder / "evaluation.json")
    assert found["context"] == 128 and found["training"]["steps"] is None
    assert cli.main(["view", str(folder)]) == 0


def test_controls_are_measured_beside_the_base(controls, capsys):
    dense, random = (read_json(run / "evaluation.json") for run in controls)
    assert dense["edges"] == {"share": 1.0, "per_query": 16.5}
    assert random["edges"]["share"] == pytest.approx(read_json(controls[1] / "summary.json")["edge_share"])
    assert dense["ce"]["base"] == random["ce"]["base"] and dense["ce"]["control"] != random["ce"]["control"]
    assert set(dense["tasks"]["copy"]) == {"prompts", "refused_prompts", "control", "base"}
    assert "refused" in dense["tasks"]["ioi"]
    assert dense["induction"]["base"] == random["induction"]["base"]
    assert cli.main(["view", str(controls[0])]) == 2
    assert "a control, which has no page of its own" in capsys.readouterr().err
    assert cli.main(["evaluate", str(controls[0]), *OPTIONS, "--retrieval", "64"]) == 2
    assert "this is a control" in capsys.readouterr().err
    assert cli.main(["evaluate", str(controls[0] / "model"), *OPTIONS]) == 2
    assert "give the directory of its run" in capsys.readouterr().err


def test_frontier_puts_runs_and_controls_side_by_side(sparse, controls, tmp_path, capsys):
    wide = changed(sparse, tmp_path / "wide", edges={"per_query": 1.5, "share": 1 / 11, "empty_rows": 0.1, "leak": 0.2})
    runs = [str(run) for run in (controls[1], wide, sparse, controls[0])]
    out = tmp_path / "frontier.html"
    assert cli.main(["frontier", *runs, "--out", str(out), "--dry-run"]) == 0 and not out.exists()
    assert cli.main(["frontier", *runs, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    (line,) = [line.split() for line in shown.splitlines() if line.split()[:1] == ["wide"]]
    assert line[:7] == ["wide", "sparse", "0.5", "0", "1.50", "9.09", "%"] and len(line) == 10
    numbers = read_json(tmp_path / "frontier.json")
    assert [run["kind"] for run in numbers["runs"]] == ["none", "none", "dense", "random"]
    evaluation = read_json(sparse / "evaluation.json")
    point = next(run for run in numbers["runs"] if run["run"] == "sparse")
    assert point["rise"] == pytest.approx(evaluation["ce"]["hard"] - evaluation["ce"]["base"])
    over_base = evaluation["controls"]["top_in_row_base"] - evaluation["controls"]["base"]
    assert point["top_in_row_base"] == pytest.approx(over_base)
    assert all(numbers[key] == evaluation[key] for key in SAME)
    page = out.read_text()
    assert "Trained under random edges" in page and "Dense control, all edges" in page


def test_frontier_refuses_what_cannot_be_compared(sparse, controls, tmp_path, capsys):
    def refusal(*runs):
        assert cli.main(["frontier", *map(str, runs), "--out", str(tmp_path / "f.html")]) == 2
        return capsys.readouterr().err

    for key, value in (("base", "other/model"), ("context", 64), ("text_sha256", "0" * 64), ("tokens", 1024)):
        other = changed(sparse, tmp_path / key, **{key: value})
        assert f"{key} {value}, not" in refusal(sparse, other)
    assert "named twice" in refusal(sparse, sparse)
    assert "all of these are controls" in refusal(*controls)
    assert "name the runs" in refusal()
    assert "no run of `clearhead sparsify`" in refusal(sparse, tmp_path)
    (tmp_path / "context" / "evaluation.json").unlink()
    assert f"clearhead evaluate {tmp_path / 'context'}" in refusal(tmp_path / "context")
    assert "without its base" in refusal(changed(sparse, tmp_path / "alone", base=None))
    assert not (tmp_path / "f.html").exists()
    with pytest.raises(ClearheadError, match=r"name an \.html file"):
        Frontier(out=tmp_path / "f.json")


def test_options_of_the_other_lens_and_unfinished_runs_are_refused(sparse, tmp_path, capsys):
    assert cli.main(["evaluate", str(sparse), *OPTIONS, "--downstream-tokens", "9"]) == 2
    assert "--downstream-tokens is for a Lorsa" in capsys.readouterr().err
    with pytest.raises(ClearheadError, match="--retrieval is for sparse models"):
        evaluate.measure(Evaluate(run=tmp_path, retrieval="512"))
    (tmp_path / "config.json").write_bytes((sparse / "config.json").read_bytes())
    assert cli.main(["evaluate", str(tmp_path)]) == 2
    assert f"clearhead sparsify --from {tmp_path}" in capsys.readouterr().err
    assert cli.main(["view", str(tmp_path)]) == 2
    assert f"has not been evaluated yet; type: clearhead evaluate {tmp_path}" in capsys.readouterr().err


def test_a_dry_run_names_text_and_files_and_writes_nothing(sparse, capsys):
    before = {path: path.stat().st_mtime_ns for path in sparse.rglob("*")}
    assert cli.main(["evaluate", str(sparse), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "without the blocks that the run was watched on" in shown and str(sparse / "evaluation.json") in shown
    assert {path: path.stat().st_mtime_ns for path in sparse.rglob("*")} == before


@pytest.mark.parametrize("lengths", ["many", "512,", "-1", "0", ""])
def test_lengths_that_are_none_are_refused(sparse, lengths):
    with pytest.raises(ClearheadError, match="numbers of tokens with commas"):
        Evaluate(run=sparse, retrieval=lengths)


def test_lengths_of_retrieval_follow_the_context_unless_given(sparse):
    derived = Evaluate(run=sparse)
    assert derived.retrieval_lengths(256) == () and derived.retrieval_lengths(2000) == (512, 1024)
    assert Evaluate(run=sparse, retrieval="2048, 1024").retrieval_lengths(256) == (1024, 2048)
    assert Evaluate(run=sparse, retrieval="none").retrieval_lengths(8192) == ()


def test_a_frontier_with_runs_survives_the_round_trip_through_json(sparse):
    config = Frontier(runs=(sparse, sparse / "model"))
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config
