"""Which attention heads carry an edge of an attribution graph, and from which key to which query.

Between a source's write w and a target's read r the stream passes the attention layers in between, straight or through
a head. At layer l, with the source's component C and the target's gradient G there,

    loading(l, h, q, k) = P_h[q, k] s_k · C_k W_V W_O · G_q      loading(l, h) = Σ_qk loading(l, h, q, k)

Which paths are counted depends on how C and G are taken, everything that reaches the layer or only the write, the read
itself (`Paths`):

    one     the write, the read      paths through this head and no other; they add up over layers and heads:
                                     edge = direct + Σ_lh + what passes several heads (`remainder`)
    last    everything, the read     paths whose last head this is: edge = direct + Σ_lh, nothing is left
    first   the write, everything    paths whose first head this is: edge = direct + Σ_lh, nothing is left
    any     everything, everything   all paths through this head: edge = bypass(l) + Σ_h at every layer by itself; a
                                     path may pass heads of several layers, so these do not add up over layers

`direct` passes no head. Layers replaced by a Lorsa have no heads here: theirs are sources of the graph.

Held at once: one layer of a block of sources and targets; with `first` and `any` all layers of a block of targets.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.circuits.tracing.frozen import Frozen
from clearhead.circuits.tracing.readers import Reads
from clearhead.circuits.tracing.sources import Opened
from clearhead.errors import ClearheadError
from clearhead.units.annotations import Loadings

Paths = Literal["one", "last", "first", "any"]
CHUNK = 1 << 22
"""Numbers that a block of sources, of targets, or of edges holds at once."""


@dataclass(frozen=True, eq=False)
class EdgeSplit:
    """Edges split over heads."""

    paths: Paths
    edge: Float[Tensor, " x"]
    direct: Float[Tensor, " x"]
    """What passes no head."""
    weight: Float[Tensor, "x l h"]

    @property
    def remainder(self) -> Float[Tensor, " x"]:
        """What is left of the edge: with `one` what passes several heads; with `last` and `first` rounding.

        Raises `ClearheadError` for `any`, which does not add up over layers.
        """
        if self.paths == "any":
            raise ClearheadError("loadings of any paths do not add up over layers; ask for bypass, or split by 'last'")
        return self.edge - self.direct - self.weight.sum((1, 2))

    @property
    def bypass(self) -> Float[Tensor, "x l"]:
        """With `any`, what goes past the heads of each layer."""
        if self.paths != "any":
            raise ClearheadError("what goes past a layer is known for any paths alone; ask for remainder")
        return self.edge[:, None] - self.weight.sum(2)

    def loadings(self, edges: Int[Tensor, " x"], share: float = 1.0) -> Loadings:
        """For a graph whose edges lie at the places `edges`; per edge the largest that hold `share` of Σ |weight|."""
        flat = self.weight.flatten(1).double()
        size, order = flat.abs().sort(1, descending=True)
        before = size.cumsum(1) - size
        kept = (before < share * size.sum(1, keepdim=True) * (1 - 1e-12)) & (size > 0)
        row, column = kept.nonzero(as_tuple=True)
        place = order[row, column]
        n_heads = self.weight.shape[2]
        arrays = (edges.to(row.device)[row], place // n_heads, place % n_heads, flat[row, place])
        return Loadings(*(array.cpu().numpy() for array in arrays), kind=f"{self.paths} paths")


class AttentionEdges(NamedTuple):
    """One edge of a graph split over attention edges, the largest first."""

    layer: Int[Tensor, " x"]
    head: Int[Tensor, " x"]
    query: Int[Tensor, " x"]
    key: Int[Tensor, " x"]
    weight: Float[Tensor, " x"]


@torch.no_grad()
def split_edges(
    opened: Opened,
    reads: Reads,
    source: Int[Tensor, " x"],
    target: Int[Tensor, " x"],
    edge: Float[Tensor, " x"],
    paths: Paths = "one",
) -> EdgeSplit:
    """Splits x edges over the heads that carry them.

    source, target: places among `opened.sources.units` and among `reads.targets`; edge: the edges' weights.
    Raises `ClearheadError` for lists of different lengths.
    """
    if not source.shape == target.shape == edge.shape or source.dim() != 1:
        raise ClearheadError(
            f"source, target and edge are lists of one length; got {list(source.shape)}, {list(target.shape)}, "
            f"{list(edge.shape)}"
        )
    frozen = opened.frozen
    n_heads = max(parts.geometry.n_heads for parts in opened.parts.layers)
    weight = torch.zeros(len(source), frozen.n_layers, n_heads, dtype=frozen.dtype, device=reads.vector.device)
    for piece in _pieces(opened, reads, source, target, paths):
        summed = piece.weight.sum((-2, -1)).flatten(1)
        weight[piece.edges, piece.layer, : summed.shape[1]] = summed
    return EdgeSplit(paths, edge, _direct(opened, reads, source, target), weight)


@torch.no_grad()
def split_edge(opened: Opened, reads: Reads, source: int, target: int, paths: Paths = "last") -> AttentionEdges:
    """Splits one edge over attention edges (layer, head, query, key); up to l · h · t² of them are not 0."""
    frozen, device = opened.frozen, reads.vector.device
    sources, targets = (torch.tensor([place], device=device) for place in (source, target))
    found: list[tuple[Tensor, ...]] = []
    for piece in _pieces(opened, reads, sources, targets, paths):
        by_head = piece.weight[0].flatten(0, 1)
        total = by_head.new_zeros(len(by_head), len(frozen) ** 2)
        where = piece.query[0, :, None] * len(frozen) + piece.key[0]
        total.index_add_(1, where.flatten(), by_head.flatten(1))
        head, place = total.nonzero(as_tuple=True)
        layer = torch.full_like(head, piece.layer)
        found.append((layer, head, place // len(frozen), place % len(frozen), total[head, place]))
    if not found:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return AttentionEdges(nothing, nothing, nothing, nothing, torch.empty(0, dtype=frozen.dtype, device=device))
    columns = [torch.cat(column) for column in zip(*found, strict=True)]
    order = columns[-1].abs().argsort(descending=True, stable=True)
    return AttentionEdges(*(column[order] for column in columns))


class _Piece(NamedTuple):
    """Loadings of some edges at one layer."""

    edges: Int[Tensor, " x"]
    layer: int
    weight: Float[Tensor, "x g r q k"]
    query: Int[Tensor, "x q"]
    key: Int[Tensor, "x k"]


class _At(NamedTuple):
    """Vectors of one side at some of its positions; where a row has fewer, the rest are zero."""

    vectors: Tensor
    position: Int[Tensor, "n p"]


class _Entries(NamedTuple):
    """The writes of some sources or the reads of some targets, as many columns as the largest of them has.

    Where a row has fewer, the rest has depth -1.
    """

    vectors: Float[Tensor, "n p d"]
    depth: Int[Tensor, "n p"]
    position: Int[Tensor, "n p"]

    @classmethod
    def gather(cls, owner: Tensor, vectors: Tensor, depth: Tensor, position: Tensor, rows: Tensor) -> "_Entries":
        """Those whose owner is in `rows`, a row each."""
        row = torch.full((int(max(owner.max(), rows.max())) + 1,), -1, device=owner.device)
        row[rows] = torch.arange(len(rows), device=rows.device)
        place = (row[owner] >= 0).nonzero()[:, 0]
        place = place[row[owner[place]].argsort(stable=True)]
        count = torch.bincount(row[owner[place]], minlength=len(rows))
        start = (count.cumsum(0) - count).repeat_interleave(count)
        where = (row[owner[place]], torch.arange(len(place), device=rows.device) - start)
        shape = (len(rows), max(1, int(count.max())))
        found = vectors.new_zeros(*shape, vectors.shape[1]), depth.new_full(shape, -1), depth.new_zeros(shape)
        found[1][:, 0] = 0  # a row without any entry keeps an empty one
        for full, part in zip(found, (vectors, depth, position), strict=True):
            full[where] = part[place]
        return cls(*found)

    def flat(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `Frozen.pull` and `push` take them."""
        row, column = (self.depth >= 0).nonzero(as_tuple=True)
        return self.vectors[row, column], self.depth[row, column], self.position[row, column], row


