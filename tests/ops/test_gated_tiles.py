"""Tiles of gated attention: engines, precisions and layouts, extreme logits, the backward pass' check, memory."""

import itertools
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.ops import dispatch, gated_cpu
from clearhead.ops.c import gated as c_gated
from clearhead.ops.gated import Noise, gated_attention, gated_attention_reference
from clearhead.ops.gated_cpu import gated_attention_tiled
from clearhead.ops.gated_tiles import TorchTiles, differentiate, weigh

NOISE = Noise(seed=7, layer=3, batch=2, head=1)
NAMES = ("out", "lse", "expected", "opened", "leak", "dq", "dk", "dv", "dbias", "dsink")
TORCH = TorchTiles(weigh, differentiate)
MODES = ("sampled", "hard", "open")


@pytest.fixture(params=["torch", "c"])
def engine(request, monkeypatch):
    if request.param == "torch":
        return TORCH
    monkeypatch.setenv(dispatch.VARIABLE, "c")
    try:
        return dispatch.kernels()
    except ClearheadError as error:
        pytest.skip(str(error))


def problem(t, h=4, g=2, dh=12, dv=20, b=2, seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed * 1000 + t)
    q, k, v = (torch.randn(b, heads, t, d, generator=draw) for heads, d in ((h, dh), (g, dh), (g, dv)))
    bias, sink = torch.randn(h, generator=draw), torch.randn(h, generator=draw)
    return [x.to(dtype) for x in (q, k, v, bias, sink)]


