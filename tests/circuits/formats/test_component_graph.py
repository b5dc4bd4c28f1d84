import json

import numpy as np
import pytest

from clearhead.circuits.formats.component_graph import Sizes, is_mib, read_mib, to_mib, write_mib
from clearhead.errors import ClearheadError, CorruptFileError, NonFiniteError
from clearhead.units import Graph, Provenance, Unit

SIZES = Sizes(2, 2, 8, parallel=False)
PROVENANCE = Provenance("m", "p")


def circuit():
    units = [
        Unit("input"), Unit("head_v", 0, 1), Unit("head", 0, 1), Unit("mlp", 0), Unit("head_q", 1, 0),
        Unit("target", index=0),
    ]  # fmt: skip
    return Graph(units, [0, 2, 3, 2], [1, 3, 4, 5], [0.5, -1.0, 0.25, 3.0], PROVENANCE)


def test_names_are_those_of_eap_ig():
    made = to_mib(circuit(), SIZES)
    assert made["cfg"] == {"n_layers": 2, "n_heads": 2, "parallel_attn_mlp": False, "d_model": 8}
    assert made["edges"] == {
        "input->a0.h1<v>": {"score": 0.5, "in_graph": True},
        "a0.h1->m0": {"score": -1.0, "in_graph": True},
        "m0->a1.h0<q>": {"score": 0.25, "in_graph": True},
        "a0.h1->logits": {"score": 3.0, "in_graph": True},
    }
    assert list(made["nodes"]) == ["input", "a0.h0", "a0.h1", "m0", "a1.h0", "a1.h1", "m1", "logits"]
    kept = [name for name, node in made["nodes"].items() if node["in_graph"]]
    assert kept == ["input", "a0.h1", "m0", "a1.h0", "logits"]


def test_a_circuit_comes_back(tmp_path):
    graph = circuit()
    again = read_mib(write_mib(graph, SIZES, tmp_path / "circuit.json"))
    assert again.units == graph.units
    for name in ("source", "target", "weight"):
        np.testing.assert_array_equal(getattr(again, name), getattr(graph, name))
    assert is_mib(json.loads((tmp_path / "circuit.json").read_text()))
    assert not is_mib(graph.to_dict())


def test_edges_outside_the_circuit_are_read_only_where_none_is_chosen(tmp_path):
    made = to_mib(circuit(), SIZES)
    made["edges"]["m0->m1"] = {"score": 9.0, "in_graph": False}
    (tmp_path / "a.json").write_text(json.dumps(made))
    assert len(read_mib(tmp_path / "a.json")) == 4
    for edge in made["edges"].values():
        edge["in_graph"] = False
    (tmp_path / "a.json").write_text(json.dumps(made))
    assert read_mib(tmp_path / "a.json").weights_between("mlp.0", "mlp.1") == 9


def test_positions_and_embeddings_are_added():
    units = [Unit("embedding", index=i, position=i) for i in range(2)] + [Unit("mlp", 0, position=t) for t in range(2)]
    units.append(Unit("logit", index=3, position=1))
    graph = Graph(units, [0, 1, 1, 2, 3], [2, 2, 3, 4, 4], [1.0, 2.0, 4.0, 8.0, 16.0], PROVENANCE)
    scores = {name: edge["score"] for name, edge in to_mib(graph, SIZES)["edges"].items()}
    assert scores == {"input->m0": 7.0, "m0->logits": 24.0}


def test_what_these_circuits_do_not_have_is_refused():
    with pytest.raises(ClearheadError, match=r"feature\.0\.1 → target\.0 has no place"):
        to_mib(Graph([Unit("feature", 0, 1), Unit("target", index=0)], [0], [1], [1.0], PROVENANCE), SIZES)
    with pytest.raises(ClearheadError, match=r"feature\.0\.99 → target\.0 has no place"):
        to_mib(Graph([Unit("feature", 0, 99), Unit("target", index=0)], [0], [1], [1.0], PROVENANCE), SIZES)
    with pytest.raises(ClearheadError, match=r"head\.0\.0 → head\.1\.0 has no place"):
        to_mib(Graph([Unit("head", 0, 0), Unit("head", 1, 0)], [0], [1], [1.0], PROVENANCE), SIZES)
    with pytest.raises(ClearheadError, match=r"mlp\.2 is not in a model of 2 layers"):
        to_mib(Graph([Unit("mlp", 2)], [], [], [], PROVENANCE), SIZES)
    with pytest.raises(ClearheadError, match=r"one target; this graph has logit\.1, logit\.2"):
        to_mib(Graph([Unit("logit", index=i, position=1) for i in (1, 2)], [], [], [], PROVENANCE), SIZES)


@pytest.mark.parametrize(
    ("edges", "error", "message"),
    [
        ({"m0": {"score": 1}}, CorruptFileError, "names no edge"),
        ({"m0->q": {"score": 1}}, CorruptFileError, "'q' names no component"),
        ({"m0->a1.h0<z>": {"score": 1}}, CorruptFileError, "names no component"),
        ({"m0->m1": {"score": None}}, CorruptFileError, "not a number"),
        ({"m0->m1": 1.0}, CorruptFileError, "not a number"),
        ({"m0->m1": {"score": float("nan")}}, NonFiniteError, "m0->m1 has the score nan"),
        ([], CorruptFileError, "lacks cfg, nodes or edges"),
    ],
)
def test_altered_files_are_refused(tmp_path, edges, error, message):
    (tmp_path / "a.json").write_text(json.dumps({"cfg": {}, "nodes": {}, "edges": edges}))
    with pytest.raises(error, match=message):
        read_mib(tmp_path / "a.json")
