"""A topological order of a graph's units, and the cycle that forbids one.

Units without an edge into them come first, then those whose sources have all come (Kahn 1962). Time and memory grow
with units and edges; nothing recurses.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import ClearheadError

if TYPE_CHECKING:
    from clearhead.units.graph import Graph

SHOWN = 8


def topological_order(graph: "Graph") -> NDArray[np.int64]:
    """Places of all units so that every edge goes to a later one; raises `ClearheadError` naming a cycle."""
    n = len(graph.units)
    by_source = np.argsort(graph.source, kind="stable")
    target = graph.target[by_source].tolist()
    start = np.searchsorted(graph.source[by_source], np.arange(n + 1)).tolist()
    waiting = np.bincount(graph.target, minlength=n).tolist()
    order = [place for place in range(n) if not waiting[place]]
    for place in order:
        for follower in target[start[place] : start[place + 1]]:
            waiting[follower] -= 1
            if not waiting[follower]:
                order.append(follower)
    if len(order) < n:
        raise ClearheadError(
            f"this graph has a cycle, {_cycle(graph, np.array(waiting) > 0)}, where contributions must flow one way; "
            f"drop one of these edges (graph.restrict, graph.prune), or bind the units to token positions"
        )
    return np.array(order, dtype=np.int64)


def _cycle(graph: "Graph", stuck: NDArray[np.bool_]) -> str:
    """Some cycle in words: whoever is stuck has a source that is stuck, so walking back meets itself."""
    inside = stuck[graph.source] & stuck[graph.target]
    source_of = dict(zip(graph.target[inside].tolist(), graph.source[inside].tolist(), strict=True))
    place, seen = int(np.argmax(stuck)), {}
    while place not in seen:
        seen[place] = len(seen)
        place = source_of[place]
    cycle = [*reversed(list(seen)[seen[place] :])]
    names = [str(graph.units[p]) for p in (*cycle, cycle[0])]
    return " → ".join(names if len(names) <= SHOWN else [*names[: SHOWN - 2], "…", names[-1]])
