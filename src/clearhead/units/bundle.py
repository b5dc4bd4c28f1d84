"""A graph on disk: a folder with `graph.json` (names, provenance, tables) and `graph.safetensors` (arrays), no pickle.

    graph.safetensors   source, target            int64 [edges]
                        weight                    float64 [edges]
                        activation                float64 [units], NaN where a unit has none
                        values.NAME               float64 [units], NaN where a unit has none
                        loadings.edge .layer .head   int64 [x]      loadings.weight   float64 [x]
    graph.json          format, provenance, units (names), attention, supernodes, scores, tokens, labels,
                        values (names), loadings (what they count, or null)

What is written is read back bit for bit. Read and write vectors of units are not part of a graph on disk. A single
JSON file of `Graph.to_dict` is read as well.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.runs import read_json, write_json, written_aside
from clearhead.units.annotations import check_entries
from clearhead.units.graph import Graph
from clearhead.units.portable import FORMAT

JSON, ARRAYS = "graph.json", "graph.safetensors"
NAMES = ("format", "provenance", "units", "attention", "supernodes", "scores", "tokens", "labels", "values", "loadings")
LOADINGS = ("edge", "layer", "head", "weight")


def save_graph(graph: Graph, folder: str | Path) -> Path:
    """Write a graph into `folder` (created if needed); raises `ClearheadError` when the disk is full."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, NDArray[Any]] = {
        "source": graph.source,
        "target": graph.target,
        "weight": graph.weight,
        "activation": np.array([np.nan if u.activation is None else u.activation for u in graph.units]),
        **{f"values.{name}": array for name, array in graph.values.items()},
    }
    if graph.loadings is not None:
        arrays |= {f"loadings.{name}": array for name, array in graph.loadings.arrays().items()}
    with written_aside(folder / ARRAYS) as aside:
        aside.write_bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
    names = {
        "format": FORMAT,
        "provenance": asdict(graph.provenance),
        "units": [unit.id for unit in graph.units],
        "attention": [table.to_dict() for table in graph.attention],
        "supernodes": [asdict(group) for group in graph.supernodes],
        "scores": graph.scores,
        "tokens": graph.tokens,
        "labels": graph.labels,
        "values": list(graph.values),
        "loadings": None if graph.loadings is None else graph.loadings.kind,
    }
    write_json(folder / JSON, names)
    return folder


def load_graph(path: str | Path) -> Graph:
    """Read the graph of a folder written by `save_graph`, or of one JSON file of `Graph.to_dict`.

    Raises `ClearheadError` where there is none and `CorruptFileError` for a file that is truncated, lacks an entry, or
    has one that is not known, and for arrays of another type or length.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / JSON).exists():
            raise ClearheadError(f"{path} holds no {JSON}: it is no folder of a graph; `clearhead trace` writes one")
        entries = _entries(path)
    else:
        entries = read_json(path)
    try:
        return Graph.from_dict(entries)
    except ClearheadError as error:
        raise CorruptFileError(f"{path} is not a graph: {error}") from error


def _entries(folder: Path) -> dict[str, Any]:
    names = read_json(folder / JSON)
    check_entries(str(folder / JSON), names, NAMES, NAMES)
    if not isinstance(names["values"], list) or not all(isinstance(name, str) for name in names["values"]):
        raise CorruptFileError(f"{folder / JSON}: 'values' is a list of names; got {names['values']!r}")
    arrays = _load(folder / ARRAYS)
    held = {"source": np.int64, "target": np.int64, "weight": np.float64, "activation": np.float64}
    held |= {f"values.{name}": np.float64 for name in names["values"]}
    if names["loadings"] is not None:
        held |= {f"loadings.{name}": np.float64 if name == "weight" else np.int64 for name in LOADINGS}
    check_entries(str(folder / ARRAYS), arrays, list(held), list(held))
    for name, dtype in held.items():
        if arrays[name].dtype != dtype or arrays[name].ndim != 1:
            raise CorruptFileError(
                f"{folder / ARRAYS}: {name} must be a list of {np.dtype(dtype)}; got {arrays[name].dtype} of shape "
                f"{arrays[name].shape}"
            )
    return {
        **{name: names[name] for name in NAMES if name not in ("values", "loadings")},
        "activation": [None if np.isnan(value) else value for value in arrays["activation"].tolist()],
        **{name: arrays[name] for name in ("source", "target", "weight")},
        "values": {name: arrays[f"values.{name}"] for name in names["values"]},
        "loadings": None
        if names["loadings"] is None
        else {name: arrays[f"loadings.{name}"] for name in LOADINGS} | {"kind": names["loadings"]},
    }


def _load(file: Path) -> dict[str, NDArray[Any]]:
    if not file.exists():
        raise CorruptFileError(f"{file} is missing; restore it or trace again")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise CorruptFileError(f"{file} is truncated or not a safetensors file ({error}); restore it") from error
