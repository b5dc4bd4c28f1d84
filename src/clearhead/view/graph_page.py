"""The page of an attribution graph: units by token and layer, signed edges, the heads that carry them, and attention.

The frame is that of every page (`view.shell`); the list holds the units. Data comes from `view.graph_payload`, words
from `view.graph_words`. No model is needed: everything is in the graph.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.units.graph import Graph
from clearhead.view.graph_compare import Comparison, compare
from clearhead.view.graph_payload import Limits, build_graph_payload
from clearhead.view.graph_words import HELP, OF_NO_PROMPT, compared_tiles, score_tiles
from clearhead.view.shell import Contents, render, write_within
from clearhead.view.visible import visible

SCRIPTS = (
    "grid.js",
    "graph_data.js",
    "graph_layout.js",
    "graph_draw.js",
    "graph_tables.js",
    "graph_groups.js",
    "graph_unit.js",
    "graph_attention.js",
    "graph.js",
)
STYLES = ("toy.css", "spectral.css", "graph.css")
_SMALLEST = "with its 5,000 heaviest edges"
_SMALLER = (
    Limits(),
    Limits(loadings=64),
    Limits(loadings=16),
    Limits(edges=100_000, loadings=8),
    Limits(edges=20_000, loadings=8),
    Limits(edges=5_000, loadings=4),
)


def write_graph_page(graph: Graph, out: Path, *, max_megabytes: float = 25.0) -> Path:
    """Write the page of `graph` to `out` and return that path.

    A page that would pass `max_megabytes` (10^6 bytes) holds fewer loadings per edge, then fewer edges, and says so.
    Raises `ClearheadError` when the limit cannot be met, and when the disk is full.
    """
    return write_within(out, _pages(graph, None, score_tiles(graph.scores)), max_megabytes, _SMALLEST)


def write_comparison_page(
    first: Graph, second: Graph, out: Path, names: tuple[str, str], *, max_megabytes: float = 25.0
) -> Path:
    """The same for two graphs laid over each other: edges are drawn by what the first has more than the second."""
    compared = compare(first, second, names)
    tiles = compared_tiles(first.scores, second.scores)
    return write_within(out, _pages(compared.graph, compared, tiles), max_megabytes, _SMALLEST)


def _pages(graph: Graph, compared: Comparison | None, tiles: list[dict[str, str]]) -> Iterator[bytes]:
    if not graph.units:
        raise ClearheadError("this graph has no units, so there is nothing to draw; keep more of it when pruning")
    prompts = [graph.provenance.prompt, *(parent.prompt for parent in graph.provenance.parents)]
    prompt = next((text for text in prompts if text), "")
    placed = any(unit.position is not None for unit in graph.units)
    fixed = {
        "help": HELP if placed else HELP | {"graph": OF_NO_PROMPT},
        "title": visible(prompt) if prompt else "Graph",
        "tiles": tiles,
        "protocol": visible(graph.provenance.protocol),
    }
    for limits in _SMALLER:
        payload = build_graph_payload(graph, limits, compared)
        contents = Contents({**payload.index, **fixed}, payload.parts, SCRIPTS, STYLES, items="Units")
        yield render(contents, _about(graph))


def _about(graph: Graph) -> dict[str, Any]:
    task = f"graph of {len(graph.units):,} units and {len(graph):,} edges"
    about = asdict(graph.provenance)
    parents = {str(place): parent for place, parent in enumerate(about.pop("parents"), 1)}
    return about | {"task": task, "scores": dict(graph.scores)} | ({"parents": parents} if parents else {})
