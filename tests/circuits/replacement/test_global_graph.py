"""The circuit of a whole model: the planted induction circuit among single heads."""

import pytest
import torch

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.replacement.global_graph import trace_global
from clearhead.errors import ClearheadError
from clearhead.units.bundle import load_graph, save_graph
from tests.circuits.induction import induction_model
from tests.circuits.planted import VOCABULARY, WIDTH
from tests.circuits.replacement.replaced import EDGES, copies, induction


def into(graph, kind, layer=1):
    """Edges into units of a kind in the second layer, those that matter most first."""
    edges = [
        (graph.units[s], graph.units[t], w) for s, t, w in zip(graph.source, graph.target, graph.weight, strict=True)
    ]
    return [edge for edge in edges if edge[1].kind == kind and edge[1].layer in (layer, None)]


def test_the_previous_token_head_feeds_the_keys_of_the_induction_head():
    """Head 0.2 writes the token before into the block that head 1.1 searches with its own token, and copies."""
    graph = induction().heads
    previous, copying = (range(n * WIDTH, n * WIDTH + VOCABULARY) for n in (2, 1))
    for source, target, weight in into(graph, "head_k")[:3]:
        assert source.kind == "lorsa" and source.layer == 0 and source.index in previous
        assert target.id == "head_k.1.1" and weight > 0
    assert [(source.kind, target.id) for source, target, _ in into(graph, "head_q")[:3]] == [
        ("embedding", "head_q.1.1")
    ] * 3
    for source, _, weight in into(graph, "logit")[:3]:
        assert source.layer == 1 and source.index in copying and weight > 0
    for source, target, weight in into(graph, "head_k", layer=0)[:1]:
        assert (source.id, target.id) == ("positions", "head_k.0.2") and weight > 0
    assert graph.weights_between("head_k.1.1", into(graph, "logit")[0][0]) > 0
    assert len(graph) == EDGES and graph.labels["head_k.1.1"] == "keys 1.1"
    assert graph.values["influence"].max() == pytest.approx(1)


def test_a_graph_on_disk_is_the_same(tmp_path):
    graph = induction().heads
    loaded = load_graph(save_graph(graph, tmp_path))
    assert loaded.units == graph.units and (loaded.weight == graph.weight).all()


def test_blocks_that_predict_nothing_counted_are_refused():
    model = induction_model()
    with pytest.raises(ClearheadError, match="at least 3 tokens"):
        trace_global(model, Dictionaries(model, copies(model)), torch.tensor([[1, 3]]))
