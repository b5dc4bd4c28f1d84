"""The page of a graph: the folder that `clearhead trace` writes, or a graph in one JSON file; no model is needed."""

from pathlib import Path

from clearhead.commands.opening.saved_graph import open_graph
from clearhead.view.graph_page import write_comparison_page, write_graph_page


def page_beside(run: Path) -> Path:
    """page.html in the run directory, or a page named after the file."""
    return run.with_suffix(".html") if run.is_file() else run / "page.html"


def write_page(run: Path, against: Path | None, page: Path) -> Path:
    """The page of a run's graph, or of two laid over each other; returns its path.

    Raises `ClearheadError` where a run has no graph, `CorruptFileError` for a damaged one.
    """
    graph = open_graph(run)
    if against is None:
        return write_graph_page(graph, page)
    names = (run.stem, against.stem)
    if names[0] == names[1]:
        names = (str(run), str(against))
    return write_comparison_page(graph, open_graph(against), page, names)
