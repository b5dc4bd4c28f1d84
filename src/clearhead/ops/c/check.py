"""Load the C kernels and compare each with its float64 reference; a kernel that differs is refused.

The inputs are small and random, with an odd number of positions, a window, a sink, a rotation, sparse and full
gradients, ties, too few positive entries, NaN, and gate logits from tiny to huge: what a compiler or a processor could
get wrong.
"""

import functools
from typing import get_args

import torch
from torch import Tensor

from clearhead.ops.c.build import BuildError, load_library
from clearhead.ops.c.kernels import Kernels
from clearhead.ops.gated import Mode, Noise, gated_attention_reference
from clearhead.ops.gated_cpu import gated_attention_tiled
from clearhead.ops.lorsa import attend_reference
from clearhead.ops.rotation import Rotation
from clearhead.ops.sparse import decode_reference
from clearhead.ops.topk import topk_reference

TOLERANCE = 1e-4


@functools.cache
def load() -> Kernels:
    """The kernels of this machine, compiled if need be and checked. Raises `BuildError` saying what is wrong."""
    kernels = Kernels(load_library())
    for name, error in differences(kernels).items():
        if not error < TOLERANCE:
            raise BuildError(f"kernel {name} differs from its reference by {error:.1e}; it will not be used")
    return kernels


def differences(kernels: Kernels) -> dict[str, float]:
    """Largest difference of each kernel from its reference, relative to the reference's largest entry."""
    draw = torch.Generator().manual_seed(0)
    found = {f"attend {i}": _attend_error(kernels, draw, i) for i in range(4)}
    found |= {f"gates {i}": _gated_error(kernels, draw, i) for i in range(6)}
    found |= {"top-K": _topk_error(kernels, draw), "decode": _decode_error(kernels, draw)}
    return found


def _attend_error(kernels: Kernels, draw: torch.Generator, case: int) -> float:
    b, g, t, dh, size = (1, 2, 75, 12, 5) if case % 2 else (2, 2, 131, 64, 64)
    q, k = (torch.randn(b, t, g, dh, generator=draw).transpose(1, 2) for _ in range(2))
    v, dz = (torch.randn(b, t, g * size, generator=draw) for _ in range(2))
    if case >= 2:
        dz = dz * (torch.rand(dz.shape, generator=draw) < 0.03)
    angle = torch.rand(t, 3, generator=draw)
    geometry = {
        "scale": 0.3,
        "window": (None, 20)[case % 2],
        "sink": torch.randn(g, generator=draw) if case in (1, 2) else None,
        "rotation": Rotation(angle.cos(), angle.sin(), case % 2 == 0) if case else None,
    }
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    if geometry["sink"] is not None:
        leaves.append(geometry["sink"].double().requires_grad_())
    with torch.enable_grad():
        wide = geometry | {"sink": leaves[3] if len(leaves) == 4 else None}
        z = attend_reference(*leaves[:3], **wide)
        gradients = torch.autograd.grad(z, leaves, dz.double())
    entries = None
    if case == 3:
        # the same gradient as its positive part, dense, plus its negative part, as entries
        order = dz.flatten(0, 1).argsort(1)[:, :4].sort(1).values
        entries = dz.flatten(0, 1).gather(1, order).clamp_max(0), order
        dz = dz.flatten(0, 1).scatter_add(1, order, -entries[0]).view_as(dz)
    results = [kernels.attend(q, k, v, **geometry), *kernels.attend_backward(dz, q, k, v, entries, **geometry)]
    return max(_difference(x, y) for x, y in zip(results, [z, *gradients], strict=False))


def _gated_error(kernels: Kernels, draw: torch.Generator, case: int) -> float:
    b, h, g, t, dh = 2, 4, 2, 37, 12
    q, k, v = (torch.randn(b, heads, t, dh, generator=draw) for heads in (h, g, g))
    dout, price = torch.randn(b, h, t, dh, generator=draw), torch.randn(b, h, t, generator=draw)
    bias, sink = (torch.randn(h, generator=draw) for _ in range(2))
    bias[0] += (0, 1e4)[case % 2]
    mode = get_args(Mode)[case % 3]
    estimator = "exact" if case == 3 else "straight_through"
    first = (torch.arange(t) - 20).clamp_min(2).expand(b, t)
    settings = {"scale": 0.5, "noise": Noise(1, case), "first": first, "slope": 0.01, "estimator": estimator}
    results = []
    for run, dtype, more in (
        (gated_attention_tiled, torch.float32, {"engine": kernels, "rows": 48}),
        (gated_attention_reference, torch.float64, {}),
    ):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, bias, sink)]
        leaves = leaves if case >= 3 else leaves[:4]
        with torch.enable_grad():
            found = run(*leaves[:4], mode=mode, sink=leaves[4] if case >= 3 else None, **settings, **more)
            total = (found.out * dout).sum() + (found.expected * price).sum()
            gradients = torch.autograd.grad(total, leaves)
        results.append([found.out, found.lse.exp(), found.expected, found.opened, found.leak, *gradients])
    return max(_difference(x, y) for x, y in zip(*results, strict=True))


def _topk_error(kernels: Kernels, draw: torch.Generator) -> float:
    z = torch.randn(40, 203, generator=draw)
    z[1] = z[1].round()
    z[2] = -z[2].abs()
    z[3, 10:] = -1
    z[4, 7] = torch.nan
    z[5, 9], z[5, 8] = -torch.nan, torch.inf
    worst = 0.0
    for signed in (False, True):
        values, heads = kernels.topk(z, 20, signed)
        expected, _ = topk_reference(z, 20, signed=signed)
        at = z.gather(1, heads)
        if not signed:
            at = at.relu()
        same = torch.equal(values.nan_to_num(9.0), at.nan_to_num(9.0)) and all(len(row.unique()) == 20 for row in heads)
        ordered = (x.nan_to_num(9.0, 1e9).sort(-1).values for x in (values.double(), expected))
        worst = max(worst, _difference(*ordered) if same else float("inf"))
    return worst


def _decode_error(kernels: Kernels, draw: torch.Generator) -> float:
    worst = 0.0
    for r, n, k, d in ((30, 50, 7, 300), (5, 9, 9, 33)):
        values, weight = torch.randn(r, k, generator=draw), torch.randn(n, d, generator=draw)
        heads, dy = torch.randint(n, (r, k), generator=draw), torch.randn(r, d, generator=draw)
        leaves = [values.double().requires_grad_(), weight.double().requires_grad_()]
        with torch.enable_grad():
            y = decode_reference(leaves[0], heads, leaves[1])
            dvalues, dweight = torch.autograd.grad(y, leaves, dy.double())
        worst = max(
            worst,
            _difference(kernels.decode(values, heads, weight), y),
            _difference(kernels.decode_values(dy, heads, weight), dvalues),
            _difference(kernels.decode_weights(dy, values, heads, n), dweight),
        )
    return worst


def _difference(x: Tensor, reference: Tensor) -> float:
    return ((x.double() - reference).abs().max() / reference.abs().max().clamp_min(1e-30)).item()
