"""The tiles of gated attention: what the passes share, and the elementwise work of one tile in plain torch.

A tile is the scores of `rows` queries of `reps` query heads each against the keys that any of them sees, for some key
heads: [n, reps, rows, cols]. Between the matrix products (gated_cpu.py) two functions act on it:

    weigh          S -> M exp(S − max), and the sums of each row
    differentiate  S and G = dout · v -> M P and dS, and each row's share of the bias' gradient

`Kernels` (c/kernels.py) has the same two as one pass in C each. Formulas: ops/gated.py. σ(x) and the noise are
evaluated alike in both, so that the backward pass finds the gates of the forward pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from clearhead.ops.gated import UNIT, noise_words

UNIT_OF_KEYS = 16
"""Tiles begin and end at multiples of this many keys: the widest vector of the C kernels."""


@dataclass(frozen=True)
class Setting:
    """What a call fixes for all of its tiles."""

    mode: str
    exact: bool
    """The gate's slope is that of P(M = 1), not of a noisy sigmoid."""
    slope: float
    groups: int
    """Key heads per batch entry."""
    bias: Float[Tensor, "n r"]
    sink: Float[Tensor, "n r"] | None
    keys: Int32[Tensor, "n r 2"]
    first: Int32[Tensor, "b t"] | None


@dataclass(frozen=True)
class Rows:
    """Numbers per row, [n, r, t]; `top` and `norm` are written by the forward pass and read by the backward pass."""

    top: Tensor
    """Largest visible score; 0 for a row that sees nothing."""
    norm: Tensor
    """exp(top) / Z; 0 for a row that sees nothing."""
    lse: Tensor | None = None
    expected: Tensor | None = None
    leak: Tensor | None = None
    opened: Int32[Tensor, "n r t"] | None = None
    words: Int32[Tensor, "n r t"] | None = None
    """Sum of the random words of the open edges; None where the gates are not checked."""
    delta: Tensor | None = None
    """out · dout"""
    price: Tensor | None = None
    """Gradient of `expected`."""
    dbias: Tensor | None = None


Weighed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
Differentiated = tuple[Tensor, Tensor, Tensor, Tensor | None]


class Tile(NamedTuple):
    """Key heads n0..n1−1 of the batch, queries i0..i1−1, keys j0..j1−1."""

    n0: int
    n1: int
    i0: int
    i1: int
    j0: int
    j1: int


class Pass(Protocol):
    """The elementwise work of one pass over the tiles."""

    def forward(self, tile: Tile, scores: Tensor) -> None:
        """Scores -> weights in place, and the rows' sums."""
        ...

    def mix(self, tile: Tile, weights: Tensor, v: Tensor, out: Tensor) -> None:
        """The tile's part of `out` [n, r, t, dv] from its weights and all of v."""
        ...

    def backward(self, tile: Tile, scores: Tensor, gradients: Tensor) -> None:
        """Scores -> M P, and G -> dS, in place; and the rows' `dbias`."""
        ...


class Engine(Protocol):
    """Who does the elementwise work."""

    def gated(self, setting: Setting, rows: Rows) -> Pass:
        """Begin a pass."""
        ...

    def turned(self, x: Float[Tensor, "n i d"]) -> Float[Tensor, "n d i"]:
        """The transposes, laid out as products with them go fastest."""
        ...


