"""A graph as plain values, for JSON and the atlas, and back: names and types are checked before anything is built.

Format 2 has `values`, `loadings`, `attention`, `supernodes`, `scores`, `tokens` and `labels` beside the units and
edges of format 1; both are read. Read and write vectors of units are left out. Where a unit has no value, JSON has
null.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import CorruptFileError
from clearhead.units.annotations import AttentionTable, Loadings, Supernode, check_entries
from clearhead.units.provenance import Provenance
from clearhead.units.unit import Unit

if TYPE_CHECKING:
    from clearhead.units.graph import Graph

FORMAT = 2
EDGES = ("format", "provenance", "units", "activation", "source", "target", "weight")
ANNOTATIONS = ("values", "loadings", "attention", "supernodes", "scores", "tokens", "labels")
LOADINGS = ("edge", "layer", "head", "weight", "kind")


def to_entries(graph: "Graph") -> dict[str, Any]:
    """The graph as plain values."""
    loadings = None
    if graph.loadings is not None:
        loadings = {name: array.tolist() for name, array in graph.loadings.arrays().items()}
        loadings["kind"] = graph.loadings.kind
    return {
        "format": FORMAT,
        "provenance": asdict(graph.provenance),
        "units": [unit.id for unit in graph.units],
        "activation": [None if unit.activation is None else float(unit.activation) for unit in graph.units],
        "source": graph.source.tolist(),
        "target": graph.target.tolist(),
        "weight": graph.weight.tolist(),
        "values": {
            name: [None if np.isnan(value) else value for value in array.tolist()]
            for name, array in graph.values.items()
        },
        "loadings": loadings,
        "attention": [table.to_dict() for table in graph.attention],
        "supernodes": [asdict(group) for group in graph.supernodes],
        "scores": dict(graph.scores),
        "tokens": list(graph.tokens),
        "labels": dict(graph.labels),
    }


def from_entries(entries: Any) -> dict[str, Any]:
    """The arguments of `Graph` from plain values or arrays; raises `CorruptFileError` naming what is wrong."""
    check_entries("this graph", entries, (*EDGES, *ANNOTATIONS), ())
    if entries.get("format") not in (1, FORMAT):
        raise CorruptFileError(
            f"this graph has format {entries.get('format')!r}; this clearhead reads formats 1 to {FORMAT}"
        )
    check_entries("this graph", entries, (*EDGES, *ANNOTATIONS), EDGES)
    names, activation = _texts("units", entries["units"]), _numbers("activation", entries["activation"])
    if len(activation) != len(names):
        raise CorruptFileError(f"this graph has {len(names)} units but {len(activation)} activations")
    values, scores, labels = (entries.get(name, {}) for name in ("values", "scores", "labels"))
    for name, table in (("values", values), ("scores", scores), ("labels", labels)):
        if not isinstance(table, Mapping):
            raise CorruptFileError(f"{name}: expected a table by name, got {type(table).__name__}")
    loadings = entries.get("loadings")
    if loadings is not None:
        check_entries("loadings", loadings, LOADINGS, LOADINGS)
        lists = {name: _numbers(f"{name} of the loadings", loadings[name]) for name in LOADINGS[:-1]}
        loadings = Loadings(**lists, kind=_text("kind of the loadings", loadings["kind"]))
    return {
        "units": [_unit(*pair) for pair in zip(names, activation.tolist(), strict=True)],
        "source": _numbers("source", entries["source"]),
        "target": _numbers("target", entries["target"]),
        "weight": _numbers("weight", entries["weight"]),
        "provenance": Provenance.from_dict(entries["provenance"]),
        "values": {name: _numbers(name, array).astype(np.float64) for name, array in values.items()},
        "loadings": loadings,
        "attention": [AttentionTable.from_dict(table) for table in _list("attention", entries.get("attention", []))],
        "supernodes": [_supernode(group) for group in _list("supernodes", entries.get("supernodes", []))],
        "scores": {name: float(_numbers(f"score {name}", [score])[0]) for name, score in scores.items()},
        "tokens": _texts("tokens", entries.get("tokens", [])),
        "labels": {name: _text(f"label of {name}", label) for name, label in labels.items()},
    }


def _list(name: str, given: Any) -> Sequence[Any]:
    if not isinstance(given, list | tuple):
        raise CorruptFileError(f"{name}: expected a list, got {type(given).__name__}")
    return given


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str):
        raise CorruptFileError(f"{name}: expected a text, got {given!r}")
    return given


def _texts(name: str, given: Any) -> tuple[str, ...]:
    return tuple(_text(name, text) for text in _list(name, given))


def _numbers(name: str, given: Any) -> NDArray[Any]:
    """A list of numbers, of null (read as NaN) too; whole numbers stay whole."""
    if isinstance(given, np.ndarray):
        return given
    for number in _list(name, given):
        if not (number is None or (isinstance(number, int | float) and not isinstance(number, bool))):
            raise CorruptFileError(f"{name}: expected numbers, got {number!r}")
        if isinstance(number, int) and abs(number) >= 2**63:
            raise CorruptFileError(f"{name}: {number} is too large a number")
    return np.array([np.nan if number is None else number for number in given])


def _supernode(entries: Any) -> Supernode:
    check_entries("a supernode", entries, ("name", "units"), ("name", "units"))
    return Supernode(_text("name of a supernode", entries["name"]), _texts("units of a supernode", entries["units"]))


def _unit(name: str, activation: float) -> Unit:
    unit = Unit.parse(name)
    known = None if np.isnan(activation) else activation
    return Unit(unit.kind, unit.layer, unit.index, unit.position, unit.part, activation=known)