def _pieces(opened: Opened, reads: Reads, source: Tensor, target: Tensor, paths: Paths) -> Iterator[_Piece]:
    """The loadings themselves, block of targets by block of sources by layer."""
    if paths not in ("one", "last", "first", "any"):
        raise ClearheadError(f"paths are 'one', 'last', 'first' or 'any' (see loadings.py); got {paths!r}")
    frozen, sources = opened.frozen, opened.sources
    d = opened.parts.model.d_model
    up, down = paths in ("last", "any"), paths in ("first", "any")
    # of a target that is pulled down, what it reads at all layers is kept
    for targets in _chunks(target, reads.row, d, len(frozen) * frozen.n_layers if down else None):
        right = _Entries.gather(reads.row, reads.vector, reads.depth, reads.position, targets)
        readings = _readings(frozen, right, whole=down)
        wanted = torch.isin(target, targets)
        for some in _chunks(source[wanted], sources.unit, d, len(frozen) if up else None):
            left = _Entries.gather(sources.unit, sources.write, sources.depth, sources.position, some)
            edges = (wanted & torch.isin(source, some)).nonzero()[:, 0]
            rows = _place(targets, target[edges]), _place(some, source[edges])
            for layer, values in _values(frozen, left, whole=up):
                reading = readings(layer)
                if reading is not None:
                    yield from _meet(frozen, layer, edges, rows, reading, values)


