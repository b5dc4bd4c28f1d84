"""Which heads are active: exact top-K per token or over a batch, and JumpReLU.

    topk        values = the k largest of max(z, 0) in each row, heads = where they are
    batch_topk  max(z, 0) where it is among the k * rows largest of the whole batch, else 0
    jumprelu    z where z > exp(log_threshold), else 0; the threshold learns by a straight-through estimate

Gradients reach z only through what was kept. NaN counts as larger than every number, so it is always kept and
surfaces in the values. Among equal values any may be kept. Not here: approximate selection, decoder-norm weighting.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.errors import ClearheadError
from clearhead.ops.dispatch import kernels


def topk(z: Float[Tensor, "r n"], k: int, *, signed: bool = False) -> tuple[Float[Tensor, "r k"], Int64[Tensor, "r k"]]:
    """Values and heads of the k most active heads of each row, in no particular order.

    A row with fewer than k positive entries is filled up with value 0 at heads that are not otherwise named.
    `signed`: rank by |z| and keep the sign (the paper's first checkpoints). Raises `ClearheadError` unless 1 <= k <= n.
    """
    _check(z, k)
    if (run := kernels(z)) is not None:
        return _TopK.apply(run, z, k, signed)  # pyright: ignore[reportReturnType]
    if signed:
        heads = z.abs().topk(k, dim=-1, sorted=False).indices
        return z.gather(-1, heads), heads
    values, heads = z.relu().topk(k, dim=-1, sorted=False)
    return values, heads


def topk_reference(
    z: Float[Tensor, "r n"], k: int, *, signed: bool = False
) -> tuple[Float[Tensor, "r k"], Int64[Tensor, "r k"]]:
    """`topk` in float64 by sorting whole rows: what every fast path is tested against."""
    wide = z.double()
    wide = wide if signed else wide.clamp_min(0)
    order = (wide.abs() if signed else wide).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return wide.gather(-1, order), order


def batch_topk(z: Float[Tensor, "r n"], k: int) -> Float[Tensor, "r n"]:
    """max(z, 0) kept where it is among the k * r largest entries of the batch, 0 elsewhere; k on average per row."""
    _check(z, k)
    active = z.relu()
    if k * z.shape[0] >= z.numel():
        return active
    flat = active.flatten()
    kept = flat.topk(k * z.shape[0], sorted=False).indices
    return torch.zeros_like(flat).scatter(0, kept, flat[kept]).view_as(z)


def jumprelu(
    z: Float[Tensor, "... n"], log_threshold: Float[Tensor, " n"], bandwidth: float, *, through_all: bool = False
) -> Float[Tensor, "... n"]:
    """JumpReLU: z * [z > theta] with theta = exp(log_threshold) (arXiv 2407.14435, equation 10).

    Gradients: dz = dy * [z > theta]; d theta = -sum dy * (theta / bandwidth) * [|z - theta| < bandwidth / 2],
    and d log_threshold = theta * d theta. The first is exact almost everywhere, the second is the
    straight-through estimate with a rectangle of width `bandwidth`. With `through_all` the estimate for the gate
    [z > theta] goes to z too, and so to every parameter behind it (Anthropic, Circuits Updates of January 2025):
    dz gains dy * (theta / bandwidth) * [|z - theta| < bandwidth / 2].
    """
    return _JumpReLU.apply(z, log_threshold, bandwidth, through_all)


def active(z: Float[Tensor, "... n"], log_threshold: Float[Tensor, " n"], bandwidth: float) -> Float[Tensor, "... n"]:
    """The gate [z > theta] as 0 and 1: its sum is the L0 that a JumpReLU dictionary pays for.

    Gradients: none to z; d theta = -sum dy * (1 / bandwidth) * [|z - theta| < bandwidth / 2] (equation 12).
    """
    return _Active.apply(z, log_threshold, bandwidth)


class _TopK(torch.autograd.Function):
    """Selection by the C kernel; dz is d values where a value was kept and not 0."""

    @staticmethod
    def forward(ctx, run, z, k, signed):  # pyright: ignore[reportIncompatibleMethodOverride]
        values, heads = run.topk(z, k, signed)
        ctx.save_for_backward(values, heads)
        ctx.shape = z.shape
        ctx.mark_non_differentiable(heads)
        ctx.set_materialize_grads(False)
        return values, heads

    @staticmethod
    @once_differentiable
    def backward(ctx, dvalues, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dvalues is None:
            return None, None, None, None
        values, heads = ctx.saved_tensors
        dz = dvalues.new_zeros(ctx.shape).scatter_(1, heads, dvalues * (values != 0))
        return None, dz, None, None


class _JumpReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, log_threshold, bandwidth, through_all):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(z, log_threshold)
        ctx.bandwidth, ctx.through_all = bandwidth, through_all
        # a NaN is neither above nor below: keep it, so it is seen
        return torch.where(z <= log_threshold.exp(), torch.zeros_like(z), z)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        z, log_threshold = ctx.saved_tensors
        theta = log_threshold.exp()
        dz = torch.where(z <= theta, torch.zeros_like(dy), dy)
        near = ((z - theta).abs() < ctx.bandwidth / 2).to(dy.dtype)
        jump = dy * near * theta / ctx.bandwidth
        return dz + jump if ctx.through_all else dz, -jump.flatten(0, -2).sum(0) * theta, None, None


class _Active(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, log_threshold, bandwidth):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(z, log_threshold)
        ctx.bandwidth = bandwidth
        return (z > log_threshold.exp()).to(z.dtype)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        z, log_threshold = ctx.saved_tensors
        theta = log_threshold.exp()
        near = ((z - theta).abs() < ctx.bandwidth / 2).to(dy.dtype)
        dtheta = -(dy * near).flatten(0, -2).sum(0) / ctx.bandwidth
        return torch.zeros_like(z), dtheta * theta, None


def check_active(n_heads: int, k: int) -> None:
    """Raises `ClearheadError` unless 1 <= k <= n_heads."""
    if not 1 <= k <= n_heads:
        raise ClearheadError(f"top-K of {n_heads} heads needs 1 <= k <= {n_heads} and got k = {k}: choose such a k")


def _check(z: Tensor, k: int) -> None:
    if z.ndim != 2:
        raise ClearheadError(
            f"top-K needs activations [rows, heads] and got shape {tuple(z.shape)}; flatten them first"
        )
    check_active(z.shape[1], k)
