"""The page of a graph: the folder that `clearhead trace` writes, or a graph in one JSON file; no model is needed."""

from pathlib import Path

from clearhead.units.bundle import JSON, load_graph
from clearhead.view.graph_page import write_graph_page


def graph_of(run: Path) -> Path | None:
    """The folder or file of a run's graph; None where there is none."""
    if run.suffix == ".json" and run.is_file():
        return run
    return next((folder for folder in (run, run / "graph") if (folder / JSON).exists()), None)


def page_beside(run: Path) -> Path:
    """page.html in the run directory, or a page named after the file."""
    return run.with_suffix(".html") if run.is_file() else run / "page.html"


def write_page(graph: Path, page: Path) -> Path:
    """The page of a graph; returns its path. Raises `CorruptFileError` for a damaged graph."""
    return write_graph_page(load_graph(graph), page)