def _meet(
    frozen: Frozen, layer: int, edges: Tensor, rows: tuple[Tensor, Tensor], reading: _At, value: _At
) -> Iterator[_Piece]:
    """Reading times pattern times value, for the edges between two blocks."""
    pattern = frozen.carriers[layer].pattern
    heads, width = pattern.shape[0] * pattern.shape[1], value.vectors.shape[-1]
    queries, keys = reading.position.shape[1], value.position.shape[1]
    step = max(1, CHUNK // (heads * (queries * keys + (queries + keys) * width)))
    for some in torch.arange(len(edges), device=edges.device).split(step):
        targets, sources = rows[0][some], rows[1][some]
        query, key = reading.position[targets], value.position[sources]
        met = torch.einsum("xqgrv,xkgv->grxqk", reading.vectors[targets], value.vectors[sources])
        met *= pattern[:, :, query[:, :, None], key[:, None]]
        yield _Piece(edges[some], layer, met.permute(2, 0, 1, 3, 4), query, key)


def _values(frozen: Frozen, left: _Entries, *, whole: bool) -> Iterator[tuple[int, _At]]:
    """What the heads of each layer mix of the sources, bottom to top: of all that arrives, or of the writes alone."""
    if not whole:
        for layer, carrier in frozen.carriers.items():
            live = left.depth <= _below(frozen, layer)
            if bool(live.any()):
                yield layer, _At(carrier.values(left.vectors * live[..., None]), left.position)
        return
    everywhere = torch.arange(len(frozen), device=left.depth.device).expand(len(left.vectors), -1)
    for depth, components in frozen.push(*left.flat()):
        carrier = frozen.carrier(depth)
        if carrier is not None:
            yield depth // 2, _At(carrier.values(components), everywhere)


def _readings(frozen: Frozen, right: _Entries, *, whole: bool) -> Callable[[int], _At | None]:
    """By layer, what the targets read of the heads' outputs: along all ways up, or by the reads alone."""
    if not whole:

        def read(layer: int) -> _At | None:
            live = right.depth > _below(frozen, layer)
            if not bool(live.any()):
                return None
            return _At(frozen.carriers[layer].readings(right.vectors * live[..., None]), right.position)

        return read
    everywhere = torch.arange(len(frozen), device=right.depth.device).expand(len(right.vectors), -1)
    stored = {}
    for depth, gradient in frozen.pull(*right.flat()):
        carrier = frozen.carrier(depth - 1)
        if carrier is not None:
            stored[(depth - 1) // 2] = _At(carrier.readings(gradient), everywhere)
    return stored.get


def _below(frozen: Frozen, layer: int) -> int:
    """The depth from which layer `layer`'s attention carries the stream to the next."""
    return 2 * layer + frozen.parallel


def _direct(opened: Opened, reads: Reads, source: Tensor, target: Tensor) -> Float[Tensor, " x"]:
    """Writes that are read at their own position, at their depth or above."""
    sources, d = opened.sources, opened.parts.model.d_model
    total = torch.zeros(len(source), dtype=opened.frozen.dtype, device=source.device)
    for targets in _chunks(target, reads.row, d):
        right = _Entries.gather(reads.row, reads.vector, reads.depth, reads.position, targets)
        wanted = torch.isin(target, targets)
        for some in _chunks(source[wanted], sources.unit, d):
            left = _Entries.gather(sources.unit, sources.write, sources.depth, sources.position, some)
            edges = (wanted & torch.isin(source, some)).nonzero()[:, 0]
            for part in edges.split(max(1, CHUNK // (d * (right.depth.shape[1] + left.depth.shape[1])))):
                m, n = _place(targets, target[part]), _place(some, source[part])
                met = torch.einsum("xqd,xkd->xqk", right.vectors[m], left.vectors[n])
                same = right.position[m][:, :, None] == left.position[n][:, None]
                above = right.depth[m][:, :, None] >= left.depth[n][:, None]
                total[part] = (met * (same & above)).sum((1, 2))
    return total


def _chunks(rows: Tensor, owner: Tensor, width: int, length: int | None = None) -> Iterator[Tensor]:
    """Different rows, so many at once that they hold `CHUNK` numbers of `length` vectors of `width` each.

    Without `length` as many vectors as the row of the chunk with most entries has; those with few come first.
    """
    unique = rows.unique()
    count = torch.bincount(owner, minlength=int(unique.max()) + 1 if len(unique) else 0)[unique]
    order = count.argsort(stable=True)
    start = 0
    for place, vectors in enumerate(count[order].tolist()):
        if place > start and (place + 1 - start) * max(1, length or vectors) * width > CHUNK:
            yield unique[order[start:place]]
            start = place
    if len(unique):
        yield unique[order[start:]]


def _place(rows: Tensor, wanted: Tensor) -> Tensor:
    """Where in `rows` each of `wanted` stands."""
    order = rows.argsort()
    return order[torch.searchsorted(rows[order], wanted)]
