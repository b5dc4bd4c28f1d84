"""Effects of removing heads: the cases are where the heads are active, and each effect is that of the removal."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from clearhead.analysis.entries import entries_of
from clearhead.analysis.head_effects import KINDS, SIGNED, _changes, measure_heads
from clearhead.analysis.seeds import activations
from clearhead.circuits.patching.unit_effects import EffectMeter
from clearhead.dictionaries.init import from_attention
from clearhead.errors import ClearheadError
from clearhead.model.norms import final_norm, unembedding

B, T = 4, 16


@pytest.fixture(scope="module")
def setting(model):
    """An exact copy of the tiny model's first layer, of which the 6 largest heads of a token count."""
    tokens = torch.randint(0, model.d_vocab, (B, T), generator=torch.Generator().manual_seed(3))
    lorsa = from_attention(model.weights(0), model.geometry(0)).requires_grad_(False)
    x = model.run(tokens, read=["attn_in.0"])["attn_in.0"]
    codes = lorsa(x, k=6).codes
    z = activations(entries_of(codes, np.arange(B), 1), lorsa.n_heads, B, T)
    return EffectMeter(model, 0), lorsa, z, tokens


def test_removing_a_head_is_measured_where_it_is_active(setting, model):
    meter, lorsa, z, tokens = setting
    heads = np.argsort(-np.diff(z.tocsc().indptr))[:5]
    found = measure_heads(meter, lorsa, z, tokens, [[int(head)] for head in heads], cases=3)
    assert sorted(found.values) == sorted(KINDS) and np.bincount(found.unit).tolist() == [3] * 5
    W_U, _ = unembedding(model)
    norm = final_norm(model)
    for case in (0, 7, 14):
        head, (block, position) = int(heads[found.unit[case]]), divmod(int(found.token[case]), T)
        activation = z[found.token[case], head]
        assert activation != 0 and 0 < position < T - 1
        write = lorsa.W_O[head]
        logits = torch.sign(torch.tensor(z[:, [head]].sum())) * write @ W_U.detach()
        u = W_U.detach().T
        u = u[logits.topk(10).indices].mean(0) - u[logits.topk(10, largest=False).indices].mean(0)
        last = []
        for factor in (1, 0):

            def edit(y, _, factor=factor, block=block, position=position, write=write, activation=activation):
                y = y.clone()
                y[block, position] += (factor - 1) * activation * write
                return y

            site = f"resid_post.{model.n_layers - 1}"
            run = model.run(tokens, edit={"attn_out.0": edit}, read=[site], path="eager")
            last.append(run[site][block, position])
        expected = (norm.normalise(last[0]) - norm.normalise(last[1])) @ u
        removed = found.presence()["own"]
        assert removed["effect"][case] == pytest.approx(float(expected), abs=1e-4)
        direct = activation * norm.centre(write) @ u * norm.frozen_scale(last[0])[0]
        assert removed["direct"][case] == pytest.approx(float(direct), rel=1e-3)
        assert found.values["own"]["effect"][0, case] == -removed["effect"][case]
    assert all((found.values[kind]["kl"] > 0).all() for kind in KINDS)


def test_a_family_is_the_sum_of_its_members(setting):
    meter, lorsa, z, tokens = setting
    heads = np.argsort(-np.diff(z.tocsc().indptr))[:4].tolist()
    family = measure_heads(meter, lorsa, z, tokens, [heads], cases=400)
    single = measure_heads(meter, lorsa, z, tokens, [[head] for head in heads], cases=400)
    active = np.unique(single.token)
    assert family.token.tolist() == active.tolist()
    alone = [np.flatnonzero(single.token == token) for token in active]
    one = [place for place, cases in enumerate(alone) if len(cases) == 1]
    for place in one[:5]:  # where one member is active, the family costs what that member costs
        expected = single.values["own"]["kl"][0][alone[place][0]]
        assert family.values["own"]["kl"][0][place] == pytest.approx(expected, rel=1e-3)
    assert one


def test_small_factors_up_and_down_are_the_gradient(setting):
    meter, lorsa, z, tokens = setting
    unit = [[int(np.argmax(np.diff(z.tocsc().indptr)))]]
    found = measure_heads(meter, lorsa, z, tokens, unit, cases=4, becomes=(0, 1.01, 0.99))
    numbers = found.values["own"]
    assert numbers["effect"].shape == (3, 4) and np.abs(numbers["effect"][0]).max() > 0.05
    for name in SIGNED:
        assert np.allclose(numbers[name][1], -numbers[name][2], rtol=0.05, atol=1e-4)
    for kind in KINDS:
        assert np.allclose(found.values[kind]["effect"][1], found.values[kind]["gradient"][1], rtol=0.05, atol=1e-4)


def test_patches_put_another_activation_in_place(setting):
    """Read off the direct effect, which is linear in the change."""
    meter, lorsa, z, tokens = setting
    heads = np.argsort(-np.diff(z.tocsc().indptr))[:3].tolist()
    found = measure_heads(meter, lorsa, z, tokens, [heads[:1], heads], cases=6, becomes=("mean", "elsewhere", 0))
    direct = found.values["own"]["direct"]
    own = z[:, heads[0]].toarray()[:, 0]
    first = found.unit == 0
    ratio = 1 - direct[:2, first] / direct[2, first]  # becomes / z
    assert np.allclose(ratio[0] * own[found.token[first]], own[own != 0].mean(), rtol=1e-4)
    elsewhere = ratio[1] * own[found.token[first]]
    assert all(np.isclose(own[own != 0], value, rtol=1e-4).any() for value in elsewhere)
    assert not np.isclose(elsewhere, own[found.token[first]], rtol=1e-6).any()


def test_a_family_elsewhere_is_as_it_is_together_at_one_token(setting):
    _, lorsa, z, _ = setting
    heads = np.argsort(-np.diff(z.tocsc().indptr))[:3]
    family = z[:, heads].toarray()
    token = np.flatnonzero(family.any(1))[:5]
    members = np.zeros((5, lorsa.n_heads))
    members[:, heads] = 1
    found = _changes(z, csr_matrix(members), token, ("elsewhere", "mean"), np.random.default_rng(0))
    elsewhere, mean = (family[token] + change.toarray()[:, heads] for change in found)
    active = family[family.any(1)]
    assert all(np.isclose(active, row).all(1).any() for row in elsewhere) and not np.allclose(elsewhere, family[token])
    assert np.allclose(mean, active.mean(0))


def test_what_cannot_be_measured_is_refused(setting):
    meter, lorsa, z, tokens = setting
    never = np.flatnonzero(np.diff(z.tocsc().indptr) == 0)
    with pytest.raises(ClearheadError, match="none of these heads is active"):
        measure_heads(meter, lorsa, z, tokens, [[int(never[0])]])
    with pytest.raises(ClearheadError, match="no head 999"):
        measure_heads(meter, lorsa, z, tokens, [[999]])
    with pytest.raises(ClearheadError, match="changes nothing"):
        measure_heads(meter, lorsa, z, tokens, [[0]], becomes=(0, 1))
