"""Where the open edges of a gated model lie: first token, distances, empty tiles; measured on laid-out patterns.

With P the softmax over all keys, M the hard gates and A what multiplies the values, for each layer over the rows i ≥ 1:

    before    mean of P_i0
    after     mean of A_i0 / Σ_j A_ij over the rows that have an open edge
    empty     share of rows that have none

All three are needed: a head whose rows are empty looks at nothing, and mass on closed edges may still lie on the first
token. Distances are i − j of open edges, [l, h]. A tile of s x s pairs is empty if it holds no open edge; counted are
the tiles that hold a visible pair. The patterns of one layer are in memory at a time. Gates are evaluated in the
model's dtype here: in bfloat16 edges near the threshold may fall on the other side than in the fused operation.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.gates import EdgeGate
from clearhead.model.run import Edit, Run
from clearhead.runs import progress

TILES = (16, 32, 64, 128)


@dataclass
class LayerMap:
    """Sums over sequences, of one layer."""

    before: Float64[Tensor, " h"]
    after: Float64[Tensor, " h"]
    full_rows: Float64[Tensor, " h"]
    """Rows i ≥ 1 with an open edge."""
    rows: int
    """Rows i ≥ 1."""
    opened: Float64[Tensor, " h"]
    distance: Float64[Tensor, " h"]
    empty_tiles: Float64[Tensor, " s"]
    """Of every size in `TILES`, over all heads."""
    tiles: Float64[Tensor, " s"]


@torch.no_grad()
def map_edges(model: Model, tokens: Int64[Tensor, "n t"], *, batch: int = 1) -> dict[str, Any]:
    """First-token shares and empty tiles by layer, distances by layer and head; None where there is no open edge.

    Raises `ClearheadError` for a model without gates.
    """
    gates = model.gates
    if gates is None:
        raise ClearheadError(f"{model.name} has no edge gates, so no edges to map")
    maps = {layer: _empty_map(model.n_heads) for layer in gates.layers}
    scores: dict[int, Tensor] = {}

    def see_scores(value: Tensor, run: Run) -> Tensor:
        scores[_layer(run)] = value
        return value

    def see_pattern(value: Tensor, run: Run) -> Tensor:
        layer = _layer(run)
        _add(maps[layer], scores.pop(layer), value, gates.layers[layer])
        return value

    edits: dict[str, Edit] = {}
    for layer in maps:
        edits |= {f"scores.{layer}": see_scores, f"pattern.{layer}": see_pattern}
    with gates.hard(), progress("edge maps", tokens.numel()) as advance:
        for part in tokens.split(batch):
            model.run(part, read=[], edit=edits)
            advance(part.numel())
    return {
        "first_token": {
            "before_gates": [float(found.before.sum()) / (found.rows * len(found.before)) for found in maps.values()],
            "after_gates": [_ratio(found.after.sum(), found.full_rows.sum()) for found in maps.values()],
            "empty_rows": [
                1 - float(found.full_rows.sum()) / (found.rows * len(found.full_rows)) for found in maps.values()
            ],
        },
        "empty_tiles": {
            str(size): [float(found.empty_tiles[place] / found.tiles[place]) for found in maps.values()]
            for place, size in enumerate(TILES)
        },
        "distance": {
            "by_layer": [_ratio(found.distance.sum(), found.opened.sum()) for found in maps.values()],
            "by_head": [
                [_ratio(*head) for head in zip(found.distance, found.opened, strict=True)] for found in maps.values()
            ],
        },
    }


@torch.no_grad()
def first_token_shares(model: Model, layers: list[int], tokens: Int64[Tensor, "n t"], *, batch: int = 1) -> list[float]:
    """Mean of the pattern on position 0 over heads and rows i ≥ 1, of each layer; for dense attention."""
    sums = dict.fromkeys(layers, 0.0)

    def see_pattern(value: Tensor, run: Run) -> Tensor:
        sums[_layer(run)] += float(value[:, :, 1:, 0].double().sum())
        return value

    with progress("first token", tokens.numel()) as advance:
        for part in tokens.split(batch):
            model.run(part, read=[], edit={f"pattern.{layer}": see_pattern for layer in layers})
            advance(part.numel())
    rows = tokens.shape[0] * (tokens.shape[1] - 1) * model.n_heads
    return [total / rows for total in sums.values()]


def _layer(run: Run) -> int:
    assert run.site is not None and run.site.layer is not None
    return run.site.layer


def _empty_map(heads: int) -> LayerMap:
    def zeros(n: int) -> Float64[Tensor, " n"]:
        return torch.zeros(n, dtype=torch.float64)

    h, s = heads, len(TILES)
    return LayerMap(zeros(h), zeros(h), zeros(h), 0, zeros(h), zeros(h), zeros(s), zeros(s))


def _add(found: LayerMap, scores: Float[Tensor, "b h t t"], carried: Float[Tensor, "b h t t"], gate: EdgeGate) -> None:
    """Adds the sums of one forward; `carried` is A. Masked scores are the smallest numbers of their dtype."""
    b, _, t, _ = scores.shape
    seen = scores[0, 0] > torch.finfo(scores.dtype).min / 2
    opened = gate.open_edges(scores) & seen
    dense = scores.float().softmax(-1)
    found.before += dense[:, :, 1:, 0].double().sum((0, 2)).cpu()
    mass = carried[:, :, 1:].double().sum(-1)
    full = opened[:, :, 1:].any(-1) & (mass > 0)
    first = carried[:, :, 1:, 0].double() / mass.masked_fill(~full, 1.0)
    found.after += (first * full).sum((0, 2)).cpu()
    found.full_rows += full.double().sum((0, 2)).cpu()
    found.rows += b * (t - 1)
    position = torch.arange(t, device=scores.device)
    far = (opened.sum(0) * (position[:, None] - position)).double().sum((-1, -2))
    found.distance += far.cpu()
    found.opened += opened.double().sum((0, 2, 3)).cpu()
    for place, size in enumerate(TILES):
        tiles, held = _any_in_tiles(seen, size), _any_in_tiles(opened, size)
        found.tiles[place] += tiles.sum().cpu() * held.shape[0] * held.shape[1]
        found.empty_tiles[place] += (tiles & ~held).sum().cpu()


def _any_in_tiles(pairs: Bool[Tensor, "*b t t"], size: int) -> Bool[Tensor, "*b n n"]:
    """Whether a tile of `size` x `size` holds a true pair."""
    short = -pairs.shape[-1] % size
    tiles = F.pad(pairs, (0, short, 0, short)).unflatten(-1, (-1, size)).any(-1)
    return tiles.unflatten(-2, (-1, size)).any(-2)


def _ratio(total: Tensor, count: Tensor) -> float | None:
    return float(total / count) if count else None
