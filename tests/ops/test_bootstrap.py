"""Bootstrap intervals: against known distributions, numbers that do not always exist, shares of 0 and 1."""

import numpy as np
import pytest

from clearhead.ops.bootstrap import RESAMPLES, bounds, draw_counts, mean_bounds, share_bounds


def test_every_resample_draws_as_many_cases_as_there_are():
    counts = draw_counts(7, 3)
    assert counts.shape == (RESAMPLES, 7) and bool((counts.sum(1) == 7).all())
    assert np.array_equal(counts, draw_counts(7, 3)) and not np.array_equal(counts, draw_counts(7, [3, 1]))


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = np.random.default_rng(0).normal(5, 2, size=400)
    low, high = mean_bounds(values, 0)
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=half / 5)


def test_numbers_that_seldom_exist_have_no_interval():
    resampled = np.tile(np.arange(100.0)[:, None], (1, 3))
    resampled[40:, 1] = np.nan
    resampled[:49, 2] = np.inf
    low, high = bounds(resampled)
    assert (low[0], high[0]) == pytest.approx((2.475, 96.525)) and np.isnan([low[1], high[1]]).all()
    assert (low[2], high[2]) == pytest.approx((50.25, 97.75))


def test_the_interval_of_a_share_is_that_of_its_resamples():
    drawn = (np.random.default_rng(0).random((4000, 100)) < 0.3).mean(1)
    assert share_bounds(0.3, 100) == pytest.approx(tuple(np.percentile(drawn, (2.5, 97.5))), abs=0.011)
    assert (share_bounds(0.0, 9), share_bounds(1.0, 9)) == ((0.0, 0.0), (1.0, 1.0))
