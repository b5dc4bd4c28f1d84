"""How important the units of a graph are, and the sums of their edges."""

import numpy as np
from numpy.typing import NDArray

from clearhead.units.graph import Graph

ERRORS = frozenset({"error", "attn_error", "mlp", "attn"})
"""Kinds that explain nothing further: what dictionaries leave, and opaque outputs of whole layers."""


def edge_sums(graph: Graph) -> dict[str, NDArray[np.float64]]:
    """Per unit: Σ|weight| of edges in and out, Σ weight in, and the share of |weight| in that comes from errors."""
    size, n = np.abs(graph.weight), len(graph.units)
    is_error = np.array([unit.kind in ERRORS for unit in graph.units], dtype=bool)

    def total(end: NDArray[np.int64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.bincount(end, weights, minlength=n).astype(np.float64)

    into = total(graph.target, size)
    from_errors = total(graph.target, size * is_error[graph.source])
    return {
        "in": into,
        "out": total(graph.source, size),
        "balance": total(graph.target, graph.weight),
        "errors": np.divide(from_errors, into, out=np.zeros(n), where=into > 0),
    }


def shares_of(graph: Graph, name: str) -> NDArray[np.float64] | None:
    """Named values that are shares; None without them, and in a difference of graphs, where some are negative."""
    values = graph.values.get(name)
    return None if values is None or (values < 0).any() else values


def unit_ranks(graph: Graph) -> NDArray[np.float64]:
    """The graph's cumulative influence, else the share of Σ|weight| of edges that more important units have.

    In [0, 1], small is important.
    """
    influence = shares_of(graph, "influence")
    if influence is not None:
        # a unit without influence is as unimportant as can be
        return np.clip(np.nan_to_num(influence, nan=1.0), 0.0, 1.0)
    sums = edge_sums(graph)
    weights = sums["in"] + sums["out"]
    order = np.argsort(-weights, kind="stable")
    ranks = np.ones(len(weights))
    total = weights.sum()
    if total > 0:
        # the share before a unit: the first is at 0, so that no threshold hides it
        ranks[order] = np.concatenate([[0.0], np.cumsum(weights[order])[:-1]]) / total
    return ranks
