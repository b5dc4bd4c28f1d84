"""Attention of a Lorsa layer (arXiv 2504.20938): n heads of value width 1 that share g query-key groups.

    A_g = softmax_causal(scale * q_g k_g^T)        z[i, n] = sum_j A_{g(n)}[i, j] v[j, n],   g(n) = n // (n_heads / g)

The z of one group is ordinary attention whose value width is the group's number of heads, so `attend` runs torch's
fused attention per group, or a C kernel, and never stores a pattern. Exact additions: a rotation of queries and keys,
a sliding window, a soft cap on the scores, and a sink logit per group (one more key whose value is zero). The C
kernel's backward pass skips the heads and queries whose dz is zero, which top-K makes nearly all of them.
Not here: projections, query-key norms, the choice of active heads.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.errors import ClearheadError
from clearhead.ops.dispatch import kernels
from clearhead.ops.rotation import Rotation, rotate
from clearhead.ops.topk import check_active, topk


def attend(
    q: Float[Tensor, "b g t dh"],
    k: Float[Tensor, "b g t dh"],
    v: Float[Tensor, "b t n"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, " g"] | None = None,
    rotation: Rotation | None = None,
) -> Float[Tensor, "b t n"]:
    """Pre-activations z of all heads at all positions (the paper's equation for a Lorsa head, before top-K).

    `scale` multiplies the scores. `window`: a query sees itself and the window - 1 keys before it. `softcap` c:
    scores become c * tanh(score / c). `sink`: one logit per group, added to the softmax's denominator only.
    `rotation` turns q and k first (it costs nothing in the C kernel); None when they are turned already.
    Position t of every sequence is a query and a key; padding belongs on the right, where causality hides it.
    Raises `ClearheadError` when n is not a multiple of g or a length disagrees.
    """
    _check(q, k, v, window, sink, rotation)
    if softcap is None and (run := kernels(q, k, v)) is not None:
        sink = None if sink is None else sink.float()
        return _Attend.apply(run, q, k, v, sink, scale, window, rotation)  # pyright: ignore[reportReturnType]
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    if softcap is not None:
        return _mix(pattern(q, k, scale=scale, window=window, softcap=softcap, sink=sink), v)
    return _attend_fused(q, k, v, scale, window, sink)


def attend_topk(
    q: Float[Tensor, "b g t dh"],
    k: Float[Tensor, "b g t dh"],
    v: Float[Tensor, "b t n"],
    n_active: int,
    *,
    signed: bool = False,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, " g"] | None = None,
    rotation: Rotation | None = None,
    consume: bool = False,
) -> tuple[Float[Tensor, "r k"], Int64[Tensor, "r k"], Float[Tensor, "b t n"]]:
    """`attend`, then `ops.topk.topk` over all heads of each token (r = b * t): values, heads, and z.

    In the C backend the gradients of the values reach attention as K entries per token, and no dz is ever laid out
    unless z itself is used too. Arguments and errors are those of the two operations. `consume` lets the backward pass
    write the gradients over q, k and v, which saves a third of a training step's memory: only for tensors that nothing
    else uses and for graphs that go backward once; a second time raises `ClearheadError`.
    """
    _check(q, k, v, window, sink, rotation)
    if softcap is None and (run := kernels(q, k, v)) is not None:
        check_active(v.shape[2], n_active)
        sink = None if sink is None else sink.float()
        return _AttendTopK.apply(run, q, k, v, sink, scale, window, rotation, n_active, signed, consume)  # pyright: ignore[reportReturnType]
    z = attend(q, k, v, scale=scale, window=window, softcap=softcap, sink=sink, rotation=rotation)
    values, heads = topk(z.flatten(0, 1), n_active, signed=signed)
    return values, heads, z


def pattern(
    q: Float[Tensor, "b g q dh"],
    k: Float[Tensor, "b g k dh"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, " g"] | None = None,
) -> Float[Tensor, "b g q k"]:
    """Attention weights of each group, explicit: b * g * t * t numbers, for analysis and for soft-capped models.

    Rows sum to 1, or to less where a sink takes its share. The queries are the last positions of the keys.
    """
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible(q.shape[2], k.shape[2], window, q.device), -torch.inf)
    if sink is None:
        return scores.softmax(-1)
    column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def visible(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> Bool[Tensor, "q k"]:
    """Which keys each query sees: causal, and no farther back than `window` - 1 positions."""
    distance = torch.arange(n_queries, device=device)[:, None] + (n_keys - n_queries)
    distance = distance - torch.arange(n_keys, device=device)[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def attend_reference(
    q: Float[Tensor, "b g t dh"],
    k: Float[Tensor, "b g t dh"],
    v: Float[Tensor, "b t n"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, " g"] | None = None,
    rotation: Rotation | None = None,
) -> Float[Tensor, "b t n"]:
    """`attend` in float64 with explicit patterns: what every fast path is tested against."""
    q, k, sink = q.double(), k.double(), None if sink is None else sink.double()
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    weights = pattern(q, k, scale=scale, window=window, softcap=softcap, sink=sink)
    return _mix(weights, v.double())


class _Attend(torch.autograd.Function):
    """Attention by the C kernels; keeps q, k and v for the backward pass, not z."""

    @staticmethod
    def forward(ctx, run, q, k, v, sink, scale, window, rotation):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.run = run
        q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
        v = v.contiguous()
        ctx.save_for_backward(q, k, v, sink)
        ctx.geometry = {"scale": scale, "window": window, "rotation": rotation}
        return run.attend(q, k, v, sink=sink, **ctx.geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx, dz):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, sink = ctx.saved_tensors
        dq, dk, dv, dsink = ctx.run.attend_backward(dz.contiguous(), q, k, v, sink=sink, **ctx.geometry)
        return None, dq, dk, dv, dsink, None, None, None


class _AttendTopK(torch.autograd.Function):
    """`_Attend` and the selection by the C kernels, with the gradient of the kept values passed on as entries."""

    @staticmethod
    def forward(ctx, run, q, k, v, sink, scale, window, rotation, n_active, signed, consume):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.run = run
        q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
        v = v.contiguous()
        ctx.geometry = {"scale": scale, "window": window, "rotation": rotation}
        z = run.attend(q, k, v, sink=sink, **ctx.geometry)
        values, heads = run.topk(z.flatten(0, 1), n_active, signed)
        ctx.save_for_backward(q, k, v, sink, values, heads)
        ctx.mark_non_differentiable(heads)
        ctx.set_materialize_grads(False)
        ctx.consume, ctx.consumed = consume, False
        return values, heads, z

    @staticmethod
    @once_differentiable
    def backward(ctx, dvalues, _, dz):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.consumed:
            raise ClearheadError(
                "this forward pass was made for one backward pass, which wrote the gradients over its queries, keys "
                "and values; put the module into eval mode (or pass consume=False) to go backward twice"
            )
        q, k, v, sink, values, heads = ctx.saved_tensors
        entries = None if dvalues is None else (dvalues * (values != 0), heads)
        dz = None if dz is None else dz.contiguous()
        q, k, v = q.detach(), k.detach(), v.detach()
        gradients = ctx.run.attend_backward(dz, q, k, v, entries, consume=ctx.consume, sink=sink, **ctx.geometry)
        if ctx.consume:
            ctx.consumed = True
            torch.autograd.graph.increment_version((q, k, v))
        return None, *gradients, None, None, None, None, None, None


def _attend_fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sink: Tensor | None
) -> Float[Tensor, "b t n"]:
    b, t, n = v.shape
    g, size = q.shape[1], n // q.shape[1]
    values = v.view(b, t, g, size).transpose(1, 2)
    if sink is not None:
        q, k, values = _with_sink(q, k, values, sink / scale)
    # the fused kernels want one width for q, k and v; zero columns change neither the scores nor the other values
    width = max(q.shape[-1], size)
    q, k = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k))
    if size < width:
        values = F.pad(values, (0, width - size))
    mask = None if window is None else _window_mask(t, window, sink is not None, q.device)
    z = F.scaled_dot_product_attention(q, k, values, attn_mask=mask, is_causal=mask is None, scale=scale)
    first = 0 if sink is None else 1
    return z[:, :, first:, :size].transpose(1, 2).reshape(b, t, n)


def _with_sink(q: Tensor, k: Tensor, values: Tensor, logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put the sink at a position before the first: its key meets a constant 1 in every query, its value is zero.

    The query at that extra position sees only the sink and is dropped from the result.
    """
    b, g = q.shape[:2]
    q = F.pad(F.pad(q, (0, 1), value=1.0), (0, 0, 1, 0))
    key = F.pad(logit.to(k.dtype)[:, None], (k.shape[-1], 0))
    k = torch.cat([key[None, :, None, :].expand(b, g, 1, -1), F.pad(k, (0, 1))], 2)
    return q, k, F.pad(values, (0, 0, 1, 0))


def _window_mask(t: int, window: int, has_sink: bool, device: torch.device) -> Bool[Tensor, "q k"]:
    mask = visible(t, t, window, device)
    if not has_sink:
        return mask
    mask = F.pad(mask, (1, 0, 1, 0))
    mask[:, 0] = True
    return mask


def _mix(weights: Float[Tensor, "b g q k"], v: Float[Tensor, "b k n"]) -> Float[Tensor, "b q n"]:
    b, t, n = v.shape
    g = weights.shape[1]
    values = v.view(b, t, g, n // g).transpose(1, 2)
    return (weights @ values).transpose(1, 2).reshape(b, weights.shape[2], n)


def _check(q: Tensor, k: Tensor, v: Tensor, window: int | None, sink: Tensor | None, rotation: Rotation | None) -> None:
    b, g, t, dh = q.shape
    if k.shape != q.shape or v.shape[:2] != (b, t) or v.shape[2] % g:
        raise ClearheadError(
            f"attend got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; expected q and k "
            f"[batch, groups, positions, width] of one shape, and v [batch, positions, heads] with the same batch and "
            f"positions and a number of heads that the {g} groups divide"
        )
    if window is not None and window < 1:
        raise ClearheadError(f"attend got window {window}; a query sees at least itself: give 1 or more, or None")
    if sink is not None and sink.shape != (g,):
        raise ClearheadError(f"attend got a sink of shape {tuple(sink.shape)}; expected one logit per group, [{g}]")
    if rotation is None:
        return
    cos, sin, _ = rotation
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[0] != t or 2 * cos.shape[1] > dh:
        raise ClearheadError(
            f"attend got rotation tables {tuple(cos.shape)} and {tuple(sin.shape)}; expected two of [{t}, half] with "
            f"half at most {dh // 2}: one row per position, one column per rotated plane"
        )
