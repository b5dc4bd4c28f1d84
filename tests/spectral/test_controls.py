"""Controls keep what they claim, tell a planted sparse head from one that cancels, and call no noise sparse."""

import pytest
import torch

from clearhead.model import Model
from clearhead.model.geometry import form_queries_keys
from clearhead.model.weights import attention_norm, fold_attention_norm
from clearhead.spectral.attention_modes import head_modes
from clearhead.spectral.controls import (
    DRAWS,
    Separation,
    bootstrap,
    compare,
    corrected,
    gauge,
    random_rotations,
    shuffle,
    span,
)
from clearhead.spectral.firings import Pairs, express, head_vectors
from clearhead.spectral.sparsity import n_recon, rolls_tovee
from clearhead.spectral.verdicts import VERDICTS, judge
from tests.model.tiny_configs import build


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))


def test_rotations_are_orthogonal_and_without_preferred_sign():
    R = random_rotations(2000, 4, generator())
    assert (R @ R.mT - torch.eye(4)).abs().max() < 1e-5
    assert R[:, 0, 0].mean().abs() < 0.04 and (R[:, 0, 0].square().mean() - 1 / 4).abs() < 0.02


def test_gauge_keeps_every_sum_and_span_keeps_spectrum_and_lengths():
    A, D, R = normal(5, 8), normal(5, 8, seed=1), random_rotations(3, 8, generator())
    S = torch.arange(8.0, 0, -1).expand(5, -1)
    left, right = gauge(A, D, R)(0, 3)
    assert torch.allclose((left * right).sum(-1), (A * D).sum(-1).expand(3, -1), rtol=0, atol=1e-4)
    left, right = span(A, D, S, torch.zeros(5, 8), R)(0, 3)
    x, y = A / S.sqrt(), D / S.sqrt()
    assert torch.allclose((left / S.sqrt()).norm(dim=-1), x.norm(dim=-1).expand(3, -1), rtol=0, atol=1e-4)
    assert torch.allclose((right / S.sqrt()).norm(dim=-1), y.norm(dim=-1).expand(3, -1), rtol=0, atol=1e-4)
    # rotations that do nothing give the head itself
    bias = normal(5, 8, seed=2)
    still = span(A, D, S, bias, torch.eye(8)[None])(0, 1)  # the bias stays, whatever the rotation
    assert torch.allclose(still[0] * still[1], (A * D)[None], rtol=0, atol=1e-5)


def test_shuffle_pairs_queries_with_the_keys_of_other_firings():
    A, D, orders = normal(4, 3), normal(4, 3, seed=1), torch.tensor([[1, 0, 3, 2]])
    left, right = shuffle(A, D, orders)(0, 1)
    assert torch.equal(left[0], A) and torch.equal(right[0], D[[1, 0, 3, 2]])


@pytest.mark.parametrize("chunk", [1, 1 << 18])
def test_comparison_equals_a_loop_over_draws(chunk, monkeypatch):
    monkeypatch.setattr("clearhead.spectral.controls.CHUNK", chunk)
    A, D, R = normal(6, 8), normal(6, 8, seed=1), random_rotations(30, 8, generator())
    prompt = torch.tensor([0, 0, 1, 1, 2, 2])
    found = compare("gauge", gauge(A, D, R), 30, A * D, prompt, generator())
    drawn = torch.stack([(A @ turn) * (D @ turn) for turn in R])
    assert abs(found.sparsity - float(rolls_tovee(drawn).mean())) < 1e-6
    assert found.n_recon == float(n_recon(drawn[:20]).double().quantile(0.5))
    assert abs(found.effect - float((rolls_tovee(drawn).mean(0) - rolls_tovee(A * D)).mean())) < 1e-6
    assert found.low <= found.effect <= found.high
    assert found.p is None  # thirty draws give none


def planted(kind, n=40, r=32):
    """Query and key sides: three modes carry every firing, or independent Gaussians in all of them."""
    A, D = normal(n, r, seed=2), normal(n, r, seed=3)
    if kind == "sparse":
        strong = torch.zeros(r)
        strong[[4, 11, 20]] = 6.0
        A, D = 0.3 * A + strong, 0.3 * D + strong
    return A, D


def verdict_of(kind):
    A, D = planted(kind)
    R, prompt, S = (
        random_rotations(DRAWS, 32, generator(5)),
        torch.arange(40) // 4,
        torch.linspace(2, 0.5, 32).expand(40, -1),
    )
    c = A * D
    found = {
        name: compare(name, draw, DRAWS, c, prompt, generator())
        for name, draw in (("gauge", gauge(A, D, R)), ("span", span(A, D, S, torch.zeros(40, 32), R)))
    }
    verdict = judge(
        rank=32,
        n_firings=40,
        n_sink=0,
        n_texts=10,
        energy=1.0,
        cancellation=float(c.abs().sum(-1).div(c.sum(-1).abs()).quantile(0.5)),
        separations={name: (one, one.p) for name, one in found.items()},
    )
    return verdict, found, c


def test_a_planted_sparse_head_is_separated():
    verdict, found, _ = verdict_of("sparse")
    assert verdict == "sparse, separated"
    assert all(one.p == 1 / (DRAWS + 1) and one.low > 0 for one in found.values())


def test_random_contributions_have_a_small_n_recon_and_are_not_separated():
    verdict, found, c = verdict_of("random")
    # few of 32 modes reach the total, as if the head were sparse; a rotated basis needs as few
    own = float(n_recon(c).double().quantile(0.5))
    assert own <= 6 and abs(found["gauge"].n_recon - own) <= 3
    assert verdict == "not separated"


