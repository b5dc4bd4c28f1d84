"""Two graphs side by side: what only one has, what both have, and how many units and heads carry each.

    overlap     |A ∩ B| / |A ∪ B|, of units, of edges, and of the edges that carry 90 % of Σ|weight| in their graph
    carriers    the fewest edges, heads, or pairs of units behind an attention score that carry 90 % of Σ|·|
    correlation Pearson's, of the weights of edges in both, and of all edges with 0 where one graph has none

A dense and a sparse model of one prompt, or two prompts of one model, meet by the names of their units; prompts of
different length can be counted from their ends. Nothing here says whether a difference is larger than chance: for that
compare several graphs of each side.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import ClearheadError
from clearhead.units.algebra import carriers, end_shifts, shifted
from clearhead.units.graph import Graph

SHARE = 0.9


@dataclass(frozen=True)
class Overlap:
    """Sizes of two sets and of what they share."""

    first: int
    second: int
    both: int

    @property
    def iou(self) -> float | None:
        """Intersection over union; None where both are empty."""
        union = self.first + self.second - self.both
        return self.both / union if union else None


@dataclass(frozen=True)
class Carried:
    """Numbers of one graph: Σ|weight| and what carries 90 % of it; None where the graph has no such numbers."""

    weight: float
    edges: int
    heads: int | None
    """By Σ|loading| over all edges."""
    pairs: float | None
    """Mean over the attention tables, by |contribution| of the pairs listed."""


@dataclass(frozen=True)
class Change:
    """An edge with its weight in either graph, 0 where it is not there."""

    source: str
    target: str
    first: float
    second: float


@dataclass(frozen=True)
class Comparison:
    """Two graphs compared."""

    units: Overlap
    edges: Overlap
    heaviest: Overlap
    """Of the edges that carry 90 % in their graph."""
    correlation: float | None
    """Over edges in both; None for fewer than three or where a side does not vary."""
    correlation_of_all: float | None
    carried: tuple[Carried, Carried]
    only: tuple[dict[str, float], dict[str, float]]
    """Units in one graph alone with Σ|weight| of their edges, the largest first."""
    changes: list[Change]
    """All edges, the largest change first."""
    heads: dict[tuple[int, int], tuple[float, float]]
    """(layer, head) → its share of Σ|loading| in either graph, the largest first; empty unless both have loadings."""


def compare(first: Graph, second: Graph, *, from_end: bool = False) -> Comparison:
    """Both graphs side by side.

    Raises `ClearheadError` for a graph without edges and, with `from_end`, for one that does not say how long its
    prompt is.
    """
    graphs = (first, second)
    for number, graph in enumerate(graphs, 1):
        if not len(graph):
            raise ClearheadError(f"graph {number} of 2 has no edges, so there is nothing to compare")
    shifts = end_shifts(graphs) if from_end else [0, 0]
    names = [[shifted(unit, by).id for unit in graph.units] for graph, by in zip(graphs, shifts, strict=True)]
    weights = [
        {(some[s], some[t]): w for s, t, w in zip(g.source.tolist(), g.target.tolist(), g.weight.tolist(), strict=True)}
        for g, some in zip(graphs, names, strict=True)
    ]
    heavy = []
    for graph, edges in zip(graphs, weights, strict=True):
        pairs = list(edges)
        heavy.append({pairs[edge] for edge in carriers(graph.weight, SHARE)})
    union = list(dict.fromkeys([*weights[0], *weights[1]]))
    table: NDArray[np.float64] = np.array([[side.get(edge, 0.0) for side in weights] for edge in union])
    shared = np.array([edge in weights[0] and edge in weights[1] for edge in union])
    order = np.argsort(-np.abs(table[:, 0] - table[:, 1]), kind="stable").tolist()
    changes = [Change(*union[edge], first=float(table[edge, 0]), second=float(table[edge, 1])) for edge in order]
    return Comparison(
        units=_overlap(set(names[0]), set(names[1])),
        edges=_overlap(set(weights[0]), set(weights[1])),
        heaviest=_overlap(heavy[0], heavy[1]),
        correlation=_correlation(table[shared]),
        correlation_of_all=_correlation(table),
        carried=(_carried(first), _carried(second)),
        only=(_only(first, names[0], set(names[1])), _only(second, names[1], set(names[0]))),
        changes=changes,
        heads=_heads(first, second),
    )


def _overlap(first: set[Any], second: set[Any]) -> Overlap:
    return Overlap(len(first), len(second), len(first & second))


def _correlation(table: NDArray[np.float64]) -> float | None:
    if len(table) < 3 or not table.std(0).all():
        return None
    x, y = (table - table.mean(0)).T
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def _carried(graph: Graph) -> Carried:
    heads = pairs = None
    if graph.loadings is not None:
        heads = len(carriers(np.array(list(graph.loadings.by_head().values())), SHARE))
    tables = [np.array([pair[-1] for pair in table.pairs]) for table in graph.attention if table.pairs]
    if tables:
        pairs = float(np.mean([len(carriers(table, SHARE)) for table in tables]))
    return Carried(float(np.abs(graph.weight).sum()), len(carriers(graph.weight, SHARE)), heads, pairs)


def _only(graph: Graph, names: list[str], others: set[str]) -> dict[str, float]:
    size, n = np.abs(graph.weight), len(graph.units)
    touching = np.bincount(graph.source, size, minlength=n) + np.bincount(graph.target, size, minlength=n)
    alone = {name: float(touching[place]) for place, name in enumerate(names) if name not in others}
    return dict(sorted(alone.items(), key=lambda item: -item[1]))


def _heads(first: Graph, second: Graph) -> dict[tuple[int, int], tuple[float, float]]:
    if first.loadings is None or second.loadings is None:
        return {}
    shares = []
    for loadings in (first.loadings, second.loadings):
        total = loadings.by_head()
        whole = sum(total.values()) or 1.0
        shares.append({head: weight / whole for head, weight in total.items()})
    heads = {head: (shares[0].get(head, 0.0), shares[1].get(head, 0.0)) for head in [*shares[0], *shares[1]]}
    return dict(sorted(heads.items(), key=lambda item: -max(item[1])))
