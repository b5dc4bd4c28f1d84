"""A graph that is on disk, in whichever of the forms the graph verbs take."""

from pathlib import Path

from clearhead.circuits.formats.component_graph import is_mib, read_mib
from clearhead.errors import ClearheadError
from clearhead.runs import read_json
from clearhead.units import Graph
from clearhead.units.bundle import JSON, load_graph


def find_graph(path: Path) -> Path | None:
    """The folder or file of the graph of a run; None where there is none."""
    if path.suffix == ".json" and path.is_file():
        return path
    return next((folder for folder in (path, path / "graph") if (folder / JSON).exists()), None)


def open_graph(path: Path) -> Graph:
    """The graph of a run, a folder, one JSON file, or a circuit file of EAP-IG and MIB.

    Raises `ClearheadError` where there is none, `CorruptFileError` for a damaged one.
    """
    found = find_graph(path)
    if found is None:
        raise ClearheadError(
            f"{path} holds no graph; give the directory that `clearhead trace` wrote, or its graph.json"
        )
    if found.is_file() and is_mib(read_json(found)):
        return read_mib(found)
    return load_graph(found)


def sizes(graph: Graph) -> dict[str, object]:
    """What a table says of a graph."""
    return {
        "model": graph.provenance.model,
        "weights": graph.provenance.protocol,
        "units": len(graph.units),
        "edges": len(graph),
        "also": graph.annotated or None,
    }
