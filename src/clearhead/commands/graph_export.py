"""`clearhead graph export`: a saved graph in the format of another program."""

from pathlib import Path
from typing import Any

from clearhead.circuits.formats.component_graph import Sizes, to_mib, write_mib
from clearhead.circuits.formats.graphml import write_graphml
from clearhead.circuits.formats.neuronpedia import (
    Dashboards,
    shown_tables,
    speakable,
    to_neuronpedia,
    write_neuronpedia,
)
from clearhead.commands.opening.saved_graph import open_graph, sizes
from clearhead.commands.printing.table import say, show, size
from clearhead.config import GraphExport
from clearhead.errors import ClearheadError
from clearhead.units import Graph
from clearhead.units.bundle import save_graph


def plan(config: GraphExport) -> dict[str, Any]:
    """What will be written, and where."""
    return {**sizes(open_graph(config.graph)), "format": config.format, "out": place(config)}


def run(config: GraphExport) -> None:
    """Write the graph and print what was written and what was left out."""
    graph, out = open_graph(config.graph), place(config)
    match config.format:
        case "neuronpedia":
            file, rows = _neuronpedia(config, graph, out)
        case "graphml":
            file = write_graphml(graph, out)
            rows = {"nodes": len(graph.units), "edges": len(graph), "attention tables left out": len(graph.attention)}
        case "mib":
            shape = model_sizes(graph)
            file = write_mib(graph, shape, out)
            rows = {"edges": len(to_mib(graph, shape)["edges"]), "edges added over positions from": len(graph)}
        case "bundle":
            file, rows = save_graph(graph, out), sizes(graph)
    show(rows, f"{config.graph} as {config.format}")
    length = sum(part.stat().st_size for part in file.iterdir()) if file.is_dir() else file.stat().st_size
    say(f"{'folder' if file.is_dir() else 'file'}: {file} ({size(length)})")


def place(config: GraphExport) -> Path:
    """The file or folder to write: as given, or beside the graph."""
    if config.out is not None:
        return config.out
    stem = config.graph.with_suffix("") if config.graph.suffix == ".json" else config.graph
    ends = {"neuronpedia": "-neuronpedia", "graphml": ".graphml", "mib": "-mib.json", "bundle": "-bundle"}
    return stem.with_name(stem.name + ends[config.format])


def _neuronpedia(config: GraphExport, graph: Graph, out: Path) -> tuple[Path, dict[str, Any]]:
    slug = config.slug or speakable(config.graph.stem if config.graph.suffix == ".json" else config.graph.name)
    scan = config.scan or speakable(graph.provenance.model.rpartition("/")[2])
    dashboards = Dashboards(config.features_url, config.source_set, config.lorsa_source_set)
    entries = to_neuronpedia(graph, slug, scan, dashboards)
    return write_neuronpedia(entries, out), {
        "slug": slug,
        "scan": scan,
        "nodes": len(entries["nodes"]),
        "links": len(entries["links"]),
        "supernodes": len(entries["qParams"]["supernodes"]),
        "attention tables": len(shown_tables(graph)),
        "left out, their attention is no node": len(graph.attention) - len(shown_tables(graph)),
        "nodes of attention tables alone": len(entries["qk_only_nodes"]),
    }


def model_sizes(graph: Graph) -> Sizes:
    """Sizes of the graph's model; raises `ClearheadError` where its name is none that can be opened."""
    # transformers takes seconds to load, and no other format needs it
    from clearhead.commands.opening.structure import without_weights

    try:
        model = without_weights(graph.provenance.model)
    except ClearheadError as error:
        raise ClearheadError(
            f"a circuit of EAP-IG or MIB says how large its model is, and {graph.provenance.model!r} cannot be opened: "
            f"{error}"
        ) from error
    return Sizes(model.n_layers, model.n_heads, model.d_model, model.family.parallel)
