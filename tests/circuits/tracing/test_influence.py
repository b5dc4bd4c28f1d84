"""Influence: by hand on a small graph, and as the inverse of a dense matrix on a traced prompt."""

import numpy as np
import pytest
import torch

from clearhead.circuits.tracing.edge_rows import EdgeRows
from clearhead.circuits.tracing.influence import score, spread
from clearhead.units import Unit
from tests.circuits.tracing.test_edge_rows import SOURCES


@pytest.fixture
def rows():
    """Logit ← half the feature, a quarter each the token and the whole MLP; feature ← token and error 3 : 1."""
    rows = EdgeRows((*SOURCES, Unit("logit", index=1, position=0)), len(SOURCES))
    rows.add([6], torch.tensor([[1.0, -2.0, 0.0, 0.0, 1.0, 0.0]]), torch.zeros(1), torch.zeros(1))
    rows.add([1], torch.tensor([[-3.0, 0.0, 0.0, 1.0, 0.0, 0.0]]), torch.zeros(1), torch.zeros(1))
    return rows


START = np.array([0.0] * 6 + [0.8])


def test_influence_is_that_of_all_paths(rows):
    found = spread(rows.entries, rows.shares(), START)
    assert np.allclose(found, 0.8 * np.array([0.25 + 0.5 * 0.75, 0.5, 0, 0.5 * 0.25, 0.25, 0, 0]))


def test_scores_by_hand(rows):
    scores = score(rows, rows.entries, rows.shares(), START, rows.class_shares())
    assert scores.tokens == pytest.approx(0.625) and scores.errors == pytest.approx(0.375)
    assert scores.biases == scores.unexplained == 0
    assert scores.replacement == pytest.approx(0.625)
    assert scores.completeness == pytest.approx((1 * 0.75 + 0.5 * 0.75) / 1.5)


def test_a_feature_that_is_not_explained_counts_as_error(rows):
    alone = EdgeRows(rows.units, rows.n_sources)
    alone.add([6], torch.tensor([[1.0, -2.0, 0.0, 0.0, 1.0, 0.0]]), torch.zeros(1), torch.zeros(1))
    scores = score(alone, alone.entries, alone.shares(), START, alone.class_shares())
    assert scores.unexplained == pytest.approx(0.5) and scores.replacement == pytest.approx(0.25)
    assert scores.completeness == pytest.approx(0.75)


def test_what_is_missing_of_a_row_is_neither_explained_nor_complete(rows):
    mass = rows.class_shares()
    mass[1, 0] = 0.0
    scores = score(rows, rows.entries, rows.shares(), START, mass)
    assert scores.unexplained == pytest.approx(0.375) and scores.tokens == pytest.approx(0.25)
    assert scores.completeness == pytest.approx((0.75 + 0.5 * 0.0) / 1.5)