def starts(kind, t, b=2):
    """First keys: all, a window of 6, or packed documents with rows at their end that see nothing."""
    position = torch.arange(t)
    if kind == "window":
        return (position - 5).clamp_min(0).expand(b, t)
    if kind == "documents":
        first = torch.stack([position // 23 * 23 + (row == 1) * (position % 23 > 20) * 40 for row in range(b)])
        assert t < 64 or (first > position).any()
        return first
    return None


def measured(run, inputs, dtype, *, with_sink, weights=1, **settings):
    """All results and all gradients of random weightings of the two differentiable ones, by name, in float64."""
    leaves = [x.to(dtype).detach().requires_grad_() for x in (inputs if with_sink else inputs[:4])]
    found = run(*leaves[:4], scale=0.4, noise=NOISE, sink=leaves[4] if with_sink else None, **settings)
    draw = torch.Generator().manual_seed(weights)
    dout, price = (torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in (found.out, found.expected))
    loss = (found.out * dout.to(found.out.dtype)).sum() + (found.expected * price.to(found.expected.dtype)).sum()
    gradients = torch.autograd.grad(loss, leaves)
    return dict(zip(NAMES, (x.detach().double() for x in (*found, *gradients)), strict=False))


def assert_equal(found, expected, tolerance=1e-5):
    for name, value in expected.items():
        finite = value.isfinite()
        assert torch.equal(found[name].isfinite(), finite), name
        scale = value[finite].abs().max().clamp_min(1e-3) if finite.any() else 1
        error = ((found[name] - value)[finite].abs().max() / scale) if finite.any() else 0
        assert error <= (0 if name == "opened" else tolerance), (name, float(error))


@pytest.mark.parametrize(("t", "heads"), [(7, (2, 2)), (64, (4, 2)), (100, (3, 1))])
def test_key_heads_of_one_two_and_three_query_heads(engine, t, heads):
    inputs = problem(t, *heads)
    for mode, seen, with_sink in itertools.product(MODES, ("all", "window", "documents"), (False, True)):
        slope = 0.1 if seen == "window" else 0.0
        estimator = "exact" if seen == "documents" else "straight_through"
        settings = {"mode": mode, "first": starts(seen, t), "slope": slope, "estimator": estimator}
        expected = measured(gated_attention_reference, inputs, torch.float64, with_sink=with_sink, **settings)
        found = measured(
            *(gated_attention_tiled, inputs, torch.float32), with_sink=with_sink, engine=engine, check=True, **settings
        )
        assert_equal(found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_float64_is_the_reference_to_its_precision(mode):
    inputs = problem(40, dtype=torch.float64)
    settings = {"mode": mode, "with_sink": True, "first": starts("documents", 40), "slope": 0.25}
    expected = measured(gated_attention_reference, inputs, torch.float64, **settings)
    assert_equal(measured(gated_attention_tiled, inputs, torch.float64, check=True, **settings), expected, 1e-13)
    assert dispatch.gated_backend(inputs[0]) == "torch"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions_are_computed_in_float32(dtype):
    inputs = problem(50, dtype=dtype)
    half = gated_attention(*inputs[:4], mode="sampled", scale=0.4, noise=NOISE)
    wide = gated_attention(*(x.float() for x in inputs[:4]), mode="sampled", scale=0.4, noise=NOISE)
    assert half.out.dtype == dtype and torch.equal(half.out, wide.out.to(dtype))
    for one, other in zip(half[1:], wide[1:], strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    found = measured(gated_attention, inputs, dtype, with_sink=False, mode="sampled")
    expected = measured(gated_attention_reference, inputs, torch.float64, with_sink=False, mode="sampled")
    assert_equal(found | {"opened": expected["opened"]}, expected, 0.02)


def test_gates_are_right_for_logits_up_to_ten_thousand(engine):
    """q and k are integers, so that scores, and logits far from zero, are exact in float32."""
    draw = torch.Generator().manual_seed(5)
    inputs = problem(48, h=2, g=2)
    for shift, spread in itertools.product((0.0, 60.0, -60.0, 1e4, -1e4), (1, 30)):
        inputs[:2] = [torch.randint(-3, 4, (2, 2, 48, 12), generator=draw).float() * x for x in (spread, 1)]
        inputs[3] = torch.tensor([shift, shift / 2]) + 0.3
        for mode, with_sink in itertools.product(("sampled", "hard"), (False, True)):
            settings = {"mode": mode, "with_sink": with_sink}
            expected = measured(gated_attention_reference, inputs, torch.float64, **settings)
            found = measured(gated_attention_tiled, inputs, torch.float32, engine=engine, check=True, **settings)
            if with_sink:  # the reference loses κ where a closed score is higher by more than float64 can tell
                kappa = inputs[4].double()[:, None].expand(2, 2, 48)
                expected["lse"] = torch.where(expected["lse"].isfinite(), expected["lse"], kappa)
            assert_equal(found, expected, 1e-4)


@pytest.mark.parametrize("with_sink", [False, True])
def test_a_row_without_an_open_edge_is_exactly_zero(engine, with_sink):
    q, k, v, bias, sink = problem(40)
    bias = torch.tensor([-1e4, 0.0, -1e4, -1e4])
    found = gated_attention_tiled(
        *(q, k, v, bias), mode="hard", scale=0.4, sink=sink if with_sink else None, engine=engine
    )
    assert not found.opened[:, [0, 2, 3]].any() and not found.out[:, [0, 2, 3]].any()
    assert found.out[:, 1].any()
    assert all(x.isfinite().all() for x in found)
    if with_sink:
        torch.testing.assert_close(found.lse[:, 0], sink[0].expand(2, 40))


def test_a_row_that_sees_nothing(engine):
    q, k, v, bias, sink = problem(5)
    first = torch.tensor([[0, 2, 9, 0, 5], [1, 0, 0, 4, 4]])
    hidden = first > torch.arange(5)
    for mode, kappa in itertools.product(MODES, (None, sink)):
        found = gated_attention_tiled(
            *(q, k, v, bias), mode=mode, scale=0.4, noise=NOISE, first=first, sink=kappa, engine=engine
        )
        at = hidden[:, None].expand(2, 4, 5)
        assert not found.out[at].any() and not found.expected[at].any() and not found.opened[at].any()
        expected = -math.inf if kappa is None else sink[None, :, None].expand(2, 4, 5)[at]
        assert torch.equal(found.lse[at], torch.as_tensor(expected).expand(int(at.sum())))


def test_other_gates_in_the_backward_pass_are_refused(engine, monkeypatch):
    q, k, v, bias, _ = problem(30)
    k.requires_grad_()
    found = gated_attention_tiled(q, k, v, bias, mode="sampled", scale=0.4, noise=NOISE, check=True, engine=engine)
    right = gated_cpu._scores
    monkeypatch.setattr(gated_cpu, "_scores", lambda space, x, y, scale: right(space, x, y, 1.5 * scale))
    with pytest.raises(ClearheadError, match=r"other gates than the forward pass in \d+ of 8 heads"):
        found.out.sum().backward()


def test_noise_follows_the_global_indices(engine):
    """A shard of the batch or of the heads has the gates that it has in the whole."""
    q, k, v, bias, _ = problem(33)
    settings = {"mode": "sampled", "scale": 0.4, "engine": engine}
    whole = gated_attention_tiled(q, k, v, bias, noise=Noise(1, layer=4), **settings)
    part = gated_attention_tiled(
        *(q[1:, 2:], k[1:, 1:], v[1:, 1:], bias[2:]), noise=Noise(1, layer=4, batch=1, head=2), **settings
    )
    assert torch.equal(part.opened, whole.opened[1:, 2:])
    other = gated_attention_tiled(q, k, v, bias, noise=Noise(1, layer=5), **settings)
    assert not torch.equal(other.opened, whole.opened)


def test_same_bits_again_and_with_more_threads(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    inputs, before = problem(130), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 1, 2, 2):
            torch.set_num_threads(threads)
            results.append(measured(gated_attention, inputs, torch.float32, with_sink=True, mode="sampled", check=True))
    finally:
        torch.set_num_threads(before)
    for one, other in (results[:2], results[2:]):
        assert all(torch.equal(one[name], other[name]) for name in NAMES)
    assert_equal(results[2], results[0], 1e-6)


def test_few_open_edges_are_fetched_and_many_multiplied(engine, monkeypatch):
    q, k, v, bias, _ = problem(200, dv=33)
    settings = {"mode": "hard", "scale": 0.4, "engine": engine, "first": starts("window", 200)}
    for shift in (-5.0, 0.0):
        expected = gated_attention_reference(
            *(x.double() for x in (q, k, v, bias + shift)), mode="hard", scale=0.4, first=settings["first"]
        )
        for few in (0.0, 1.0):
            monkeypatch.setattr(c_gated, "FEW", few)
            found = gated_attention_tiled(q, k, v, bias + shift, **settings)
            assert torch.equal(found.opened, expected.opened)
            torch.testing.assert_close(found.out.double(), expected.out, rtol=1e-5, atol=1e-6)


def test_layouts_that_are_not_dense(engine):
    """[b, t, h, dh] as models make it, gradients that are expanded or absent, and nothing at all."""
    inputs = problem(20)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3]] + inputs[3:]
    settings = {"mode": "sampled", "with_sink": True, "engine": engine}
    one, other = (measured(gated_attention_tiled, x, torch.float32, **settings) for x in (inputs, turned))
    assert all(torch.equal(one[name], other[name]) for name in NAMES)
    leaves = [x.requires_grad_() for x in inputs[:4]]
    found = gated_attention_tiled(*leaves, mode="hard", scale=0.4, engine=engine)
    (dv,) = torch.autograd.grad(found.expected.sum(), leaves[2], retain_graph=True)
    assert not dv.any()
    (dbias,) = torch.autograd.grad(found.expected.mean(), leaves[3])
    assert dbias.any()
    none = [x[:0] for x in leaves[:3]]
    empty = gated_attention_tiled(*none, bias=leaves[3], mode="hard", scale=0.4, engine=engine)
    assert empty.out.shape == (0, 4, 20, 20)


# torch.compile imports a part of torch that uses another, deprecated one
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_tiles_are_the_same_tiles(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "compile")
    if not any(shutil.which(name) for name in ("g++", "clang++")):
        pytest.skip("torch compiles for the CPU with a C++ compiler, and none is installed")
    inputs = problem(33)
    assert dispatch.gated_backend(inputs[0]) == "compile"
    settings = {"mode": "sampled", "with_sink": False}
    found = measured(gated_attention, inputs, torch.float32, check=True, **settings)
    assert_equal(found, measured(gated_attention_reference, inputs, torch.float64, **settings))


def test_backends_by_name(monkeypatch):
    x = torch.zeros(1)
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    assert dispatch.gated_backend(x) == "torch"
    monkeypatch.setenv(dispatch.VARIABLE, "c")
    monkeypatch.setattr(dispatch, "_load", lambda: "the compiler is on holiday")
    with pytest.raises(ClearheadError, match="on holiday"):
        dispatch.gated_backend(x)
    monkeypatch.delenv(dispatch.VARIABLE)
    monkeypatch.setattr(dispatch, "_compiled", lambda: TORCH)
    assert dispatch.gated_backend(x) == "compile"
    assert dispatch.gated_backend(x.double()) == dispatch.gated_backend(torch.zeros(1, device="meta")) == "torch"
    monkeypatch.setattr(dispatch, "_compiled", lambda: None)
    assert dispatch.gated_backend(x) == "torch"


PEAK = """
import os, torch
from clearhead.ops.dispatch import gated_backend
from clearhead.ops.gated import Noise
from clearhead.ops.gated_cpu import gated_attention_tiled
torch.set_num_threads(1)
gated_backend(torch.zeros(1))
def run(mode, t):
    x = [torch.randn(1, 1, t, 16, requires_grad=mode == "sampled") for _ in range(3)]
    found = gated_attention_tiled(*x, torch.zeros(1), mode=mode, scale=0.2, noise=Noise(1))
    if mode == "sampled":
        found.out.sum().backward()
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
for mode, t in (("hard", 8192), ("hard", 32768), ("sampled", 3072), ("sampled", 6144)):
    if os.fork() == 0:
        run(mode, 64)
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")  # the peak so far, which is that of the imports, is forgotten
        before = peak()
        run(mode, t)
        print(peak() - before, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_grows_with_positions_not_with_their_square():
    # tensors get pages of their own, and none that an import has left behind
    alone = os.environ | {"MALLOC_MMAP_THRESHOLD_": "16384"}
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, env=alone)
    spent = [int(line) * 1024 for line in done.stdout.split()]
    assert len(spent) == 4 and min(spent) > 0
    noise = 8 << 20  # pages of libraries and allocators, more on a busy machine
    for (small, large), times, t in zip((spent[:2], spent[2:]), (4, 2), (32768, 6144), strict=True):
        assert large < 1.5 * times * small + noise
        assert large < t**2 * 4 / 8 + noise  # an eighth of one matrix of scores; inputs and outputs are far less
