"""Pruning: all that matters at share 1, what is left is connected, and what is removed counts as error."""

import numpy as np
import pytest

from clearhead.circuits.tracing.prune import prune
from clearhead.circuits.tracing.readers import EXPLAINED
from clearhead.circuits.tracing.trace import likely_logits, trace
from clearhead.errors import ClearheadError
from tests.circuits.opened_prompts import opened


@pytest.fixture(scope="module", params=["all", "transcoder", "none"])
def traced(request):
    prompt = opened("llama", request.param)
    return trace(prompt, likely_logits(prompt))


def test_at_share_1_everything_with_influence_stays_and_scores_are_those_of_the_whole(traced):
    pruned = prune(traced, 1, 1)
    matters = np.flatnonzero(traced.influence() > 0)
    assert set(matters) <= set(pruned.nodes)
    assert len(pruned.entries.source) == len(traced.rows.entries.source)
    whole = traced.scores()
    assert pruned.scores.replacement == pytest.approx(whole.replacement)
    assert pruned.scores.completeness == pytest.approx(whole.completeness)


def test_what_is_left_is_connected_and_what_is_removed_is_error(traced):
    pruned = prune(traced, 0.6, 0.9)
    graph = pruned.graph("a prompt")
    kinds = [unit.kind for unit in graph.units]
    into, out = (set(ends.tolist()) for ends in (graph.target, graph.source))
    for place, kind in enumerate(kinds):
        assert place in out or kind in ("embedding", "logit")
        assert place in into or kind not in EXPLAINED
    assert kinds.count("embedding") == 12 and kinds.count("logit") == len(traced.start.share)
    assert graph.scores["replacement_pruned"] < graph.scores["replacement"] <= 1
    assert graph.scores["completeness_pruned"] < graph.scores["completeness"] <= 1
    assert len(graph.units) < len(prune(traced).nodes) < len(prune(traced, 1, 1).nodes)


def test_a_graph_carries_values_and_weights_of_the_trace(traced):
    graph = prune(traced).graph("a prompt")
    rows = traced.rows
    stored = {(rows.units[s], rows.units[t]): w for s, t, w in zip(*rows.entries, strict=True)}
    for source, target, weight in zip(graph.source, graph.target, graph.weight, strict=True):
        assert stored[graph.units[source], graph.units[target]] == weight
    logits = np.array([unit.kind == "logit" for unit in graph.units])
    assert np.allclose(graph.values["probability"][logits], traced.start.share)
    assert np.isnan(graph.values["probability"][~logits]).all()
    explained = logits | np.array([unit.kind in EXPLAINED for unit in graph.units])
    assert ((graph.values["error_share"][explained] >= 0) & (graph.values["error_share"][explained] <= 1)).all()
    influence = traced.influence()
    order = np.argsort(graph.values["influence"][~logits])
    nodes = [rows.units.index(graph.units[place]) for place in np.flatnonzero(~logits)[order]]
    assert (np.diff(influence[nodes]) <= 1e-12).all()
    assert graph.provenance.prompt == "a prompt" and graph.provenance.token_ids
    graph.check_acyclic()


def test_shares_outside_of_0_to_1_are_refused(traced):
    for units, edges in ((0, 0.5), (0.5, 1.5)):
        with pytest.raises(ClearheadError, match="above 0"):
            prune(traced, units, edges)
