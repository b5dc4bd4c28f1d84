"""Gated attention: values and gradients of the reference against loops, differences and the dense model; the noise."""

import math

import pytest
import torch
import torch.nn.functional as F

from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.ops.gated import Noise, gated_attention_reference, noise_keys, noise_words, uniforms

SCALE = 0.4
NOISE = Noise(seed=11, layer=3)


def problem(b=2, h=4, g=2, t=7, dh=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(b, h, t, dh, generator=draw, dtype=torch.float64)
    k, v = (torch.randn(b, g, t, dh, generator=draw, dtype=torch.float64) for _ in range(2))
    return q, k, v, torch.randn(h, generator=draw, dtype=torch.float64)


def by_loops(q, k, v, bias, mode, first=None, sink=None):
    """Output, log-denominator, expected and open edges and leak from the definition, one pair at a time."""
    b, h, t, _ = q.shape
    group = h // k.shape[1]
    drawn = uniforms(noise_keys(NOISE, b, h, q.device), torch.arange(t), torch.arange(t))
    out, rows = torch.zeros(b, h, t, v.shape[-1], dtype=torch.float64), torch.zeros(4, b, h, t, dtype=torch.float64)
    for n in range(b):
        for head in range(h):
            for i in range(t):
                seen = range(0 if first is None else int(first[n, i]), i + 1)
                score = {j: SCALE * float(q[n, head, i] @ k[n, head // group, j]) for j in seen}
                x = {j: s + float(bias[head]) for j, s in score.items()}
                sigma = {j: 1 / (1 + math.exp(-one)) for j, one in x.items()}
                is_open = {
                    "open": lambda j: True,
                    "hard": lambda j, x=x: x[j] > 0,
                    "sampled": lambda j, s=sigma, n=n, head=head, i=i: float(drawn[n, head, i, j]) < s[j],
                }[mode]
                opened = [j for j in seen if is_open(j)]
                counted = seen if sink is None else opened
                z = sum(math.exp(score[j]) for j in counted) + (0 if sink is None else math.exp(float(sink[head])))
                for j in opened:
                    out[n, head, i] += math.exp(score[j]) / z * v[n, head // group, j]
                leak = 0 if sink is not None else sum(math.exp(score[j]) / z for j in seen if j not in opened)
                log = math.log(z) if z else -math.inf
                rows[:, n, head, i] = torch.tensor([log, sum(sigma.values()), len(opened), leak], dtype=torch.float64)
    return out, *rows


@pytest.mark.parametrize("mode", ["sampled", "hard", "open"])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_values_are_the_definition(mode, with_sink, masked):
    q, k, v, bias = problem()
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64) if with_sink else None
    first = torch.tensor([[0, 0, 0, 1, 4, 4, 7], [0, 1, 2, 3, 4, 5, 6]]) if masked else None
    found = gated_attention_reference(q, k, v, bias, mode=mode, scale=SCALE, noise=NOISE, first=first, sink=sink)
    expected = by_loops(q, k, v, bias, mode, first, sink)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", ["straight_through", "exact"])
@pytest.mark.parametrize("mode", ["sampled", "hard"])
@pytest.mark.parametrize("with_sink", [False, True])
def test_gradients_are_the_formulas(mode, estimator, with_sink):
    q, k, v, bias = problem(g=4)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64) if with_sink else None
    leaves = [x.requires_grad_() for x in (q, k, v, bias, *([sink] if with_sink else []))]
    slope = 0.3
    found = gated_attention_reference(
        *leaves[:4], mode=mode, scale=SCALE, noise=NOISE, sink=sink, slope=slope, estimator=estimator
    )
    draw = torch.Generator().manual_seed(1)
    d_out = torch.randn(found.out.shape, generator=draw, dtype=torch.float64)
    d_expected = torch.randn(found.expected.shape, generator=draw, dtype=torch.float64)
    given = torch.autograd.grad([found.out, found.expected], leaves, [d_out, d_expected])

    with torch.no_grad():
        t = q.shape[2]
        seen = torch.ones(t, t, dtype=torch.bool).tril()
        scores = (q @ k.mT * SCALE).masked_fill(~seen, -torch.inf)
        x = scores + bias[:, None, None]
        p = x.sigmoid()
        u = uniforms(noise_keys(NOISE, 2, 4, q.device), torch.arange(t), torch.arange(t)).double()
        M = ((u < p) if mode == "sampled" else (x > 0)) & seen
        s = p if mode == "hard" or estimator == "exact" else 1 / (1 + (-x).exp() * u / (1 - u))
        slant = torch.where(seen, s * (1 - s), 0)
        P = (scores - found.lse[..., None]).exp()
        G = d_out @ v.mT
        D = (d_out * found.out).sum(-1, keepdim=True)
        length = (torch.arange(t)[:, None] - torch.arange(t)).double()
        gate = (P.clamp(max=1) * (G - D) if with_sink else P * G) * slant
        gate = gate + d_expected[..., None] * (1 + slope * length) * torch.where(seen, p * (1 - p), 0)
        dS = (M * P * (G - D) if with_sink else P * (M * G - D)) + gate
        expected = [SCALE * dS @ k, SCALE * dS.mT @ q, (M * P).mT @ d_out, gate.sum((0, 2, 3))]
        if with_sink:
            expected.append(-((sink[:, None] - found.lse).exp() * D[..., 0]).sum((0, 2)))
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_smooth_paths_agree_with_differences():
    """Away from a flip of a gate, outputs are smooth: gradients agree with differences."""
    q, k, v, bias = problem(t=4, g=4)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def opened(*x):
        return gated_attention_reference(*x, bias, mode="open", scale=SCALE).out

    def price(q, k, bias):
        return gated_attention_reference(q, k, v, bias, mode="hard", scale=SCALE, slope=0.2).expected

    assert torch.autograd.gradcheck(opened, leaves)
    assert torch.autograd.gradcheck(price, [q, k, bias.requires_grad_()])


def test_open_gates_are_dense_attention_and_wide_open_ones_too():
    q, k, v, bias = problem(t=33)
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    for mode, at in (("open", bias), ("sampled", bias + 40), ("hard", bias + 40)):
        found = gated_attention_reference(q, k, v, at, mode=mode, scale=SCALE, noise=NOISE)
        torch.testing.assert_close(found.out, dense, rtol=1e-12, atol=1e-12)
        assert torch.equal(found.opened[0, 0], torch.arange(1, 34, dtype=torch.int32))


@pytest.mark.parametrize("with_sink", [False, True])
def test_a_row_without_open_edges_is_exactly_zero(with_sink):
    q, k, v, bias = problem()
    sink = torch.zeros(4, dtype=torch.float64) if with_sink else None
    found = gated_attention_reference(q, k, v, bias - 1e4, mode="sampled", scale=SCALE, noise=NOISE, sink=sink)
    assert not found.out.any() and not found.opened.any()
    assert torch.isfinite(found.lse).all()


def test_a_closed_key_leaks_through_the_denominator_and_not_with_a_sink():
    q, k, v, bias = problem(b=1, h=1, g=1)
    bias, moved = bias - 30, k.clone()
    moved[0, 0, 2] *= 1.5
    bias = torch.zeros_like(bias)
    scores = q[0, 0] @ k[0, 0].T * SCALE
    closed = (scores[2:, 2] < 0) & ((q[0, 0, 2:] @ moved[0, 0, 2]) < 0)
    assert closed.any()
    for sink, differs in ((None, True), (torch.zeros(1, dtype=torch.float64), False)):
        before, after = (
            gated_attention_reference(q, x, v, bias, mode="hard", scale=SCALE, sink=sink).out[0, 0, 2:][closed]
            for x in (k, moved)
        )
        open_rows = before.abs().sum(-1) > 0
        assert open_rows.any()
        assert bool((before != after)[open_rows].any()) == differs


def test_expected_edges_are_the_mean_of_the_sampled_ones():
    q, k, v, bias = problem(b=1, t=12)
    draws = [
        gated_attention_reference(q, k, v, bias, mode="sampled", scale=SCALE, noise=Noise(seed)) for seed in range(400)
    ]
    mean = torch.stack([draw.opened.double() for draw in draws]).mean(0)
    assert (mean - draws[0].expected).abs().max() < 5 * math.sqrt(12 * 0.25 / 400)


def test_noise_is_uniform_and_independent_across_rows_heads_layers_and_seeds():
    rows = torch.arange(256)
    sources = [Noise(0), Noise(1), Noise(0, layer=1), Noise(0, batch=1), Noise(0, head=1)]
    drawn = [uniforms(noise_keys(source, 1, 1, rows.device), rows, rows).flatten().double() for source in sources]
    n = drawn[0].numel()
    for one in drawn:
        assert one.min() > 0 and one.max() < 1
        counts = torch.histc(one, 64, 0, 1)
        assert ((counts - n / 64).square() / (n / 64)).sum() < 63 + 5 * math.sqrt(2 * 63)
    table = torch.corrcoef(torch.stack([*drawn, drawn[0].roll(1), drawn[0].roll(256)]))
    assert (table - torch.eye(7)).abs().max() < 5 / math.sqrt(n)


def test_noise_belongs_to_the_global_place_and_to_nothing_else():
    everything = noise_keys(Noise(5, layer=2), 3, 4, torch.device("cpu"))
    part = noise_keys(Noise(5, layer=2, batch=1, head=2), 2, 2, torch.device("cpu"))
    assert torch.equal(everything[1:, 2:], part)
    rows, columns = torch.arange(40), torch.arange(30)
    words = noise_words(everything, rows, columns)
    assert torch.equal(words[..., 7:9, 11:], noise_words(everything, rows[7:9], columns[11:]))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mode": "soft"}, UnknownNameError, "gate mode"),
        ({"mode": "sampled", "noise": None}, ClearheadError, "need noise="),
        ({"estimator": "guess"}, UnknownNameError, "estimator"),
        ({"sink": torch.zeros(3)}, ClearheadError, r"sink of shape \[3\]; expected \[4\]"),
        ({"first": torch.zeros(2, 7)}, ClearheadError, "expected integers"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    q, k, v, bias = problem()
    with pytest.raises(error, match=message):
        gated_attention_reference(q, k, v, bias, **{"mode": "hard", "scale": SCALE} | change)
    with pytest.raises(ClearheadError, match="heads that divides"):
        gated_attention_reference(q[:, :3], k, v, bias[:3], mode="hard", scale=SCALE)


def test_beside_a_huge_score_of_a_closed_edge_the_denominator_is_the_sink():
    q, k, v, bias = problem(b=1, h=1, g=1, t=2)
    found = gated_attention_reference(
        q * 1e4, k, v, bias - 1e9, mode="hard", scale=SCALE, sink=torch.tensor([-3.0], dtype=torch.float64)
    )
    assert torch.equal(found.lse, torch.full_like(found.lse, -3.0)) and not found.out.any()
