"""The linear share of an error: a planted map is found, noise is not, and only unseen blocks count."""

import pytest
import torch

from clearhead.analysis.fidelity.linear import CHOOSE, FIT, TEST, LinearShare, fold_of


def shares(make, n=1500, seed=0):
    generator = torch.Generator().manual_seed(seed)
    share = LinearShare(8, 6)
    for fold in (FIT, CHOOSE, TEST):
        x = torch.randn(n, 8, generator=generator)
        share.add(fold, x, make(x, torch.randn(n, 6, generator=generator)))
    return share.r_squared()


@pytest.fixture
def weights():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


def test_a_planted_map_is_recovered(weights):
    assert shares(lambda x, _: x @ weights + 5.0) == pytest.approx(1.0, abs=1e-6)


def test_the_share_is_that_of_the_planted_part(weights):
    signal = float(weights.square().sum() / 6)  # variance per dimension of x @ weights, beside noise of variance 4
    assert shares(lambda x, noise: x @ weights + 2 * noise) == pytest.approx(signal / (signal + 4), abs=0.03)


def test_noise_is_not_predicted():
    assert shares(lambda _, noise: noise) == pytest.approx(0.0, abs=0.02)


def test_what_held_only_where_it_was_fitted_does_not_count(weights):
    share = LinearShare(8, 6)
    generator = torch.Generator().manual_seed(0)
    for fold, sign in ((FIT, 1), (CHOOSE, 1), (TEST, -1)):
        x = torch.randn(800, 8, generator=generator)
        share.add(fold, x, sign * x @ weights)
    assert share.r_squared() < -2


def test_parts_are_contiguous_and_empty_ones_give_no_number():
    assert [fold_of(block, 8) for block in range(8)] == [FIT] * 4 + [CHOOSE] * 2 + [TEST] * 2
    share = LinearShare(2, 2)
    share.add(FIT, torch.ones(4, 2), torch.ones(4, 2))
    assert share.r_squared() is None
