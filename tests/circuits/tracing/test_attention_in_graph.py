"""Attention in graphs: loadings add up to edges where nothing passes by, scores are those of the heads that carry."""

import dataclasses

import numpy as np
import pytest
import torch

from clearhead.circuits.tracing.attention_in_graph import carrying_edges, explain_attention, load_heads, weigh_heads
from clearhead.circuits.tracing.loadings import split_edges
from clearhead.circuits.tracing.prune import prune
from clearhead.circuits.tracing.trace import likely_logits, trace
from clearhead.units import Loadings
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
    monkeypatch.setattr("clearhead.circuits.tracing.attention_in_graph.TARGETS", 3)
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


def test_heads_count_by_the_influence_of_what_they_carry(pruned):
    loadings = load_heads(pruned, share=1.0)
    found = weigh_heads(pruned, loadings)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    expected = dict.fromkeys(found, 0.0)
    for edge, carried in enumerate(pruned.carried):
        for head, weight in loadings.of(edge).items():
            expected[head] += carried / pruned.carried.sum() * abs(weight / pruned.entries.weight[edge])
    assert found == pytest.approx(expected)
    # the scale of what a target reads is not its importance
    target = int(pruned.entries.target[loadings.edge[0]])
    larger = pruned.entries.weight * np.where(pruned.entries.target == target, 1000.0, 1.0)
    scaled = Loadings(
        loadings.edge,
        loadings.layer,
        loadings.head,
        loadings.weight * (larger / pruned.entries.weight)[loadings.edge],
        loadings.kind,
    )
    changed = dataclasses.replace(pruned, entries=pruned.entries._replace(weight=larger))
    assert weigh_heads(changed, scaled) == pytest.approx(found)


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
