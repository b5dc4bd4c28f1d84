"""Rows of edges: sums over the whole row are exact whatever is stored, and all edges into starts are."""

import numpy as np
import pytest
import torch

from clearhead.circuits.tracing.edge_rows import EdgeRows
from clearhead.errors import NonFiniteError
from clearhead.units import Unit

SOURCES = (
    Unit("embedding", index=4, position=0),
    Unit("feature", 0, 1, 0),
    Unit("feature", 0, 2, 0),
    Unit("error", 0, position=0),
    Unit("mlp", 1, position=0),
    Unit("bias", 1),
)
EDGES = torch.tensor([[1.0, -4.0, 2.0, 0.0, 0.5, -1.0]])


def rows_of(kept=2):
    return EdgeRows((*SOURCES, Unit("logit", index=1, position=0)), len(SOURCES), kept)


def test_a_start_is_stored_whole_and_other_rows_up_to_the_limit():
    rows = rows_of()
    rows.add([6], EDGES, torch.tensor([0.5]), torch.tensor([-1.0]))
    rows.add([1], EDGES, torch.tensor([0.0]), torch.tensor([-1.0]))
    assert rows.entries.target.tolist() == [6] * 5 + [1] * 2
    assert dict(zip(rows.entries.source[5:], rows.entries.weight[5:], strict=True)) == {1: -4.0, 2: 2.0}
    assert rows.total == [8.5, 8.5] and rows.dropped == [0.0, 2.5]
    assert rows.mass[1] == [1.0, 0.5, 1.0, 6.0]
    assert rows.error == [0.0, pytest.approx(0.5 / 8.5)]
    assert np.allclose(rows.class_shares().sum(1), 1)
    assert np.allclose(np.bincount(rows.entries.target, rows.shares())[[6, 1]], [1, 6 / 8.5])


def test_nan_is_refused_with_its_target():
    with pytest.raises(NonFiniteError, match=r"an edge into logit.1@0"):
        rows_of().add([6], EDGES / 0, torch.zeros(1), torch.zeros(1))
