"""Modes of attention heads: exact sums for every family, invariance to the gauge, the papers' other constructions."""

import dataclasses

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.model.access import Model as Access
from clearhead.model.rope import relative
from clearhead.model.weights import fold_attention_norm
from clearhead.spectral.attention_modes import head_modes, query_key_products, value_output_products
from clearhead.spectral.factored import composition
from clearhead.spectral.sparsity import absolute_sparsity, n_recon, visible
from tests.model.test_weights import EXPERTS, FAMILIES, TOKENS
from tests.model.tiny_configs import build

SINGLE = ("gptj", "codegen", "gpt_neo", "gpt_oss", "ernie4_5")  # these form scores in float32 whatever the weights are
OFF = ("bloom", "falcon", "falcon_alibi", "mpt")  # off the attention interface: q and k are not sites, or have ALiBi


def sums_and_scores(model, layer):
    modes = head_modes(model, layer)
    run = model.run(TOKENS, read=[f"q.{layer}", f"k.{layer}", f"scores.{layer}"])
    A, B = modes.project(run[f"q.{layer}"], run[f"k.{layer}"])
    sums = A @ B.mT
    cap = modes.geometry.softcap
    if cap is not None:
        sums = cap * torch.tanh(sums / cap)
    seen = visible(TOKENS.shape[1], modes.geometry.window)
    scores = run[f"scores.{layer}"]
    if modes.geometry.sinks:  # GPT-OSS keeps its scores less their row's largest: equal up to a constant per query
        sums, scores = (part - part[..., :1] for part in (sums, scores))
        seen = seen & seen[:, :1]  # rows whose window still holds key 0
    return sums[..., seen], scores[..., seen]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in OFF])
def test_contributions_sum_to_the_models_own_score(name):
    double = name not in EXPERTS
    model = Model(build(name).double() if double else build(name), self_test=False)
    for layer in model.attention_layers:
        sums, scores = sums_and_scores(model, layer)
        tolerance = 1e-10 if double and name not in SINGLE else 1e-6
        assert (sums - scores).abs().max() <= tolerance * scores.abs().max()


def test_the_real_precision_is_enough():
    model = Access.load("clearhead-tiny")
    for layer in range(model.n_layers):
        sums, scores = sums_and_scores(model, layer)
        assert (sums - scores).abs().max() <= 1e-4 * scores.abs().max()


def test_modes_are_those_of_the_dense_product():
    model = Model(build("qwen3").double(), self_test=False)
    modes, product = head_modes(model, 0), query_key_products(model, 0)
    dense = product.dense()
    svd = modes.svd
    assert ((svd.U * svd.S[:, None]) @ svd.V.mT - dense).abs().max() < 1e-12 * dense.abs().max()
    assert (svd.S - torch.linalg.svdvals(dense)[:, : svd.S.shape[1]]).abs().max() < 1e-12 * svd.S.max()
    assert svd.error.max() < 1e-12 and (svd.S[:, :-1] >= svd.S[:, 1:]).all()


