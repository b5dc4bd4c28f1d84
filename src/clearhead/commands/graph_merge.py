"""`clearhead graph merge`: several saved graphs as one, edges with their mean weight."""

from typing import Any

from clearhead.commands.opening.saved_graph import open_graph, sizes
from clearhead.commands.printing.table import say, show
from clearhead.config import GraphMerge
from clearhead.units import Graph
from clearhead.units.bundle import save_graph


def plan(config: GraphMerge) -> dict[str, Any]:
    """What will be merged, and what comes of it."""
    graphs = [open_graph(path) for path in config.graphs]
    return {"graphs": len(graphs), **_rows(graphs, merged(config, graphs)), "folder": config.out}


def run(config: GraphMerge) -> None:
    """Write the merged graph and print what it holds."""
    graphs = [open_graph(path) for path in config.graphs]
    graph = merged(config, graphs)
    save_graph(graph, config.out)
    show(_rows(graphs, graph), f"{len(graphs)} graphs as one")
    say(f"graph: {config.out}")


def merged(config: GraphMerge, graphs: list[Graph]) -> Graph:
    """The mean of the graphs."""
    return graphs[0].merge(*graphs[1:], mean=True, from_end=config.from_end)


def _rows(graphs: list[Graph], graph: Graph) -> dict[str, Any]:
    in_all = set.intersection(*({unit.id for unit in one.units} for one in graphs))
    dropped = graph.loadings is None and any(one.loadings is not None for one in graphs)
    return {
        **sizes(graph),
        "units before": [len(one.units) for one in graphs],
        "edges before": [len(one) for one in graphs],
        "units in all, by name": len(in_all),
        "loadings": "left out: not all graphs have loadings of one kind" if dropped else None,
    }
