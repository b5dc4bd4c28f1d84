import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import ClearheadError, CorruptFileError, NonFiniteError, UnknownNameError
from clearhead.units import Graph, Provenance, Unit

PROVENANCE = Provenance("toy", "weights product", "a b", (5, 6), {"clearhead": "0.1.0"}, 3)
HEADS = [Unit("head", 0, h, activation=float(h)) for h in range(6)]


def dense(graph, units):
    matrix = np.zeros((len(units), len(units)))
    place = {unit: p for p, unit in enumerate(units)}
    for s, t, w in zip(graph.source, graph.target, graph.weight, strict=True):
        matrix[place[graph.units[s]], place[graph.units[t]]] += w
    return matrix


@st.composite
def graphs(draw):
    chosen = draw(st.permutations(HEADS))[: draw(st.integers(1, 6))]
    pairs = draw(st.sets(st.tuples(*[st.integers(0, len(chosen) - 1)] * 2)))
    pairs = sorted(pairs)
    weight = [draw(st.integers(-5, 5)) for _ in pairs]
    return Graph(chosen, [s for s, _ in pairs], [t for _, t in pairs], weight, PROVENANCE)


@given(graphs(), graphs())
def test_merge_adds_and_diff_subtracts(a, b):
    np.testing.assert_array_equal(dense(a.merge(b), HEADS), dense(a, HEADS) + dense(b, HEADS))
    np.testing.assert_array_equal(dense(a.diff(b), HEADS), dense(a, HEADS) - dense(b, HEADS))
    assert a.merge(b).provenance.parents == (a.provenance, b.provenance)


@given(graphs())
def test_export_round_trip(graph):
    again = Graph.from_dict(json.loads(json.dumps(graph.to_dict())))
    assert again.units == graph.units
    assert [unit.activation for unit in again.units] == [unit.activation for unit in graph.units]
    np.testing.assert_array_equal(dense(again, HEADS), dense(graph, HEADS))
    assert again.provenance == graph.provenance


@given(graphs(), st.floats(0, 1))
def test_prune_keeps_the_fewest_edges_that_carry_the_share(graph, share):
    pruned = graph.prune(share)
    sizes = sorted(np.abs(graph.weight), reverse=True)
    total = sum(sizes)
    assert np.abs(pruned.weight).sum() >= share * total - 1e-9
    fewest = next(n for n in range(len(sizes) + 1) if sum(sizes[:n]) >= share * total * (1 - 1e-12))
    assert len(pruned) == fewest
    assert set(pruned.units) == {pruned.units[p] for p in [*pruned.source, *pruned.target]}
    kept = dense(pruned, HEADS)
    np.testing.assert_array_equal(kept[kept != 0], dense(graph, HEADS)[kept != 0])


def test_lookup():
    graph = Graph(HEADS[:3], torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([2.0, -1.0]), PROVENANCE)
    assert graph.weights_between("head.0.0", "head.0.1") == 2
    assert graph.weights_between("head.0.0", HEADS[2]) == 0
    assert "head.0.2" in graph
    assert "head.0.5" not in graph
    assert graph.unit("head.0.2").activation == 2
    with pytest.raises(UnknownNameError, match="head.0.5"):
        graph.unit("head.0.5")


def test_bad_graphs_are_refused():
    with pytest.raises(ClearheadError, match="head.0.0 appears more than once"):
        Graph([HEADS[0], HEADS[0]], [], [], [], PROVENANCE)
    with pytest.raises(ClearheadError, match="edge 1 has target 3, but there are 3 units"):
        Graph(HEADS[:3], [0, 0], [1, 3], [1, 1], PROVENANCE)
    with pytest.raises(ClearheadError, match="head.0.0 → head.0.1 appears more than once"):
        Graph(HEADS[:3], [0, 0], [1, 1], [1, 1], PROVENANCE)
    with pytest.raises(ClearheadError, match="one length"):
        Graph(HEADS[:3], [0, 0], [1], [1, 1], PROVENANCE)
    with pytest.raises(NonFiniteError, match="head.0.0 → head.0.2"):
        Graph(HEADS[:3], [0, 0], [1, 2], [1, np.nan], PROVENANCE)
    with pytest.raises(ClearheadError, match="whole numbers"):
        Graph(HEADS[:3], [0.5], [1], [1], PROVENANCE)
    with pytest.raises(ClearheadError, match="prune"):
        Graph(HEADS[:3], [0], [1], [1], PROVENANCE).prune(90)


def test_bad_exports_are_refused():
    entries = Graph(HEADS[:3], [0], [1], [1], PROVENANCE).to_dict()
    with pytest.raises(CorruptFileError, match="format 3"):
        Graph.from_dict({**entries, "format": 3})
    with pytest.raises(CorruptFileError, match="lacks weight"):
        Graph.from_dict({k: v for k, v in entries.items() if k != "weight"})
    with pytest.raises(CorruptFileError, match="activations"):
        Graph.from_dict({**entries, "activation": [1.0]})
    with pytest.raises(UnknownNameError, match="did you mean 'seed'"):
        Graph.from_dict({**entries, "provenance": {**entries["provenance"], "sead": 1}})
    with pytest.raises(CorruptFileError, match="model"):
        Graph.from_dict({**entries, "provenance": {"protocol": "x"}})
