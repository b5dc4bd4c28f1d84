"""Gated attention in tiles: any device and precision, memory linear in the number of positions.

Queries go in blocks, each against all keys that it sees at once, so that a row's maximum and denominator are exact and
nothing is rescaled. A tile takes two matrix products forward and five backward; the scores are computed again in the
backward pass by the same product on the same operands, and with the saved maximum of each row they give the same gates.
The query heads that share a key head are rows of one product against its keys: keys and values are never repeated.
The elementwise work of a tile is done by an engine (gated_tiles.py): plain torch, compiled torch, or C.

In hard mode a tile with few open edges fetches only the rows of v that an edge is open to (engine C).
Not here: the formulas and the reference (gated.py), one query against a cache (gated_decode.py), Triton.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.errors import ClearheadError
from clearhead.ops.dispatch import gated_engine
from clearhead.ops.gated import Estimator, Gated, Mode, Noise, check_arguments, noise_keys
from clearhead.ops.gated_tiles import UNIT_OF_KEYS, Engine, Rows, Setting, Tile, block_starts, tiles

ROWS = 128
"""Rows of a tile: queries times the query heads of one key head."""
ROOM = 2**18
"""Scores of a tile per thread, about: they stay in the cache from one step to the next."""


def gated_attention_tiled(
    q: Float[Tensor, "b h t dh"],
    k: Float[Tensor, "b g t dh"],
    v: Float[Tensor, "b g t dv"],
    bias: Float[Tensor, " h"],
    *,
    mode: Mode,
    scale: float,
    noise: Noise | None = None,
    first: Int[Tensor, "b t"] | None = None,
    sink: Float[Tensor, " h"] | None = None,
    slope: float = 0.0,
    estimator: Estimator = "straight_through",
    check: bool = False,
    engine: Engine | None = None,
    rows: int = ROWS,
) -> Gated:
    """`ops.gated.gated_attention` in tiles of about `rows` rows, by `engine` or the one that dispatch chooses.

    Half precisions are computed in float32, and only `out` comes back in the precision of q. Errors: those of
    `gated_attention`; with `check`, the backward pass raises `ClearheadError` when its gates differ from the forward's.
    """
    check_arguments(q, k, v, bias, mode, noise, first, sink, estimator)
    b, h = q.shape[:2]
    n, reps = b * k.shape[1], h // k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    precision, t = q.dtype, q.shape[2]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    bias = bias.to(dtype).expand(b, h).reshape(n, reps)
    sink = None if sink is None else sink.to(dtype).expand(b, h).reshape(n, reps)
    setting = Setting(
        mode=mode,
        exact=estimator == "exact",
        slope=float(slope),
        groups=k.shape[1],
        bias=bias.detach().contiguous(),
        sink=None if sink is None else sink.detach().contiguous(),
        keys=noise_keys(noise or Noise(0), b, h, q.device).view(n, reps, 2),
        first=None if first is None else first.int().contiguous(),
    )
    # tiles are whole vectors wide: the keys beyond the last position are hidden from all queries
    missing = -t % UNIT_OF_KEYS
    k, v = (F.pad(x, (0, 0, 0, missing)) if missing else x for x in (k, v))
    engine = engine or gated_engine(q, k, v)
    out, *sums = _Tiled.apply(q, k, v, bias, sink, setting, float(scale), check, engine, max(1, rows // reps))
    return Gated(out.to(precision), *sums)


class _Tiled(torch.autograd.Function):
    """Keeps q, k, v, out and three numbers per row for the backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, _bias, _sink, setting, scale, check, engine, block):  # pyright: ignore[reportIncompatibleMethodOverride]
        b, h, t, _ = q.shape
        reps, width = h // setting.groups, v.shape[3]
        n = b * setting.groups
        q, k, v = q.reshape(n, reps, t, q.shape[3]).contiguous(), *(x.flatten(0, 1).contiguous() for x in (k, v))
        out = q.new_empty(n, reps, t, width)
        top, norm, lse, expected, leak = (q.new_empty(n, reps, t) for _ in range(5))
        opened, words = (torch.empty(n, reps, t, dtype=torch.int32, device=q.device) for _ in range(2))
        rows = Rows(top, norm, lse, expected, leak, opened, words if check else None)
        starts, room = block_starts(setting.first, block), ROOM * torch.get_num_threads()
        plan = list(tiles(n, reps, t, starts, setting.groups, block, room))
        space = q.new_empty(max(map(_size, plan), default=0) * reps)
        work, turned = engine.gated(setting, rows), engine.turned(k)
        for tile in plan:
            here, keys = slice(tile.n0, tile.n1), slice(tile.j0, tile.j1)
            queries = _stack(q, tile)
            scores = _scores(space, queries, turned[here, :, keys], scale)
            work.forward(tile, scores)
            work.mix(tile, scores, v, out)
        ctx.save_for_backward(q, k, v, out, top, norm, lse)
        ctx.plan, ctx.setting, ctx.scale, ctx.engine = plan, setting, scale, engine
        ctx.words = words if check else None
        ctx.set_materialize_grads(False)
        results = [x.view(b, h, t, *x.shape[3:]) for x in (out, lse, expected, opened, leak)]
        ctx.mark_non_differentiable(results[1], results[3], results[4])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _lse, price, _opened, _leak):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, top, norm, lse = ctx.saved_tensors
        setting = ctx.setting
        b, reps = len(q) // setting.groups, q.shape[1]
        dout = torch.zeros_like(out) if dout is None else dout.reshape(out.shape).contiguous()
        price = torch.zeros_like(top) if price is None else price.reshape(top.shape).contiguous()
        delta, dbias = (dout * out).sum(-1), torch.empty_like(top)
        words_before = ctx.words
        words = None if words_before is None else torch.empty_like(words_before)
        rows = Rows(top, norm, words=words, delta=delta, price=price, dbias=dbias)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        spaces = q.new_empty(2, max(map(_size, ctx.plan), default=0) * reps)
        work = ctx.engine.gated(setting, rows)
        turned_k, turned_v = ctx.engine.turned(k), ctx.engine.turned(v)
        for tile in ctx.plan:
            here, keys = slice(tile.n0, tile.n1), slice(tile.j0, tile.j1)
            queries, pulls = _stack(q, tile), _stack(dout, tile)
            scores = _scores(spaces[0], queries, turned_k[here, :, keys], ctx.scale)
            gradients = _scores(spaces[1], pulls, turned_v[here, :, keys], 1.0)
            work.backward(tile, scores, gradients)
            of_queries = q.new_empty(queries.shape).baddbmm_(gradients, k[here, keys], beta=0, alpha=ctx.scale)
            dq[here, :, tile.i0 : tile.i1] = _unstack(of_queries, reps)
            dk[here, keys].baddbmm_(gradients.mT, queries, alpha=ctx.scale)
            dv[here, keys].baddbmm_(scores.mT, pulls)
        if words_before is not None and words is not None:
            _compare(words_before, words)
        dsink = None if setting.sink is None else -((setting.sink[..., None] - lse).exp() * delta).sum(-1)
        dq = dq.view(b, setting.groups * reps, *dq.shape[2:])
        dk, dv = (x.view(b, setting.groups, *x.shape[1:]) for x in (dk, dv))
        return dq, dk, dv, dbias.sum(-1), dsink, None, None, None, None, None


