"""Matching heads over seeds: a permuted copy is itself, another Lorsa is chance, a turned head is another."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from clearhead.analysis.entries import entries_of
from clearhead.analysis.seeds import STABLE, activations, likeness, match, stability
from clearhead.errors import ClearheadError

B, T = 6, 12
TOKENS = B * (T - 1)


def activations_of(lorsa, x):
    return activations(entries_of(lorsa.encode(x), np.arange(B), 1), lorsa.n_heads, B, T)


@pytest.fixture(scope="module")
def x():
    return torch.randn(B, T, 16, generator=torch.Generator().manual_seed(4))


def permuted(make_lorsa, lorsa, order):
    """The same heads in another order: whole groups change places, and heads inside their group."""
    copy = make_lorsa(activation=lorsa.config.activation)
    groups = order[::6] // 6
    with torch.no_grad():
        for name in ("W_V", "W_O", "b_V"):
            getattr(copy, name).copy_(getattr(lorsa, name)[order])
        for name in ("W_Q", "W_K", "b_Q", "b_K"):
            getattr(copy, name).copy_(getattr(lorsa, name)[groups])
    return copy


def orders():
    generator = torch.Generator().manual_seed(1)
    return torch.cat([6 * group + torch.randperm(6, generator=generator) for group in (2, 0, 3, 1)])


def test_a_permuted_copy_is_found_again(make_lorsa, lorsa, x):
    order = orders()
    copy = permuted(make_lorsa, lorsa, order)
    z, theirs = activations_of(lorsa, x), activations_of(copy, x)
    found = match(likeness(lorsa, copy, z, theirs, TOKENS))
    active = np.asarray(z.sum(0))[0] > 0
    assert active.sum() > 20
    assert (
        np.allclose(found.alike[active], 1) and (order.numpy()[found.partner[active]] == np.flatnonzero(active)).all()
    )
    whole = stability(lorsa, z, [(copy, theirs)], n_blocks=B, context=T)
    assert np.allclose(whole.value[active], 1) and np.isnan(whole.value[~active]).all()
    assert np.allclose(whole.high[active], 1) and (whole.chance[active] < 0.9).all()


def test_an_independent_lorsa_is_chance(make_lorsa, lorsa, x):
    other = make_lorsa(seed=7)
    found = stability(lorsa, activations_of(lorsa, x), [(other, activations_of(other, x))], n_blocks=B, context=T)
    real, chance = np.nanmean(found.value), np.nanmean(found.chance)
    assert real < 0.3 and abs(real - chance) < 0.1 and np.nanmean(found.value >= STABLE) < 0.1
    assert (found.low <= found.high + 1e-12)[~np.isnan(found.low)].all()


def test_likeness_by_definition(make_lorsa, lorsa, x):
    other = make_lorsa(seed=7)
    z, theirs = activations_of(lorsa, x), activations_of(other, x)
    alike = likeness(lorsa, other, z, theirs, TOKENS)
    rows = np.arange(B * T) % T > 0
    dense, others = z.toarray()[rows], theirs.toarray()[rows]
    for n, m in ((0, 0), (3, 11), (20, 5)):
        a, b = dense[:, n], others[:, m]
        write, write_other = lorsa.W_O[n], other.W_O[m]
        cosine = float(write @ write_other / write.norm() / write_other.norm())
        expected = max(0, np.corrcoef(a, b)[0, 1]) * max(0, cosine) if a.any() and b.any() else 0.0
        assert alike[n, m] == pytest.approx(expected, abs=1e-6)


def test_a_head_turned_round_is_the_same_only_with_signs(make_lorsa, x):
    for activation, same in (("signed-topk", True), ("topk", False)):
        lorsa, copy = make_lorsa(activation=activation), make_lorsa(activation=activation)
        with torch.no_grad():
            for weight in (copy.W_V, copy.b_V, copy.W_O):
                weight.neg_()
        z = activations_of(lorsa, x)
        found = match(likeness(lorsa, copy, z, activations_of(copy, x), TOKENS))
        active = np.asarray(abs(z).sum(0))[0] > 0
        assert np.allclose(found.alike[active], 1) == same


def test_fewer_heads_leave_some_without_partner():
    found = match(np.array([[0.9, 0.1], [0.8, 0.7], [0.2, 0.3]]))
    assert found.partner.tolist() == [0, 1, -1] and found.alike.tolist() == [0.9, 0.7, 0.0]


def test_lorsas_that_do_not_belong_together_are_refused(make_lorsa, lorsa, x):
    z = activations_of(lorsa, x)
    other = make_lorsa()
    other.provenance["layer"] = 0
    with pytest.raises(ClearheadError, match="trained on layer 1, the other on 0"):
        likeness(lorsa, other, z, z, TOKENS)
    with pytest.raises(ClearheadError, match="signed activations"):
        likeness(lorsa, make_lorsa(activation="signed-topk"), z, z, TOKENS)
    with pytest.raises(ClearheadError, match="at least one other"):
        stability(lorsa, z, [], n_blocks=B, context=T)


def test_heads_that_never_vary_do_not_come_back_and_intervals_hold_the_value(make_lorsa):
    """Over the same tokens: were position 0 counted, an amount that is always the same would seem to vary there."""
    lorsa = make_lorsa()
    z = np.abs(np.random.default_rng(0).normal(size=(B, T, lorsa.n_heads)))
    z[:, :, 0], z[:, :, 1] = 0.7, 0.1
    z[:, 0] = 0
    z = csr_matrix(z.reshape(B * T, -1))
    back = stability(lorsa, z, [(lorsa, z)], n_blocks=B, context=T)
    assert back.value[:2].tolist() == back.low[:2].tolist() == back.high[:2].tolist() == [0, 0]
    assert np.allclose(back.value[2:], 1)
    noise = z.multiply(np.random.default_rng(1).random(z.shape) < 0.5).tocsr()
    alone = stability(lorsa, z[:T], [(lorsa, noise[:T])], n_blocks=1, context=T)
    assert np.allclose(alone.low, alone.value) and np.allclose(alone.high, alone.value)
