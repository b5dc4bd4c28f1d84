"""Power laws: planted exponents are recovered, and what carries no fit gets none."""

import numpy as np
import pytest

from clearhead.analysis.fidelity.scaling import fit_power
from clearhead.errors import ClearheadError

SIZES = np.array([1e5, 3e5, 1e6, 3e6, 1e7])


@pytest.mark.parametrize(("b", "c"), [(0.15, 0.1), (0.5, 0.05), (1.2, 0.0)])
def test_planted_exponents_are_recovered(b, c):
    fit = fit_power(SIZES.tolist(), (0.6 * (SIZES / 1e5) ** -b + c).tolist())
    assert (fit.b, fit.c) == (pytest.approx(b, rel=1e-3), pytest.approx(c, abs=1e-3))
    assert fit.rms < 1e-6 and fit.left_out < 1e-5 and fit.degrees == 2
    assert fit.at(5e5) == pytest.approx(0.6 * 5**-b + c, abs=1e-5)


def test_noise_shows_in_the_error_of_the_fit():
    loss = 0.6 * (SIZES / 1e5) ** -0.5 + 0.05
    fit = fit_power(SIZES.tolist(), (loss + np.array([0.01, -0.01, 0.01, -0.01, 0.01])).tolist())
    assert 0.004 < fit.rms < 0.01 and fit.left_out > fit.rms


def test_three_sizes_are_fitted_without_an_error():
    fit = fit_power([1.0, 2.0, 4.0], [1.0, 0.7, 0.55])
    assert fit.degrees == 0 and fit.left_out is None
    assert (fit.b, fit.c) == (pytest.approx(1.0, rel=1e-3), pytest.approx(0.4, abs=1e-3))


@pytest.mark.parametrize(
    ("sizes", "losses", "reason"),
    [
        ([1, 2, 2], [0.3, 0.2, 0.21], "2 different sizes carry no fit"),
        ([1, 2, 4], [0.2, 0.3, 0.4], "do not fall"),
        ([1, 2, 4], [0.3, 0.29, 0.1], "bend in no way"),
    ],
)
def test_what_carries_no_fit_is_refused(sizes, losses, reason):
    with pytest.raises(ClearheadError, match=reason):
        fit_power(sizes, losses)


def test_a_fit_is_not_extrapolated():
    fit = fit_power([1.0, 2.0, 4.0], [1.0, 0.7, 0.55])
    with pytest.raises(ClearheadError, match="says nothing about 8"):
        fit.at(8.0)
