"""Statistics of inclusion curves against numbers worked out by hand."""

import pytest
import torch

from clearhead.circuits.curves.statistics import (
    MIB_SHARES,
    area,
    cmd,
    correlation,
    cpr,
    faithfulness,
    first_crossing,
    interval,
    mib_counts,
    overlap,
    rank_correlation,
    resample,
    stable_crossing,
)
from clearhead.errors import ClearheadError, NonFiniteError


def double(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_faithfulness_is_the_ratio_of_mean_effects():
    empty, full = double(0, -2), double(4, 2)
    values = torch.stack([empty, double(2, 0), full, double(8, 0)])
    assert faithfulness(values, empty, full).tolist() == [0, 0.5, 1, 1.25]


def test_no_behaviour_and_nan_are_refused():
    with pytest.raises(ClearheadError, match="use a task that this model does"):
        faithfulness(double(1, 1), double(1, 1), double(1, 1))
    with pytest.raises(NonFiniteError, match="the whole model is NaN or infinite on prompt 1"):
        faithfulness(double(1, 1), double(1, 1), double(1, float("nan")))


def test_crossings_of_a_curve_that_falls_back():
    counts, curve = [0, 1, 2, 3, 5, 8], double(0, 0.95, 0.5, 0.9, 1.4, 1.0)
    assert first_crossing(counts, curve, 0.9) == 1
    assert stable_crossing(counts, curve, 0.9) == 3
    assert first_crossing(counts, curve, 1.5) is None
    assert stable_crossing(counts, curve, 1.2) is None


def test_areas():
    assert area([0, 2, 4], double(0, 1, 1)) == pytest.approx(0.75)
    ones = torch.ones(len(MIB_SHARES), dtype=torch.float64)
    assert cpr(ones) == pytest.approx(0.999)
    assert cmd(ones) == 0
    assert cmd(ones * 1.5) == pytest.approx(0.4995)
    straight = double(*MIB_SHARES)
    assert cpr(straight) == pytest.approx((1 - 1e-6) / 2)
    assert mib_counts(270) == [0, 0, 1, 2, 5, 13, 27, 54, 135, 270]


def test_resamples_draw_whole_groups():
    templates = ["a", "a", "b", "c", "c", "c"]
    times = resample(templates, draws=200)
    assert torch.equal(times[:, 0], times[:, 1])
    assert torch.equal(times[:, 3], times[:, 4])
    assert torch.equal(times[:, 3], times[:, 5])
    assert torch.equal(times[:, 0] + times[:, 2] + times[:, 3], torch.full((200,), 3.0, dtype=torch.float64))
    assert len({tuple(row.tolist()) for row in times}) == 10  # all ways of drawing three of three


def test_the_interval_of_a_mean_is_that_of_the_normal_law():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = interval((resample(range(400), draws=2000) @ values / 400).tolist())
    assert found is not None
    half = 1.96 * float(values.std()) / 20
    assert found.low == pytest.approx(float(values.mean()) - half, abs=0.02)
    assert found.high == pytest.approx(float(values.mean()) + half, abs=0.02)


def test_an_interval_that_reaches_beyond_every_crossing_is_none():
    assert interval([1, 2, None, 3]) is None
    assert interval([3, 3]) == (3, 3)
    assert interval([*range(1, 1000), None]) == (26, 976)


def test_overlap_and_correlations():
    assert overlap(["a", "b"], ["b", "c"]) == pytest.approx(1 / 3)
    with pytest.raises(ClearheadError, match="empty circuits"):
        overlap([], [])
    assert correlation(double(1, 2, 3), double(2, 4, 6)) == pytest.approx(1)
    assert correlation(double(1, 1), double(2, 4)) is None
    assert rank_correlation(double(1, 2, 30), double(3, 2, 1)) == pytest.approx(-1)
    # ranks 1.5, 1.5, 3 against 1, 2, 3
    assert rank_correlation(double(5, 5, 9), double(1, 2, 3)) == pytest.approx(3**0.5 / 2)
