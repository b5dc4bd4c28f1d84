"""`clearhead graph diff`: two saved graphs side by side."""

from typing import Any

from clearhead.commands.opening.saved_graph import open_graph, sizes
from clearhead.commands.printing.table import say, spelled
from clearhead.config import GraphDiff
from clearhead.units.bundle import save_graph
from clearhead.units.compare import Comparison, compare


def plan(config: GraphDiff) -> dict[str, Any]:
    """Which graphs are compared, and where their difference goes."""
    graphs = {"first": open_graph(config.first), "second": open_graph(config.second)}
    held = {f"{name}, {what}": value for name, graph in graphs.items() for what, value in sizes(graph).items()}
    return {**held, "difference": config.out}


def run(config: GraphDiff) -> None:
    """Print what differs; write the difference where a folder is given."""
    first, second = open_graph(config.first), open_graph(config.second)
    found = compare(first, second, from_end=config.from_end)
    for name, path, graph in (("A", config.first, first), ("B", config.second, second)):
        say(f"{name}: {path}, {graph.provenance.model}, {graph.provenance.prompt or 'no one prompt'!r}")
    if first.provenance.protocol != second.provenance.protocol:
        say("Their weights are not measured alike:")
        say(f"A: {first.provenance.protocol}")
        say(f"B: {second.provenance.protocol}")
    print_rows(numbers(found))
    print_rows(
        [("units in one graph alone, with the Σ|weight| of their edges", "A", "B")] + _side_by_side(found, config.top),
    )
    edges = [(f"{c.source} → {c.target}", c.first, c.second) for c in found.changes[: config.top]]
    print_rows([("edges that changed most", "A", "B"), *edges])
    if found.heads:
        heads = [(f"head.{layer}.{head}", *shares) for (layer, head), shares in list(found.heads.items())[: config.top]]
        print_rows([("share of Σ|loading| by head", "A", "B"), *heads])
    if config.out is not None:
        say(f"difference: {save_graph(first.diff(second, from_end=config.from_end), config.out)}")


def numbers(found: Comparison) -> list[tuple[Any, ...]]:
    """The table of sizes: a line per quantity with that of A, of B, and what joins them."""
    one, other = found.carried
    rows = [("", "A", "B", "both", "IoU")]
    rows += [
        (name, part.first, part.second, part.both, part.iou)
        for name, part in (
            ("units", found.units),
            ("edges", found.edges),
            ("edges for 90 % of |weight|", found.heaviest),
        )
    ]
    rows += [
        ("heads for 90 % of |loading|", one.heads, other.heads),
        ("pairs for 90 % of an attention score", one.pairs, other.pairs),
        ("Σ|weight|", one.weight, other.weight),
        ("correlation of weights, edges in both", found.correlation),
        ("correlation of weights, all edges", found.correlation_of_all),
    ]
    return rows


def _side_by_side(found: Comparison, top: int) -> list[tuple[Any, ...]]:
    first = [(name, weight, None) for name, weight in found.only[0].items()]
    second = [(name, None, weight) for name, weight in found.only[1].items()]
    rows = sorted(first + second, key=lambda row: -(row[1] or row[2] or 0.0))
    return rows[:top] or [("none", None, None)]


def print_rows(rows: list[tuple[Any, ...]]) -> None:
    """Print a table whose columns are as wide as they need; the first is on the left."""
    cells = [[row[0], *map(spelled, row[1:])] for row in rows]
    n = max(map(len, cells))
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(n)]
    say("")
    for row in cells:
        numbers = "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=False))
        say(f"  {row[0]:<{widths[0]}}{numbers}".rstrip())
