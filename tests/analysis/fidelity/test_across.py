"""FVU over layers: correlation, ratio, and what too few layers do not give."""

import numpy as np
import pytest

from clearhead.analysis.fidelity.across import compare_layers


def test_layers_hard_for_both_give_a_rank_correlation_of_one():
    own = np.linspace(0.1, 0.4, 12)
    found = compare_layers(own, 0.8 * own)
    assert found["rank_correlation"] == pytest.approx(1.0) and found["lower"] == 0
    assert found["ratio"] == pytest.approx(1.25) and found["ratio_interval"] == pytest.approx([1.25, 1.25])


def test_unrelated_layers_have_an_interval_around_zero():
    random = np.random.default_rng(0)
    low, high = compare_layers(random.uniform(0.1, 0.4, 30), random.uniform(0.1, 0.4, 30))["rank_correlation_interval"]
    assert low < 0 < high


def test_four_layers_give_a_ratio_only():
    found = compare_layers([0.1, 0.2, 0.3, 0.4], [0.2, 0.2, 0.3, 0.4])
    assert found["rank_correlation"] is None and found["ratio_interval"] is None and found["lower"] == 1
