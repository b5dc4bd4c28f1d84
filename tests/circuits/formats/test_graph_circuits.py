"""Connected circuits, connected rankings, and the files of EAP-IG and MIB."""

import json

import pytest
import torch

from clearhead.circuits.curves.graph_edges import GraphEdges
from clearhead.circuits.formats.graph_circuits import drop_disconnected, eap_graph, rank_connected, write_eap
from clearhead.circuits.patching.graph_parts import GraphParts
from clearhead.errors import ClearheadError
from tests.circuits.masked_graphs import ROWS
from tests.circuits.random_rows import double_model


def test_disconnected_edges_change_nothing():
    level = GraphEdges(double_model("llama"))
    keep = torch.rand(20, level.count(ROWS), generator=torch.Generator().manual_seed(2)) < 0.15
    left = torch.stack([drop_disconnected(level.parts, mask) for mask in keep])
    assert (left <= keep).all()
    assert 0 < int(left.sum()) < int(keep.sum()) - 20
    found, expected = (level.evaluate(some[:, None], ROWS)[..., 0] for some in (left, keep))
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    names = level.parts.names
    path = torch.tensor([name in ("input->a0.h0<q>", "a0.h0->a1.kv0<k>", "a1.h1->logits") for name in names])
    assert torch.equal(drop_disconnected(level.parts, path), path)  # kv head 0 serves query head 1
    broken = torch.tensor([name in ("input->a0.h0<q>", "a0.h0->a1.kv0<k>", "a1.h2->logits") for name in names])
    assert not drop_disconnected(level.parts, broken).any()


@pytest.mark.parametrize("absolute", [True, False])
def test_connected_rankings_are_connected_and_whole(absolute):
    parts = GraphParts(double_model("llama"))
    scores = torch.randn(parts.n_edges, generator=torch.Generator().manual_seed(0))
    order = rank_connected(parts, scores, absolute=absolute)
    assert sorted(order.tolist()) == list(range(parts.n_edges))
    key = scores.abs() if absolute else scores
    into = [name.partition("->")[2] for name in parts.names]
    best = max((i for i, name in enumerate(into) if name == "logits"), key=lambda i: key[i])
    assert int(order[0]) == best
    serves = {"a1.h0": ("a1.h0<q>", "a1.kv0<k>", "a1.kv0<v>"), "a1.h3": ("a1.h3<q>", "a1.kv1<k>", "a1.kv1<v>")}
    for writer, readers in serves.items():
        first = next(i for i, edge in enumerate(order.tolist()) if parts.names[edge].startswith(f"{writer}->"))
        reached = {into[edge] for edge in order[:first].tolist()}
        assert f"{readers[0]}" not in reached  # a head's queries are read only once the head is in


def test_the_file_of_mib_has_every_edge(tmp_path):
    parts = GraphParts(double_model("gpt2"))
    scores = torch.arange(parts.n_edges, dtype=torch.float64)
    keep = scores > 100
    write_eap(tmp_path / "importances.json", parts, scores, keep)
    found = json.loads((tmp_path / "importances.json").read_text())
    assert found["cfg"] == {"n_layers": 2, "n_heads": 4, "parallel_attn_mlp": False, "d_model": 32}
    assert list(found["edges"]) == parts.names
    assert found["edges"]["m1->logits"] == {"score": parts.n_edges - 1, "in_graph": True}
    assert found["nodes"]["logits"] == {"in_graph": True}


def test_numbers_of_other_edges_are_refused():
    parts = GraphParts(double_model("gpt2"))
    with pytest.raises(ClearheadError, match="each of 110 edges"):
        drop_disconnected(parts, torch.ones(3, dtype=torch.bool))
    with pytest.raises(ClearheadError, match="each of 110 edges"):
        eap_graph(parts, torch.ones(3))
