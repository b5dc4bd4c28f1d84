"""Graphs as GraphML, for networkx, Gephi, Cytoscape and yEd.

Nodes carry their unit's name as id and its kind, layer, index, part, position, activation, label, supernodes and every
named value; edges carry weight and, as JSON, their head loadings; the graph carries provenance, scores and tokens as
JSON. A unit without a number has no such entry. Attention tables, which are no part of such a graph, are left out.

Format: graphml.graphdrawing.org, version 1.0.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import numpy as np

from clearhead.runs import written_aside
from clearhead.units import Graph

NAMESPACE = "http://graphml.graphdrawing.org/xmlns"
TYPES = {float: "double", int: "long", str: "string"}
# what XML 1.0 has no way to write, escaped or not
_UNWRITABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_graphml(graph: Graph) -> bytes:
    """The graph as a GraphML document in UTF-8; characters that XML cannot hold become U+FFFD."""
    root = Xml.Element("graphml", xmlns=NAMESPACE)
    keys: dict[tuple[str, str], str] = {}
    body = Xml.Element("graph", id="G", edgedefault="directed")

    def describe(element: Xml.Element, kind: str, entries: Mapping[str, Any]) -> None:
        for name, value in entries.items():
            if value is None or (isinstance(value, float) and np.isnan(value)):
                continue
            if (kind, name) not in keys:
                keys[kind, name] = f"k{len(keys)}"
                spelled = {"for": kind, "attr.name": _writable(name), "attr.type": TYPES[type(value)]}
                Xml.SubElement(root, "key", id=keys[kind, name], attrib=spelled)
            Xml.SubElement(element, "data", key=keys[kind, name]).text = _writable(
                repr(value) if isinstance(value, float) else str(value)
            )

    provenance = {"provenance": json.dumps(asdict(graph.provenance))}
    scores = {"scores": json.dumps(graph.scores)} if graph.scores else {}
    tokens = {"tokens": json.dumps(graph.tokens)} if graph.tokens else {}
    describe(body, "graph", provenance | scores | tokens)
    groups: dict[str, list[str]] = {}
    for group in graph.supernodes:
        for name in group.units:
            groups.setdefault(name, []).append(group.name)
    for place, unit in enumerate(graph.units):
        entries = {name: getattr(unit, name) for name in ("kind", "layer", "index", "part", "position")}
        entries["activation"] = None if unit.activation is None else float(unit.activation)
        entries["label"] = graph.labels.get(unit.id)
        entries["supernodes"] = json.dumps(groups[unit.id]) if unit.id in groups else None
        entries |= {f"value:{name}": float(array[place]) for name, array in graph.values.items()}
        describe(Xml.SubElement(body, "node", id=unit.id), "node", entries)
    loadings: dict[int, list[list[Any]]] = {}
    if graph.loadings is not None:
        for edge, layer, head, weight in zip(*(a.tolist() for a in graph.loadings.arrays().values()), strict=True):
            loadings.setdefault(edge, []).append([layer, head, weight])
    for edge, (source, target) in enumerate(zip(graph.source, graph.target, strict=True)):
        ends = {"source": graph.units[source].id, "target": graph.units[target].id}
        heads = json.dumps(loadings[edge]) if edge in loadings else None
        entries = {"weight": float(graph.weight[edge]), "head_loadings": heads}
        describe(Xml.SubElement(body, "edge", ends), "edge", entries)
    root.append(body)
    Xml.indent(root)
    return Xml.tostring(root, encoding="utf-8", xml_declaration=True)


def write_graphml(graph: Graph, file: str | Path) -> Path:
    """Write the document to a file, whole or not at all."""
    with written_aside(Path(file)) as aside:
        aside.write_bytes(to_graphml(graph))
    return Path(file)


def _writable(text: str) -> str:
    return _UNWRITABLE.sub("\ufffd", text)