def tiles(
    n: int, reps: int, t: int, starts: list[list[int]] | None, groups: int, rows: int, room: int
) -> Iterator[Tile]:
    """All tiles of a call: `rows` queries at a time, and so many key heads that a tile has at most `room` scores.

    `starts[batch][block]` is the first key that any row of a block sees; None: 0.
    """
    for block, i0 in enumerate(range(0, t, rows)):
        i1 = min(i0 + rows, t)
        j1 = i1 + -i1 % UNIT_OF_KEYS
        heads = max(1, room // (reps * (i1 - i0) * j1))
        for n0 in range(0, n, heads):
            n1 = min(n0 + heads, n)
            j0 = 0
            if starts is not None:
                j0 = min(starts[batch][block] for batch in range(n0 // groups, (n1 - 1) // groups + 1))
                j0 = min(j0, i1 - 1) // UNIT_OF_KEYS * UNIT_OF_KEYS
            yield Tile(n0, n1, i0, i1, j0, j1)


def block_starts(first: Int[Tensor, "b t"] | None, rows: int) -> list[list[int]] | None:
    """The first key that any row of each block of queries sees, per batch entry."""
    if first is None:
        return None
    blocks = first.clamp_min(0).split(rows, dim=1)
    return torch.stack([block.amin(1) for block in blocks], dim=1).tolist()


class Pairs(NamedTuple):
    """What is known of the pairs of a tile before their scores."""

    i: Int32[Tensor, " rows"]
    j: Int32[Tensor, " cols"]
    first: Int32[Tensor, "m 1 rows 1"] | None
    bias: Float[Tensor, "m r 1 1"]
    slope: Float[Tensor, ""]
    keys: Int32[Tensor, "m r 2"] | None
    """None where no noise is needed."""

    def seen(self) -> Bool[Tensor, "m 1 rows cols"]:
        """Which are visible; m is 1 where all key heads see the same."""
        seen = (self.j <= self.i[:, None])[None, None]
        return seen if self.first is None else seen & (self.j >= self.first)

    def reach(self) -> Float[Tensor, "rows cols"]:
        """1 + slope (i − j)"""
        return 1 + self.slope * (self.i[:, None] - self.j)

    def words(self) -> Int32[Tensor, "m r rows cols"] | None:
        """Their random words."""
        return None if self.keys is None else noise_words(self.keys, self.i, self.j)


@dataclass(frozen=True)
class TorchTiles:
    """The two steps in plain torch, of any precision and on any device; or compiled, the same two."""

    weigh: Callable[..., Weighed]
    differentiate: Callable[..., Differentiated]

    def gated(self, setting: Setting, rows: Rows) -> "TorchPass":
        """Begin a pass."""
        return TorchPass(self, setting, rows)

    def turned(self, x: Float[Tensor, "n i d"]) -> Float[Tensor, "n d i"]:
        """The transposes, as views."""
        return x.mT


@dataclass(frozen=True)
class TorchPass:
    """A `Pass` of `TorchTiles`."""

    engine: TorchTiles
    setting: Setting
    rows: Rows

    def forward(self, tile: Tile, scores: Tensor) -> None:
        """Scores -> weights in place, and the rows' sums."""
        setting, rows = self.setting, self.rows
        pairs, scores = self._pairs(tile, scores.device), scores.unflatten(1, (setting.bias.shape[1], -1))
        weights, top, held, closed, expected, opened, total = self.engine.weigh(
            scores, pairs, setting.mode, rows.words is not None
        )
        scores.copy_(weights)
        # a row sees its own position, at the least, unless its first key lies behind it
        behind = pairs.i < 0 if pairs.first is None else (pairs.first > pairs.i[:, None])[..., 0]
        peak, whole = top, held + closed
        if setting.sink is not None:
            sunk = setting.sink[tile.n0 : tile.n1, :, None].expand_as(top)
            peak = torch.where(held > 0, torch.maximum(top, sunk), sunk)
            whole = (sunk - peak).exp() + torch.where(held > 0, held * (top - peak).exp(), 0.0)
            closed = torch.zeros_like(closed)
        lse = peak + whole.log()
        if setting.sink is None:
            lse = lse.masked_fill(behind, -torch.inf)
        whole = whole.masked_fill(behind, 1.0)
        # with a sink and only closed edges, exp(top) / Z may be anything
        norm = ((top - peak).clamp(max=80.0).exp() / whole).masked_fill(behind, 0.0)
        found = (top, norm, lse, expected, closed / whole, opened, total)
        places = (rows.top, rows.norm, rows.lse, rows.expected, rows.leak, rows.opened, rows.words)
        for place, value in zip(places, found, strict=True):
            if place is not None and value is not None:
                _part(place, tile).copy_(value)

    def mix(self, tile: Tile, weights: Tensor, v: Tensor, out: Tensor) -> None:
        """The tile's part of `out` [n, r, t, dv] from its weights and all of v."""
        mixed = weights @ v[tile.n0 : tile.n1, tile.j0 : tile.j1]
        torch.mul(mixed.unflatten(1, (out.shape[1], -1)), _part(self.rows.norm, tile)[..., None], out=_part(out, tile))

    def backward(self, tile: Tile, scores: Tensor, gradients: Tensor) -> None:
        """Scores -> M P, and G -> dS, in place; and the rows' `dbias`."""
        setting, rows = self.setting, self.rows
        assert rows.delta is not None and rows.price is not None and rows.dbias is not None
        scores = scores.unflatten(1, (setting.bias.shape[1], -1))
        gradients = gradients.view_as(scores)
        weights, ds, dbias, total = self.engine.differentiate(
            *(scores, gradients, self._pairs(tile, scores.device)),
            *(_part(x, tile)[..., None] for x in (rows.top, rows.norm, rows.delta, rows.price)),
            *(setting.mode, setting.exact, setting.sink is not None, rows.words is not None),
        )
        scores.copy_(weights)
        gradients.copy_(ds)
        _part(rows.dbias, tile).copy_(dbias)
        if rows.words is not None and total is not None:
            _part(rows.words, tile).copy_(total)

    def _pairs(self, tile: Tile, device: torch.device) -> Pairs:
        setting, heads = self.setting, slice(tile.n0, tile.n1)
        first = None
        if setting.first is not None:
            batches = torch.arange(tile.n0, tile.n1, device=device) // setting.groups
            first = setting.first[batches, None, tile.i0 : tile.i1, None]
        noisy = setting.mode == "sampled" or self.rows.words is not None
        return Pairs(
            i=torch.arange(tile.i0, tile.i1, dtype=torch.int32, device=device),
            j=torch.arange(tile.j0, tile.j1, dtype=torch.int32, device=device),
            first=first,
            bias=setting.bias[heads, :, None, None],
            slope=setting.bias.new_tensor(setting.slope),
            keys=setting.keys[heads] if noisy else None,
        )


def _part(x: Float[Tensor, "n r t"], tile: Tile) -> Tensor:
    return x[tile.n0 : tile.n1, :, tile.i0 : tile.i1]


def _uniform(words: Int32[Tensor, "*n"], dtype: torch.dtype) -> Float[Tensor, "*n"]:
    return ((((words >> 9) & 0x7FFFFF).float() + 0.5) * UNIT).to(dtype)


def _gates(x: Tensor, seen: Tensor, words: Tensor | None, mode: str) -> Tensor:
    """M, the same expression in both passes."""
    if mode == "open":
        return seen.expand_as(x)
    if mode == "hard":
        return x > 0
    assert words is not None
    return _uniform(words, x.dtype) < x.sigmoid()


def _total(words: Tensor | None, gates: Tensor, checked: bool) -> Tensor | None:
    """Sum of the words of open edges modulo 2³²."""
    if not checked or words is None:
        return None
    return torch.where(gates, words, 0).sum(-1).int()


def weigh(scores: Tensor, pairs: Pairs, mode: str, checked: bool) -> Weighed:
    """Weights [m, r, rows, cols]; per row: max, sums over open and closed edges, expected and open edges, checksum."""
    seen, words = pairs.seen(), pairs.words()
    scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights, x = (scores - top).exp(), scores + pairs.bias
    gates = _gates(x, seen, words, mode)
    kept = torch.where(gates, weights, 0.0)
    closed = torch.where(gates, 0.0, weights).sum(-1)
    expected, opened = (x.sigmoid() * pairs.reach()).sum(-1), gates.sum(-1, dtype=torch.int32)
    return kept, top[..., 0], kept.sum(-1), closed, expected, opened, _total(words, gates, checked)


def differentiate(
    scores: Tensor,
    gradients: Tensor,
    pairs: Pairs,
    top: Tensor,
    norm: Tensor,
    delta: Tensor,
    price: Tensor,
    mode: str,
    exact: bool,
    sunk: bool,
    checked: bool,
) -> Differentiated:
    """M P and dS [m, r, rows, cols]; per row: the bias' gradient and the checksum."""
    seen, words = pairs.seen(), pairs.words()
    scores = scores.masked_fill(~seen, -torch.inf)
    x = scores + pairs.bias
    gates = _gates(x, seen, words, mode)
    chance, other = x.sigmoid(), (-x).sigmoid()
    bell = soft = chance * other
    if mode == "sampled" and not exact:
        assert words is not None
        u = _uniform(words, x.dtype)
        up, down = chance * (1 - u), other * u
        soft = up * down / (up + down).square()
    share = (scores - top).exp() * norm
    if sunk:
        share, gradients = share.clamp(max=1.0), gradients - delta
    pull = share * gradients
    gate = price * pairs.reach() * bell
    if mode != "open":
        gate = gate + pull * soft
    slide = torch.where(gates, pull, 0.0)
    ds = slide + gate if sunk else slide - share * delta + gate
    return torch.where(gates, share, 0.0), ds, gate.sum(-1), _total(words, gates, checked)
