"""Attention in graphs: loadings add up to edges where nothing passes by, scores are those of the heads that carry."""

import numpy as np
import pytest
import torch

from clearhead.circuits.attention_in_graph import carrying_edges, explain_attention, load_heads
from clearhead.circuits.loadings import split_edges
from clearhead.circuits.prune import prune
from clearhead.circuits.trace import likely_logits, trace
from tests.circuits.opened_prompts import opened


@pytest.fixture(scope="module", params=["transcoder", "lorsa"])
def pruned(request):
    prompt = opened("llama", request.param)
    return prune(trace(prompt, likely_logits(prompt)), 0.999, 0.999)


def test_edges_between_positions_are_carried_by_heads_alone(pruned):
    loadings = load_heads(pruned, share=1.0)
    total = np.bincount(loadings.edge, loadings.weight, len(pruned.entries.weight))
    units = pruned.traced.rows.units
    checked = 0
    for edge, (source, target, weight) in enumerate(zip(*pruned.entries, strict=True)):
        one, other = units[source], units[target]
        if other.kind != "lorsa" and one.position is not None and one.position != other.position:
            assert total[edge] == pytest.approx(weight, abs=1e-9)
            checked += 1
    assert checked > 5


def test_loadings_are_those_of_the_edges_whatever_block_they_are_in(pruned, monkeypatch):
    monkeypatch.setattr("clearhead.circuits.attention_in_graph.TARGETS", 3)
    loadings = load_heads(pruned)
    traced = pruned.traced
    edge = next(e for e, t in enumerate(pruned.entries.target) if t >= traced.rows.n_sources and loadings.of(e))
    split = split_edges(
        traced.opened,
        traced.start.reads,
        torch.tensor([pruned.entries.source[edge]]),
        torch.tensor([pruned.entries.target[edge] - traced.rows.n_sources]),
        torch.tensor([pruned.entries.weight[edge]]),
        "last",
    )
    for (layer, head), weight in loadings.of(edge).items():
        assert weight == pytest.approx(float(split.weight[0, layer, head]))


def test_scores_of_what_carries_most(pruned):
    edges = carrying_edges(pruned, 4)
    assert [edge.share for edge in edges] == sorted((edge.share for edge in edges), reverse=True)
    splits = explain_attention(pruned, 4)
    named = {split.unit.id for split in splits}
    assert {f"edge.{f.layer}.{f.head}.{f.key}@{f.query}" for f in (e.firing for e in edges) if f.query} <= named
    for split in splits:
        assert split.total == pytest.approx(split.score, rel=1e-4)
    lorsa = [split.unit for split in splits if split.unit.kind == "lorsa"]
    assert bool(lorsa) == bool(pruned.traced.opened.attention)
    graph = pruned.graph("a prompt", load_heads(pruned), [split.table() for split in splits])
    assert len(graph.attention) == len(splits) and len(graph.loadings) > 0
    assert explain_attention(pruned, 0) == []
