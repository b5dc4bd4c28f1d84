"""Pairs that singular vectors mix: what separation recovers, what it says of its own result, and what it refuses."""

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.spectral.ica import separate_pairs
from clearhead.spectral.planted import cone_features, measure_recovery, plant_pairs

DTYPE = torch.float64


@pytest.mark.parametrize("seed", range(3))
def test_separation_recovers_twenty_pairs_in_a_cone(seed):
    """The defaults of planted.py: 0.31 raw, 0.77 unwhitened, 0.97 separated."""
    found = measure_recovery(plant_pairs(seed=seed))
    assert found.raw < 0.4
    assert 0.6 < found.unwhitened <= 0.80
    assert found.separated >= 0.95 and found.converged
    assert found.concentration > 0.85


def test_a_single_pair_needs_no_separation():
    found = measure_recovery(plant_pairs(pairs=1, samples=4000))
    assert found.raw < 0.6 and found.unwhitened > 0.99 and found.separated == pytest.approx(found.unwhitened, abs=1e-9)


def test_more_features_than_modes_give_as_many_directions_and_say_less_of_each():
    world = plant_pairs(samples=4000)
    fewer, enough = measure_recovery(world, modes=10), measure_recovery(world)
    assert fewer.separated < 0.85 < enough.separated
    assert fewer.separated > fewer.unwhitened


def test_modes_that_hold_no_pair_show_in_the_concentration():
    world = plant_pairs(samples=4000)
    assert measure_recovery(world, modes=50).concentration < 0.6 < measure_recovery(world).concentration


def orthogonal_pairs(n: int = 4000, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens with 6 orthogonal sparse features, and the features as columns."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.linalg.qr(torch.randn(12, 6, dtype=DTYPE, generator=generator))[0]
    f = torch.rand(n, 6, dtype=DTYPE, generator=generator) * (torch.rand(n, 6, generator=generator) < 0.2)
    return f @ features.mT, features


def separate(tokens: torch.Tensor, U: torch.Tensor, S: torch.Tensor, V: torch.Tensor, seed: int = 0):
    return separate_pairs(tokens @ U, tokens @ V, U, S, V, torch.cov(tokens.mT), seed)


def test_partners_signs_and_strengths_are_those_of_the_planted_pairs():
    """Three pairs (0,3) (1,4) (2,5) with weights 2, -1, 0.5, hidden in a rotated basis of the same product."""
    tokens, features = orthogonal_pairs()
    weights = torch.tensor([2.0, -1.0, 0.5], dtype=DTYPE)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=DTYPE, generator=torch.Generator().manual_seed(9)))[0]
    U, V = features[:, :3] @ turn, features[:, 3:] * weights @ turn
    S = V.norm(dim=0)
    found = separate(tokens, U, S, V / S)
    deviation = (tokens @ features).std(0, correction=0)
    torch.testing.assert_close(found.strength, weights * deviation[:3] * deviation[3:], rtol=0.05, atol=0)
    # the signs of the features are those of their large values, whatever the weight's sign
    assert float((found.query * features[:, :3]).sum(0).min()) > 0.99
    assert float((found.key * features[:, 3:]).sum(0).min()) > 0.99
    assert found.concentration > 0.99 and found.converged and not bool(found.gaussian.any())
    torch.testing.assert_close(found.query_reads.norm(dim=0), torch.ones(3, dtype=DTYPE))


def test_the_same_seed_gives_the_same_pairs_and_another_the_same_features():
    tokens, features = orthogonal_pairs()
    arguments = (tokens, features[:, :3], torch.tensor([3.0, 2.0, 1.0], dtype=DTYPE), features[:, 3:])
    first, again, other = separate(*arguments), separate(*arguments), separate(*arguments, seed=5)
    assert torch.equal(first.query, again.query) and torch.equal(first.strength, again.strength)
    torch.testing.assert_close(first.query, other.query, atol=1e-3, rtol=0)


def test_gaussian_coefficients_are_flagged():
    generator = torch.Generator().manual_seed(0)
    tokens, features = orthogonal_pairs()
    noise = torch.randn(len(tokens), 2, dtype=DTYPE, generator=generator)
    extra = torch.linalg.qr(torch.cat([features, torch.randn(12, 2, dtype=DTYPE, generator=generator)], 1))[0][:, 6:]
    tokens = tokens + noise @ extra.mT
    U = torch.cat([features[:, :2], extra], 1)
    V = features[:, 2:]
    found = separate(tokens, U, torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=DTYPE), V)
    along = (found.query.mT @ extra).norm(dim=1) > 0.9
    assert along.sum() == 2 and torch.equal(found.gaussian, along)


def test_a_product_of_zero_has_pairs_of_strength_zero():
    tokens, features = orthogonal_pairs()
    found = separate(tokens, features[:, :3], torch.zeros(3, dtype=DTYPE), features[:, 3:])
    assert float(found.strength.abs().max()) == 0 and found.concentration == 0


def test_too_few_positions_and_positions_that_do_not_vary_are_refused():
    tokens, features = orthogonal_pairs(n=5)
    S = torch.ones(3, dtype=DTYPE)
    with pytest.raises(ClearheadError, match="5 positions are too few to separate 3 modes"):
        separate(tokens, features[:, :3], S, features[:, 3:])
    with pytest.raises(ClearheadError, match="rows are the same"):
        separate(torch.ones(20, 12, dtype=DTYPE), features[:, :3], S, features[:, 3:])
    with pytest.raises(ClearheadError, match="60 pairs need 120 features"):
        plant_pairs(pairs=60)


def test_cone_features_have_unit_length_and_the_overlap_of_the_cone():
    """Mean cosine of unit(z + a c) for large d: a² / (1 + a²)."""
    X = cone_features(400, 60, 1.0, torch.Generator().manual_seed(0))
    torch.testing.assert_close(X.norm(dim=0), torch.ones(60, dtype=DTYPE))
    gram = X.mT @ X
    assert float((gram.sum() - 60) / (60 * 59)) == pytest.approx(0.5, abs=0.05)
