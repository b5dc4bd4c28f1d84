"""`clearhead circuit curve` on planted models: what is printed, what is saved, what is refused."""

import json
from pathlib import Path

import pytest
import torch

from clearhead import cli
from clearhead.circuits.curves.attention_edges import AttentionEdges
from clearhead.circuits.curves.graph_edges import GraphEdges
from clearhead.circuits.curves.node_level import NodeLevel
from clearhead.commands import circuit_curve
from clearhead.commands.circuit_curve import open_level
from clearhead.config import CircuitCurve
from clearhead.data.tasks import Task
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model import Model
from tests.circuits.curves.test_study import planted_task
from tests.circuits.planted import planted_model, planted_rows


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two planted models under the names `one` and `two`, and their task under that of ioi."""

    def load(name: str, **_options: object) -> Model:
        model = planted_model(torch.float32)
        model.name = name
        return model

    behaviour = planted_task(12, wrong=(4,))
    monkeypatch.setattr(Model, "load", load)
    monkeypatch.setattr(circuit_curve, "open_task", lambda *_: behaviour)
    monkeypatch.setattr(Task, "of_items", lambda *_: behaviour)


def run(*options: str) -> int:
    return cli.main(["circuit", "curve", "--controls", "1", *options])


@pytest.mark.usefixtures("planted")
def test_every_number_is_printed_and_saved_with_its_protocol(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("--model", "one", "--against", "two", "--out", str(tmp_path / "run")) == 0
    printed = capsys.readouterr().out
    for text in ("protocol, one:", "protocol, two:", "one: exact, signed:", "two: exact, absolute:"):
        assert text in printed
    for line in ("90%, stable crossing", "2 (prompts 2 to 2; templates 2 to 2)", "F of the complement"):
        assert line in printed
    assert "overlap of the signed circuits of one and two" in printed
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert [one["name"] for one in summary["runs"]] == ["one", "two"]
    for one in summary["runs"]:
        assert one["protocol"]["wrong"] == [4]
        assert one["protocol"]["rank"] == "exact"
        assert [curve["policy"] for curve in one["curves"]] == ["signed", "absolute", "signed"]
        assert one["curves"][0]["stable"] == 2
        assert len(one["curves"][0]["per_prompt_values"]) == len(one["protocol"]["evaluated_on"])
        assert len(one["scores"]["exact"]) == 8
    assert summary["overlap"]["signed"]["stable circuits"] == 1
    prompts = json.loads((tmp_path / "run/prompts.json").read_text())
    assert [item["used"] for item in prompts[0]][4] == ["wrong"]
    assert prompts[0][0]["clean"] == planted_rows(1).clean[0].tolist()
    assert (tmp_path / "run/page.html").stat().st_size > 1000
    assert json.loads((tmp_path / "run/config.json").read_text())["verb"] == "circuit curve"


@pytest.mark.usefixtures("planted")
def test_other_rankings_levels_and_ablations_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(circuit_curve, "write_curve_page", lambda out, _runs: out)
    for number, options in enumerate(
        (
            ("--rank", "atp", "--policy", "absolute", "--level", "heads+mlps", "--ablation", "zero"),
            ("--rank", "relevance", "--ablation", "mean", "--metric", "kl", "--min-effect", "0"),
            ("--level", "attention-edges", "--policy", "signed"),
            ("--level", "graph-edges", "--policy", "signed"),
        )
    ):
        assert run("--model", "one", "--out", str(tmp_path / str(number)), *options) == 0
        summary = json.loads((tmp_path / str(number) / "summary.json").read_text())
        protocol = summary["runs"][0]["protocol"]
        assert protocol["ablation"] == (
            options[-1] if "zero" in options else "mean" if "mean" in options else "corrupt"
        )
        assert summary["runs"][0]["curves"][0]["stable"] is not None


@pytest.mark.usefixtures("planted")
def test_a_task_that_is_not_done_is_an_error_and_not_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(circuit_curve, "open_task", lambda *_: planted_task(12, wrong=tuple(range(12))))
    assert run("--model", "one", "--out", str(tmp_path)) == 2
    assert "0 of 12 prompts of the task 'planted' are answered right" in capsys.readouterr().err
    assert not (tmp_path / "summary.json").exists()


def test_levels_are_opened_by_name():
    model, rows = planted_model(), [planted_rows()]
    assert isinstance(open_level(model, "heads+mlps", "mean", rows, 0), NodeLevel)
    assert isinstance(open_level(model, "attention-edges", "zero", rows, 0), AttentionEdges)
    assert isinstance(open_level(model, "graph-edges", "corrupt", rows, 0), GraphEdges)
    with pytest.raises(UnknownNameError, match="ablation of attention edges 'optimal'"):
        open_level(model, "attention-edges", "optimal", rows, 0)


def test_the_plan_needs_no_weights_and_bad_options_are_refused(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["circuit", "curve", "--model", "clearhead-tiny", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "exact, both" in printed
    assert "runs/curve-clearhead-tiny-ioi-heads" in printed
    for options, message in (
        (["--prompts", "1"], "at least 2"),
        (["--threshold", "0"], "above 0"),
        (["--threshold", "90"], "at most 1"),
        (["--task", "mine.jsonl", "--prompts", "4"], "all prompts of the file are used"),
        (["--task", "theirs.csv", "--prompts", "4"], "all prompts of the file are used"),
        (["--task", "capitols", "--dry-run"], "did you mean 'capitals'"),
        (["--level", "graph-edges", "--rank", "mask"], "graph-edges have exact, atp, ig and random"),
        (["--level", "graph-edges", "--ablation", "optimal"], "no learned constants"),
        (["--level", "attention-edges", "--ablation", "mean"], "attention-edges have corrupt, zero and"),
        (["--keep-sinks"], "--level attention-edges"),
        (["--gates", "frozen"], "--level attention-edges"),
        (["--compare-exact"], "the ranking is exact"),
    ):
        assert cli.main(["circuit", "curve", *options]) == 2
        assert message in capsys.readouterr().err


def test_a_task_file_that_does_not_exist_is_named(tmp_path: Path):
    config = CircuitCurve(model="clearhead-tiny", task=str(tmp_path / "no.jsonl"), out=tmp_path / "run")
    with pytest.raises(ClearheadError, match=r"there is no task file .*no.jsonl"):
        circuit_curve.run(config)


@pytest.mark.usefixtures("planted")
def test_edges_have_counts_agreement_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(circuit_curve, "write_curve_page", lambda out, _runs: out)
    monkeypatch.setattr(circuit_curve, "open_task", lambda *_: planted_task(4))
    shared = ("--model", "one", "--policy", "signed", "--controls", "0", "--compare-exact")
    assert run(*shared, "--level", "attention-edges", "--keep-sinks", "--out", str(tmp_path / "a")) == 0
    printed = capsys.readouterr().out
    assert "edges to the first token belong to every circuit" in printed
    assert "one: the signed circuit of a prompt, on average:" in printed
    summary = json.loads((tmp_path / "a/summary.json").read_text())["runs"][0]
    assert summary["edge_counts"]["signed"]["edges"] == summary["curves"][0]["stable"] == 1
    assert summary["edge_counts"]["signed"]["bos"] == 0
    assert summary["agreement_with_exact"]["spearman"] <= 1

    assert run(*shared, "--level", "graph-edges", "--out", str(tmp_path / "g")) == 0
    assert "exact effects against the scores of the ranking" in capsys.readouterr().out
    summary = json.loads((tmp_path / "g/summary.json").read_text())["runs"][0]
    edges = json.loads((tmp_path / "g/eap-1.json").read_text())["edges"]
    assert {name for name, edge in edges.items() if edge["in_graph"]} == set(summary["curves"][0]["circuit"])
    assert {name: edge["score"] for name, edge in edges.items()} == summary["scores"]["atp"]


@pytest.mark.usefixtures("planted")
def test_gates_are_frozen_where_a_model_has_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ("--level", "attention-edges", "--gates", "frozen", "--out", str(tmp_path / "run"))
    assert run("--model", "one", "--against", "two", *options) == 2
    assert "one and two have no edge gates to hold" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
