"""Every engine of the tiled operation against the float64 reference: values, gradients, equal gates in both passes."""

import pytest
import torch
import torch.nn.functional as F

from clearhead.ops.dispatch import VARIABLE
from clearhead.ops.gated import Noise, gated_attention_reference
from clearhead.ops.gated_cpu import gated_attention_tiled

NOISE = Noise(7, layer=2, batch=5)


def problem(t, h=4, g=2, dh=16):
    draw = torch.Generator().manual_seed(t)
    q = torch.randn(2, h, t, dh, generator=draw, dtype=torch.float64)
    k, v = (torch.randn(2, g, t, dh, generator=draw, dtype=torch.float64) for _ in range(2))
    return q, k, v, torch.randn(h, generator=draw, dtype=torch.float64)


def first_of(kind, t):
    position = torch.arange(t)
    if kind == "all":
        return None
    if kind == "window":
        return (position - 20).clamp_min(0).expand(2, t)
    starts = torch.where(position < t // 3, 0, t // 3)
    starts = torch.where(position == t - 1, t, starts)  # the last row sees nothing
    return torch.stack([starts, torch.zeros_like(starts)])


def run(attend, inputs, sink, dtype, options):
    leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
    kappa = None if sink is None else sink.to(dtype).detach().requires_grad_()
    found = attend(*leaves, scale=0.3, sink=kappa, **options)
    draw = torch.Generator().manual_seed(9)
    upstream = torch.randn(found.out.shape, generator=draw, dtype=torch.float64).to(dtype)
    price = torch.rand(found.expected.shape, generator=draw, dtype=torch.float64).to(dtype)
    wanted = leaves if kappa is None else [*leaves, kappa]
    gradients = torch.autograd.grad((found.out, found.expected), wanted, (upstream, price), allow_unused=True)
    return found, [torch.zeros_like(x) if y is None else y for x, y in zip(wanted, gradients, strict=True)]


@pytest.mark.parametrize("engine", ["c", "torch"])
@pytest.mark.parametrize("t", [1, 7, 100, 150])
@pytest.mark.parametrize("mode", ["sampled", "hard", "open"])
@pytest.mark.parametrize("with_sink", [False, True])
def test_values_and_gradients_are_the_references(engine, t, mode, with_sink, monkeypatch):
    monkeypatch.setenv(VARIABLE, engine)
    inputs = problem(t)
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64) if with_sink else None
    for kind in ("all", "window", "documents"):
        options = {"mode": mode, "noise": NOISE, "first": first_of(kind, t), "slope": 0.01}
        options["estimator"] = "exact" if kind == "window" else "straight_through"
        wide, expected = run(gated_attention_reference, inputs, sink, torch.float64, options)
        tiled = options | {"check": mode == "sampled", "rows": 64}
        found, gradients = run(gated_attention_tiled, inputs, sink, torch.float32, tiled)
        assert torch.equal(found.opened, wide.opened)
        seen = wide.lse.isfinite()
        assert torch.equal(found.lse.isfinite(), seen)
        for one, other in ((found.out, wide.out), (found.expected, wide.expected), (found.leak, wide.leak)):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.lse[seen].double(), wide.lse[seen], rtol=1e-5, atol=1e-5)
        for one, other in zip(gradients, expected, strict=True):
            assert (one.double() - other).abs().max() <= 1e-5 * other.abs().max().clamp_min(1e-3)


@pytest.mark.parametrize("engine", ["c", "torch"])
def test_gates_do_not_depend_on_the_tiles_and_open_ones_are_dense_attention(engine, monkeypatch):
    monkeypatch.setenv(VARIABLE, engine)
    q, k, v, bias = (x.float() for x in problem(130))
    options = {"mode": "sampled", "scale": 0.3, "noise": NOISE}
    small, large = (gated_attention_tiled(q, k, v, bias, rows=rows, **options) for rows in (32, 256))
    assert torch.equal(small.opened, large.opened)
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    wide_open = gated_attention_tiled(q, k, v, bias + 60, **options)
    torch.testing.assert_close(wide_open.out, dense, rtol=1e-5, atol=1e-5)
    closed = gated_attention_tiled(q, k, v, bias - 1e4, **options)
    assert not closed.out.any() and not closed.opened.any()


@pytest.mark.parametrize("engine", ["c", "torch"])
@pytest.mark.parametrize("with_sink", [False, True])
def test_one_key_head_serves_all_queries(engine, with_sink, monkeypatch):
    monkeypatch.setenv(VARIABLE, engine)
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64) if with_sink else None
    options = {"mode": "sampled", "noise": NOISE}
    wide, expected = run(gated_attention_reference, problem(16, g=1), sink, torch.float64, options)
    found, gradients = run(gated_attention_tiled, problem(16, g=1), sink, torch.float32, options)
    assert torch.equal(found.opened, wide.opened)
    torch.testing.assert_close(found.out.double(), wide.out, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, expected, strict=True):
        assert (one.double() - other).abs().max() <= 1e-5 * other.abs().max()
