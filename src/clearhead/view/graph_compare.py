"""Two graphs as one for a page: weights of the first minus those of the second, and which of the two has each unit.

Units are the same when their names are. Prompts of different lengths meet at their last token (`Graph.diff`). Of two
ranks a unit has the smaller: what matters in either graph is shown first.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clearhead.units.algebra import shifted
from clearhead.units.graph import Graph
from clearhead.units.unit import Unit
from clearhead.view.graph_ranks import unit_ranks

BOTH, FIRST, SECOND = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Comparison:
    """The difference of two graphs and what it is the difference of."""

    graph: Graph
    """First minus second, over the units and edges of both."""
    names: tuple[str, str]
    side: tuple[int, ...]
    """Per unit `BOTH`, `FIRST` or `SECOND`."""
    weights: NDArray[np.float64]
    """[2, edges]: the weight in each graph, 0 where it has no such edge."""
    ranks: NDArray[np.float64]
    """[units]."""


def compare(first: Graph, second: Graph, names: tuple[str, str]) -> Comparison:
    """Lay two graphs over each other; raises `ClearheadError` where their prompts cannot be aligned."""
    lengths = [len(graph.tokens) for graph in (first, second)]
    from_end = lengths[0] != lengths[1]
    difference = first.diff(second, from_end=from_end)
    total = first.merge(second, from_end=from_end)
    ranks = np.ones((2, len(difference.units)))
    held: list[set[Unit]] = []
    for row, graph, length in zip(ranks, (first, second), lengths, strict=True):
        by = max(lengths) - length if from_end else 0
        moved = [shifted(unit, by) for unit in graph.units]
        row[[difference.place(unit) for unit in moved]] = unit_ranks(graph)
        held.append(set(moved))
    side = tuple(
        BOTH if unit in held[0] and unit in held[1] else FIRST if unit in held[0] else SECOND
        for unit in difference.units
    )
    # both have the edges of both graphs in one order
    weights = np.stack([total.weight + difference.weight, total.weight - difference.weight]) / 2
    return Comparison(difference, names, side, weights, ranks.min(0))