def test_each_query_head_has_its_own_basis_of_a_shared_key():
    model = Model(build("llama").double(), self_test=False)  # 4 query heads, 2 kv heads
    modes = head_modes(model, 0)
    run = model.run(TOKENS, read=["q.0", "k.0"])
    A, B = modes.project(run["q.0"], run["k.0"])
    assert modes.G_k.shape[0] == 4 and not torch.allclose(B[:, 0], B[:, 1])
    for head in range(4):
        expected = run["q.0"][:, head] @ run["k.0"][:, head // 2].mT * modes.geometry.scale
        assert torch.allclose(A[:, head] @ B[:, head].mT, expected, rtol=0, atol=1e-12)


def test_no_gauge_of_the_head_moves_a_contribution():
    hf = build("gpt2").double()
    model = Model(hf, self_test=False)
    before = head_modes(model, 0)
    run = model.run(TOKENS, read=["q.0", "k.0"])
    A, B = before.project(run["q.0"], run["k.0"])
    dh, mix = model.d_head, torch.randn(model.d_head, model.d_head, dtype=torch.float64)
    fused = hf.transformer.h[0].attn.c_attn
    with torch.no_grad():
        for part, turn in ((0, mix), (1, torch.linalg.inv(mix).T)):
            columns = slice(part * 32 + dh, part * 32 + 2 * dh)  # head 1
            fused.weight[:, columns] = fused.weight[:, columns] @ turn
            fused.bias[columns] = fused.bias[columns] @ turn
    after = head_modes(model, 0)
    again = model.run(TOKENS, read=["q.0", "k.0"])
    A2, B2 = after.project(again["q.0"], again["k.0"])
    assert torch.allclose(after.svd.S, before.svd.S, rtol=0, atol=1e-10)
    for found, expected in ((after.svd.U, before.svd.U), (after.svd.V, before.svd.V)):
        assert torch.allclose(found, expected, rtol=0, atol=1e-8)
    assert torch.allclose(A2, A, rtol=0, atol=1e-8) and torch.allclose(B2, B, rtol=0, atol=1e-8)


def test_biases_are_the_pseudo_inverse_offsets_of_acc():
    model = Model(build("gpt2").double(), self_test=False)
    modes, weights = head_modes(model, 0), fold_attention_norm(model, 0)
    run = model.run(TOKENS, read=["resid_pre.0", "q.0", "k.0"])
    A, B = modes.project(run["q.0"], run["k.0"])
    x = torch.nn.functional.layer_norm(run["resid_pre.0"][0], (model.d_model,), eps=1e-5)
    for head in range(model.n_heads):
        offset_q = weights.b_Q[head] @ torch.linalg.pinv(weights.W_Q[head])
        offset_k = weights.b_K[head] @ torch.linalg.pinv(weights.W_K[head])
        U, S, V = modes.svd.U[head], modes.svd.S[head], modes.svd.V[head]
        expected = ((x + offset_q) @ U * S)[:, None] * ((x + offset_k) @ V)[None] * modes.geometry.scale
        found = A[0, head][:, None] * B[0, head][None]
        assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gptj"])
def test_rotations_are_the_token_space_maps_of_acc(name):
    model = Model(build(name).double(), self_test=False)
    modes, weights = head_modes(model, 0), fold_attention_norm(model, 0)
    run = model.run(TOKENS, read=["q_pre.0", "k_pre.0", "q.0", "k.0"])
    A, B = modes.project(run["q.0"], run["k.0"])
    i, j, ratio = 9, 4, modes.geometry.n_heads // modes.geometry.n_kv_heads
    for head in range(modes.n_heads):
        W_Q, W_K = weights.W_Q[head], weights.W_K[head // ratio]
        x = run["q_pre.0"][0, head, i] @ torch.linalg.pinv(W_Q)  # the part of the query's token that the head reads
        y = run["k_pre.0"][0, head // ratio, j] @ torch.linalg.pinv(W_K)
        turn_q = W_Q @ relative(modes.geometry.rope, i, model.d_head).T @ torch.linalg.pinv(W_Q)
        turn_k = W_K @ relative(modes.geometry.rope, j, model.d_head).T @ torch.linalg.pinv(W_K)
        U, S, V = modes.svd.U[head], modes.svd.S[head], modes.svd.V[head]
        expected = (x @ turn_q @ U * S) * (y @ turn_k @ V) * modes.geometry.scale
        found = A[0, head, i] * B[0, head, j]
        assert (found - expected).abs().max() < 2e-6 * expected.abs().max()  # the models rotate by float32 tables


def _repeated(k, q):
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3"])
def test_the_basis_of_an_offset_sums_to_the_score_at_that_offset(name):
    model = Model(build(name).double(), self_test=False)
    fixed = head_modes(model, 1)
    run = model.run(TOKENS, read=["q.1", "k.1", "scores.1"])
    q, k = fixed.unrotate(run["q.1"]), fixed.unrotate(run["k.1"])
    for offset in (0, -1, -5):
        modes = fixed.at_offset(offset)
        A, B = modes.project(q, k)
        found, scores = ((part).diagonal(offset, -2, -1) for part in (A @ B.mT, run["scores.1"]))
        assert (found - scores).abs().max() < 1e-6 * scores.abs().max()  # the models rotate by float32 tables
        exact = q @ relative(modes.geometry.rope, offset, model.d_head) @ _repeated(k, q).mT * modes.geometry.scale
        assert (A @ B.mT - exact).abs().max() < 1e-12 * exact.abs().max()
        turn = relative(modes.geometry.rope, offset, model.d_head)
        product = query_key_products(model, 1)
        dense = product.A @ turn @ product.B.mT
        svd = modes.svd
        assert ((svd.U * svd.S[:, None]) @ svd.V.mT - dense).abs().max() < 1e-10 * dense.abs().max()
    assert torch.allclose(fixed.at_offset(0).svd.S, fixed.svd.S * fixed.geometry.rope.scaling**2)


def test_offsets_are_refused_where_they_mean_nothing(monkeypatch):
    modes = head_modes(Model(build("gpt2"), self_test=False), 0)
    with pytest.raises(ClearheadError, match="no rotary embedding"):
        modes.at_offset(-1)
    rotated = head_modes(Model(build("llama"), self_test=False), 0).at_offset(-1)
    with pytest.raises(ClearheadError, match="fixed basis"):
        rotated.at_offset(-2)


@pytest.mark.parametrize("rank", [0, 3])
def test_rank_deficient_heads_keep_exact_sums_and_finite_numbers(rank):
    hf = build("gpt2").double()
    model = Model(hf, self_test=False)
    with torch.no_grad():
        hf.transformer.h[0].attn.c_attn.weight[:, rank : model.d_head] = 0  # head 0's queries: a bias in the rest
    modes = head_modes(model, 0)
    assert modes.svd.rank.tolist() == [rank, 8, 8, 8] and modes.outside[0].sum() == 8 - rank
    sums, scores = sums_and_scores(model, 0)
    assert (sums - scores).abs().max() < 1e-10 * scores.abs().max()
    for part in (modes.G_q, modes.G_k, modes.svd.U, modes.svd.V, modes.svd.error):
        assert torch.isfinite(part).all()


def test_a_planted_pair_is_one_mode_of_every_score():
    hf = build("gpt2").double()
    model = Model(hf, self_test=False)
    x, y = torch.randn(2, 32, dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()  # what a LayerNorm's centring leaves as it is
    x, y = x / x.norm(), y / y.norm()
    norm, attention = hf.transformer.h[0].ln_1, hf.transformer.h[0].attn.c_attn
    with torch.no_grad():
        norm.weight.fill_(1)
        norm.bias.zero_()
        attention.bias.zero_()
        attention.weight[:, :8] = 0
        attention.weight[:, 32:40] = 0
        attention.weight[:, 0], attention.weight[:, 32] = 5.0 * x, y
    modes = head_modes(model, 0)
    assert torch.isclose(modes.svd.S[0, 0], torch.tensor(5.0, dtype=torch.float64))
    assert torch.isclose(
        (modes.svd.U[0, :, 0] @ x) * (modes.svd.V[0, :, 0] @ y), torch.tensor(1.0, dtype=torch.float64)
    )
    run = model.run(TOKENS, read=["q.0", "k.0"])
    A, B = modes.project(run["q.0"], run["k.0"])
    assert torch.allclose(absolute_sparsity(A, B)[0, 0], torch.full((12, 12), 1 / 8, dtype=torch.float64))
    contributions = A[0, 0, 5:6, None] * B[0, 0, None, :6]
    assert (n_recon(contributions) == 1).all()


def test_composition_of_real_products_is_that_of_the_dense_ones():
    model = Model(build("llama").double(), self_test=False)
    ov, qk = value_output_products(model, 0), query_key_products(model, 1)
    weights = fold_attention_norm(model, 0).per_head()
    assert torch.allclose(ov.dense(), weights.W_V @ weights.W_O, rtol=0, atol=1e-12)
    dense = ov.dense()[2] @ qk.dense()[1]
    expected = dense.norm() / ov.dense()[2].norm() / qk.dense()[1].norm()
    one = dataclasses.replace(ov, A=ov.A[2], B=ov.B[2])
    assert torch.isclose(composition(one, dataclasses.replace(qk, A=qk.A[1], B=qk.B[1])), expected)


def test_layers_without_a_query_key_product_are_refused_by_name():
    model = Model(build("qwen3_next"), self_test=False)
    with pytest.raises(ClearheadError, match="no softmax attention"):
        head_modes(model, 0)


def test_tensors_of_another_layer_are_refused():
    modes = head_modes(Model(build("llama"), self_test=False), 0)
    with pytest.raises(ClearheadError, match="4 query heads and 2 key heads"):
        modes.project(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8))
