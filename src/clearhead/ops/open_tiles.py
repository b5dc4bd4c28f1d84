"""How many tiles of a head's attention hold an open edge, in expectation: what a block-sparse kernel would compute.

    P_open(tile) = 1 − Π (1 − σ(x_ij)) = 1 − exp(−Σ softplus(x_ij))        over the visible pairs of the tile
    ∂P_open/∂x_ij = σ(x_ij) (1 − P_open)

with the gate logits x_ij = scale · q_i · k_j + bias_h of ops/gated.py. The result is the mean over the tiles that hold
a visible pair. A tile with many likely edges is open for certain and has no gradient: this penalty empties tiles that
are nearly empty, and belongs beside one on the edges themselves.

One block of queries is laid out at a time, in float32 at least, and again in the backward pass: O(T · tile) memory.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead.errors import ClearheadError


def expected_open_tiles(
    q: Float[Tensor, "b h t dh"],
    k: Float[Tensor, "b g t dh"],
    bias: Float[Tensor, " h"],
    *,
    scale: float,
    first: Int[Tensor, "b t"] | None = None,
    tile: int = 64,
) -> Float[Tensor, "b h"]:
    """Share of each head's visible tiles of `tile` x `tile` pairs that hold an open edge, in expectation.

    `first[b, t]`: the first key that each query sees; None is 0. Differentiable in q, k and bias. Raises
    `ClearheadError` for shapes that do not fit, and for a row of the batch in which no query sees a key.
    """
    fits = q.dim() == k.dim() == 4 and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    if not fits or q.shape[1] % k.shape[1] or bias.shape != (q.shape[1],) or tile < 1:
        raise ClearheadError(
            f"open tiles of {tile}: got q {list(q.shape)}, k {list(k.shape)}, bias {list(bias.shape)}; expected "
            "[batch, heads, positions, width], key heads that divide the heads, a bias per head, tiles of at least 1"
        )
    b, _, t, _ = q.shape
    if first is None:
        first = torch.zeros(b, t, dtype=torch.int64, device=q.device)
    opened, tiles = [], []
    for start in range(0, t, tile):
        stop = min(start + tile, t)
        rows, seen = q[:, :, start:stop], first[:, start:stop]
        opened.append(
            checkpoint(_open_in_block, rows, k[:, :, :stop], bias, scale, seen, start, tile, use_reentrant=False)
        )
        tiles.append(_tile_sums(_visible(seen, start, stop), tile).gt(0).sum(-1))
    count = torch.stack(tiles).sum(0)
    if not bool(count.all()):
        raise ClearheadError(
            "open tiles: `first` lies behind every query of a row of the batch, which then has no tile"
        )
    return torch.stack(opened).sum(0) / count[:, None]


def _open_in_block(
    q: Float[Tensor, "b h rows dh"],
    k: Float[Tensor, "b g keys dh"],
    bias: Float[Tensor, " h"],
    scale: float,
    first: Int[Tensor, "b rows"],
    start: int,
    tile: int,
) -> Float[Tensor, "b h"]:
    """Σ P_open over the tiles of one block of queries, which sees the keys up to its last query."""
    b, h, rows, _ = q.shape
    keys = k.shape[2]
    scores = (q.reshape(b, k.shape[1], -1, q.shape[3]) @ k.mT).view(b, h, rows, keys)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    logits = wide * scale + bias.to(wide.dtype)[:, None, None]
    closing = F.softplus(logits) * _visible(first, start, keys)[:, None]
    return -torch.expm1(-_tile_sums(closing, tile)).sum(-1)


def _visible(first: Int[Tensor, "b rows"], start: int, keys: int) -> Tensor:
    """Which keys the queries `start`, `start` + 1, ... see: [b, rows, keys]."""
    key = torch.arange(keys, device=first.device)
    query = torch.arange(start, start + first.shape[1], device=first.device)
    return (key <= query[:, None]) & (key >= first[..., None])


def _tile_sums(pairs: Tensor, tile: int) -> Tensor:
    """Sums over all rows and `tile` columns at a time: [..., rows, keys] -> [..., tiles]."""
    columns = pairs.sum(-2)
    return F.pad(columns, (0, -columns.shape[-1] % tile)).unflatten(-1, (-1, tile)).sum(-1)