def test_p_values_of_heads_without_structure_are_no_smaller_than_chance():
    R, prompt, p = random_rotations(DRAWS, 12, generator(5)), torch.arange(15), []
    for head in range(40):
        A, D = normal(15, 12, seed=100 + head), normal(15, 12, seed=200 + head)
        p.append(compare("gauge", gauge(A, D, R), DRAWS, A * D, prompt, generator()).p)
    assert sum(value <= 0.05 for value in p) <= 6 and 0.35 < sum(p) / 40 < 0.65
    assert min(corrected(p)) > 0.05


def structureless(name, basis, steepness):
    """p of the span control for heads with steep spectra whose tokens are Gaussian noise: nothing in them is sparse."""
    hf = build(name).double()
    model = Model(hf, self_test=False)
    steep = torch.linspace(0, -steepness, model.d_head, dtype=torch.float64).exp()
    with torch.no_grad():
        for part, weight in hf.named_parameters():
            if "q_proj.weight" in part or "k_proj.weight" in part:  # rows are features
                weight.mul_(steep.repeat(len(weight) // len(steep))[:, None])
            if "c_attn.bias" in part:
                weight.mul_(3)
    p = []
    for layer in range(model.n_layers):
        modes, weights, norm = head_modes(model, layer), fold_attention_norm(model, layer), attention_norm(model, layer)
        x = norm.normalise(torch.randn(24, 24, model.d_model, generator=generator(layer), dtype=torch.float64))
        q, k, _ = weights.project(x)
        q, k = form_queries_keys(model.geometry(layer), weights, q.detach(), k.detach())
        row, query = torch.arange(24).repeat(3), torch.arange(72) % 20 + 4
        key = (torch.rand(72, generator=generator(9)) * query).long()
        rotations = random_rotations(DRAWS, model.d_head, generator(3)).double()
        for head in range(modes.n_heads):
            which = torch.full_like(row, head)
            x_, d_, score = head_vectors(modes, q, k, row, which, query, key)
            found = express(modes, Pairs(which, row, query, key, key < 0, score, score, x_, d_, score), basis)
            draw = span(found.A, found.D, found.S, found.bias, rotations)
            p.append(compare("span", draw, DRAWS, found.contributions, row, generator()).p)
    return torch.tensor(p)


@pytest.mark.parametrize(("name", "basis"), [("gpt2", "fixed"), ("llama", "offset"), ("gpt_neox", "offset")])
def test_spans_are_no_sparser_than_heads_without_structure(name, basis):
    p = structureless(name, basis, steepness=1)
    assert 0.2 < p.mean() < 0.8 and ((p > 0.05) & (p < 0.95)).double().mean() >= 0.6


def test_a_rotation_makes_spans_no_control_in_the_fixed_basis():
    # why they are left out there: heads without structure look less sparse than their own control
    assert structureless("llama", "fixed", steepness=3).mean() > 0.95


def test_a_steep_spectrum_makes_spans_stricter_not_laxer_in_the_basis_of_offsets():
    # the mean of the other keys is turned by the offset of the one that was chosen, which mixes its modes a little
    assert (structureless("llama", "offset", steepness=3) > 0.05).all()


def test_bootstrap_resamples_prompts():
    prompt = torch.arange(40) // 10
    by_prompt = prompt.double()  # firings of one prompt agree, so only the choice of prompts matters
    low, high = bootstrap(by_prompt, prompt, generator())
    assert low < 0.8 and high > 2.2
    narrow = bootstrap(by_prompt, torch.arange(40), generator())
    assert narrow[1] - narrow[0] < 0.75 * (high - low)
    assert bootstrap(torch.full((6,), 0.25), torch.zeros(6).long(), generator()) == (0.25, 0.25)


def test_p_values_are_corrected_for_their_number():
    assert corrected([]) == []
    p = [0.01, 0.02, 0.03, 0.5]
    # Benjamini and Hochberg by hand: p · m / rank, then the running minimum from the largest
    assert torch.allclose(torch.tensor(corrected(p)), torch.tensor([0.04, 0.04, 0.04, 0.5]))


def separated(q=0.001, low=0.05):
    one = Separation("gauge", 1000, 0.4, 8, 0.1, low, 0.2, 0.001)
    return {"gauge": (one, q), "span": (one, q)}


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({"rank": 0}, "no query–key product"),
        ({"n_firings": 0}, "no firings"),
        ({"n_firings": 4, "n_sink": 96}, "sink"),
        ({"n_firings": 50, "n_sink": 2000}, "sparse, separated"),
        ({"n_firings": 4, "n_sink": 3}, "too few firings"),
        ({"energy": 0.001}, "no token energy"),
        ({"n_firings": 4}, "too few firings"),
        ({"separations": {}}, "not compared"),
        ({"separations": separated(q=0.2)}, "not separated"),
        ({"separations": separated(q=None)}, "not compared"),
        ({"n_texts": 4}, "too few firings"),
        ({"separations": separated(low=-0.01)}, "not separated"),
        ({"cancellation": 3.0}, "sparse but cancelling"),
        ({}, "sparse, separated"),
    ],
)
def test_verdicts(changed, verdict):
    numbers = {
        "rank": 8,
        "n_firings": 50,
        "n_sink": 0,
        "n_texts": 20,
        "energy": 1.0,
        "cancellation": 1.5,
        "separations": separated(),
    }
    assert judge(**(numbers | changed)) == verdict
    assert verdict in VERDICTS
