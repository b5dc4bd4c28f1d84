"""`clearhead circuit global` at toy size: a graph that view draws, and what replacing cost."""

import json

import pytest

from clearhead import cli
from clearhead.config import CircuitGlobal
from clearhead.dictionaries.init import from_attention
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.units.bundle import load_graph


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    model = Model.load("clearhead-tiny", tokenizer=False)
    folder = tmp_path_factory.mktemp("copies")
    for layer in range(model.n_layers):
        lorsa = from_attention(model.weights(layer), model.geometry(layer))
        sites = {"input_site": f"attn_in.{layer}", "output_site": f"attn_out.{layer}"}
        lorsa.provenance |= {"model": "clearhead-tiny", "layer": layer, **sites}
        lorsa.save_pretrained(folder / str(layer))
    return [str(folder / str(layer)) for layer in range(model.n_layers)]


def test_a_circuit_is_a_graph_that_can_be_looked_at(copies, tmp_path, capsys):
    out = tmp_path / "run"
    sizes = ["--repeats", "--tokens", "48", "--context", "24", "--edges", "50", "--device", "cpu"]
    assert cli.main(["circuit", "global", *copies, *sizes, "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    for name, held in (("graph", "patterns"), ("heads", "heads")):
        graph = load_graph(out / name)
        assert len(graph) == summary["edges"][held] == 50 and graph.provenance.prompt == "random tokens that come twice"
    assert summary["loss"] == pytest.approx(summary["loss_replaced"], abs=1e-4)
    assert sorted(summary["loss_without"]) == [f"head.{layer}.{head}" for layer in range(2) for head in range(4)]
    assert summary["kl"] == pytest.approx(0, abs=1e-4)  # exact copies cost nothing
    shown = capsys.readouterr().out
    assert " → " in shown and "  head.0.0 'pattern 0" in shown and "      keys: positions" in shown
    assert cli.main(["view", str(out)]) == 0 and (out / "page.html").exists()


def test_dry_runs_and_refusals(copies, capsys):
    assert cli.main(["circuit", "global", *copies, "--dry-run"]) == 0
    assert "default (held_out)" in capsys.readouterr().out
    with pytest.raises(ClearheadError, match="random tokens are drawn"):
        CircuitGlobal(dictionaries=("a",), repeats=True, text="x")
    with pytest.raises(ClearheadError, match="at least one run"):
        CircuitGlobal(dictionaries=())
