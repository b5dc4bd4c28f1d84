"""Exact effects against estimates: on all components, on samples of them, on components of one prompt each."""

import pytest
import torch

from clearhead.circuits.curves.agreement import compare_exact, effects
from clearhead.circuits.curves.attention_edges import AttentionEdges
from clearhead.circuits.curves.curve import Scores, score
from clearhead.circuits.curves.node_level import NodeLevel
from clearhead.circuits.curves.statistics import correlation, rank_correlation
from tests.circuits.planted import planted_model, planted_rows


def test_heads_are_compared_all_on_the_prompts_that_were_scored():
    level = NodeLevel.open(planted_model(), "heads", "corrupt")
    batches = [planted_rows(3), planted_rows(2, first=3, length=5)]
    estimate = score(level, "atp", batches, batches[:1])
    exact = score(level, "exact", batches, batches[:1]).of_batches[0][0]
    found = compare_exact(level, estimate, batches)
    assert (found.method, found.pairs, found.components) == ("atp", 8, 8)
    assert found.pearson == pytest.approx(correlation(estimate.of_batches[0][0], exact))
    assert found.spearman == pytest.approx(rank_correlation(estimate.of_batches[0][0], exact))


def test_of_many_edges_the_largest_and_some_others_are_measured():
    level, rows = AttentionEdges(planted_model()), planted_rows(2)
    exact = level.exact_effects(rows)
    found = compare_exact(level, Scores("exact", (exact,)), [rows], most=20)
    assert (found.pairs, found.components) == (40, exact.numel())
    assert found.pearson == pytest.approx(1)
    backwards = compare_exact(level, Scores("backwards", (-exact,)), [rows], most=20)
    assert backwards.pearson == pytest.approx(-1)


def test_effects_are_of_the_chosen_edges_of_each_prompt():
    level, rows = AttentionEdges(planted_model()), planted_rows(2)
    chosen = torch.stack([torch.arange(0, 30, 3), torch.arange(1, 31, 3)])
    torch.testing.assert_close(
        effects(level, rows, chosen), level.exact_effects(rows).gather(1, chosen), rtol=0, atol=1e-12
    )