def _size(tile: Tile) -> int:
    """Scores of a tile, per query head of a key head."""
    return (tile.n1 - tile.n0) * (tile.i1 - tile.i0) * (tile.j1 - tile.j0)


def _stack(x: Float[Tensor, "n r t d"], tile: Tile) -> Float[Tensor, "m rows d"]:
    """The tile's rows of all query heads of a key head, one under the other: a view where there is one head."""
    return x[tile.n0 : tile.n1, :, tile.i0 : tile.i1].flatten(1, 2)


def _unstack(x: Float[Tensor, "m rows d"], reps: int) -> Float[Tensor, "m r rows d"]:
    return x.unflatten(1, (reps, -1))


def _scores(space: Tensor, x: Float[Tensor, "m rows d"], y: Float[Tensor, "m d cols"], scale: float) -> Tensor:
    """The product scale x y, laid out at the start of `space`."""
    m, n_rows, n_cols = *x.shape[:2], y.shape[2]
    return space[: m * n_rows * n_cols].view(m, n_rows, n_cols).baddbmm_(x, y, beta=0, alpha=scale)


def _compare(forward: Tensor, backward: Tensor) -> None:
    """Raises `ClearheadError` where the checksums of a head's gates differ between the passes."""
    sums = [x.long().sum(-1) & 0xFFFFFFFF for x in (forward, backward)]
    if n_other := int((sums[0] != sums[1]).sum()):
        raise ClearheadError(
            f"gated attention: the backward pass found other gates than the forward pass in {n_other} of "
            f"{sums[0].numel()} heads, so its gradients would be wrong; CLEARHEAD_BACKEND=torch runs without kernels"
        )
