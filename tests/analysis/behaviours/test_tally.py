import numpy as np
import pytest
import torch

from clearhead.analysis.behaviours.behaviour import Probe
from clearhead.analysis.behaviours.reading import Reading
from clearhead.analysis.behaviours.tally import best_cases, largest_key, tally


def reading_of(rows, n_units, tokens=None):
    """rows: (unit, block, query, parts)."""
    parts = torch.tensor([row[3] for row in rows])
    unit, block, query = torch.tensor([row[:3] for row in rows]).unbind(1)
    tokens = torch.zeros(2, parts.shape[1], dtype=torch.int64) if tokens is None else tokens
    return Reading(tokens, unit, block, query, parts, parts.sum(-1), lambda rows: torch.zeros(len(rows), 3), n_units)


@pytest.fixture
def probe():
    expected, control = torch.zeros(2, 4, 4, dtype=torch.bool), torch.zeros(2, 4, 4, dtype=torch.bool)
    expected[:, 3, 1] = control[:, 3, 2] = True
    return Probe("hand", (torch.zeros(2, 4, dtype=torch.int64),), (expected,), (control,))


@pytest.fixture
def reading():
    return reading_of(
        [
            (0, 0, 3, [0.0, 3.0, -1.0, 0.0]),  # 3 of 4 where expected, 1 on the control
            (0, 1, 2, [4.0, 0.0, 0.0, 0.0]),  # no case
            (2, 1, 3, [0.0, -2.0, 0.0, 0.0]),
        ],
        n_units=4,
    )


def test_shares_are_of_everything_a_unit_moves(probe, reading):
    rows = tally(probe, [reading])
    assert rows.share(rows.on).tolist() == [3 / 8, 0, 1, 0]
    assert rows.share(rows.off).tolist() == [1 / 8, 0, 0, 0]
    assert np.allclose(rows.excess(), [(3 / 8 - 1 / 8) / (1 - 1 / 8), 0, 1, 0])
    assert rows.cases().tolist() == [1, 0, 1, 0]


def test_the_best_case_has_most_where_expected(probe, reading):
    best = best_cases(tally(probe, [reading]), probe, [reading])
    assert (best[0].block, best[0].query, best[0].keys) == (0, 3, (1,))
    assert best[1] is None and best[3] is None and best[2].block == 1


def test_the_largest_expected_key(probe, reading):
    assert largest_key(reading, probe.expected[0]).tolist() == [1, 0, 1]
