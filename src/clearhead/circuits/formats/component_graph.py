"""Circuits of heads and MLPs between graphs of units and the JSON that EAP-IG and MIB exchange.

    cfg     {n_layers, n_heads, parallel_attn_mlp, d_model}
    nodes   {"input", "a0.h1", "m3", "logits": {in_graph}}
    edges   {"m2->a5.h1<q>": {score, in_graph}}                 a head reads through its q, its k and its v

Units are `input`, `head.0.1`, `mlp.3`; what a head reads are `head_q.5.1`, `head_k.5.1`, `head_v.5.1`, and the logits
are `target.0`. These circuits know no positions: edges of the same components at several positions, and those from
several embeddings, are added. Edges that are not in the graph have no entry.

Not here: what the scores measure (circuits of graph edges compute them and say so).
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError, CorruptFileError, NonFiniteError
from clearhead.runs import read_json, written_aside
from clearhead.units import Graph, Provenance, Unit

_HEAD = re.compile(r"a([0-9]{1,6})\.h([0-9]{1,6})(?:<([qkv])>)?")
_MLP = re.compile(r"m([0-9]{1,6})")


@dataclass(frozen=True)
class Sizes:
    """The model that a circuit is of."""

    n_layers: int
    n_heads: int
    d_model: int
    parallel: bool
    """Whether attention and MLP of a layer read the same stream."""


def read_mib(file: str | Path) -> Graph:
    """The circuit of such a file: its edges with `in_graph`, or all where the file chooses none.

    Raises `CorruptFileError` for a file that is none and for a score that is no number.
    """
    entries = read_json(Path(file))
    if not is_mib(entries):
        raise CorruptFileError(f"{file} is no circuit of EAP-IG or MIB: it lacks cfg, nodes or edges")
    edges = {name: _edge(file, name, edge) for name, edge in entries["edges"].items()}
    chosen = [name for name, (_, kept) in edges.items() if kept] or list(edges)
    ends = [tuple(_unit(part) for part in _parts(name)) for name in chosen]
    units = list(dict.fromkeys(unit for pair in ends for unit in pair))
    place = {unit: number for number, unit in enumerate(units)}
    cfg = entries["cfg"]
    about = "".join(f", {name} {cfg[name]}" for name in ("n_layers", "n_heads", "d_model") if name in cfg)
    return Graph(
        units,
        [place[source] for source, _ in ends],
        [place[target] for _, target in ends],
        [edges[name][0] for name in chosen],
        Provenance(f"unnamed{about}", f"scores of {Path(file).name}"),
    )


def is_mib(entries: Any) -> bool:
    """Whether a JSON file has the entries of such a circuit."""
    return isinstance(entries, dict) and all(isinstance(entries.get(name), dict) for name in ("cfg", "nodes", "edges"))


def to_mib(graph: Graph, sizes: Sizes) -> dict[str, Any]:
    """The circuit as a dictionary for JSON; every edge is `in_graph`, and so is every node that one touches.

    Raises `ClearheadError` for a unit that these circuits do not have, several targets, or a place beyond the model.
    """
    targets = {unit.id.partition("@")[0] for unit in graph.units if unit.kind in ("logit", "target")}
    if len(targets) > 1:
        raise ClearheadError(f"a circuit of EAP-IG or MIB has one target; this graph has {', '.join(sorted(targets))}")
    for unit in graph.units:
        if _writer(unit) is None and _reader(unit) is None:
            continue  # the edges that it has are refused below
        if (unit.layer or 0) >= sizes.n_layers or (unit.layer is not None and (unit.index or 0) >= sizes.n_heads):
            raise ClearheadError(f"{unit} is not in a model of {sizes.n_layers} layers with {sizes.n_heads} heads")
    writers, readers = [_writer(unit) for unit in graph.units], [_reader(unit) for unit in graph.units]
    scores: dict[str, float] = {}
    for source, target, weight in zip(graph.source, graph.target, graph.weight.tolist(), strict=True):
        writer, reader = writers[source], readers[target]
        if writer is None or reader is None:
            raise ClearheadError(
                f"the edge {graph.units[source]} → {graph.units[target]} has no place in a circuit of EAP-IG or MIB: "
                f"edges go from embeddings, heads and MLPs to head_q, head_k, head_v, MLPs and one target"
            )
        name = f"{writer}->{reader}"
        scores[name] = scores.get(name, 0.0) + weight
    touched = {part.partition("<")[0] for name in scores for part in name.split("->")}
    layers = range(sizes.n_layers)
    heads = [[f"a{layer}.h{head}" for head in range(sizes.n_heads)] for layer in layers]
    names = ["input", *(name for layer in layers for name in (*heads[layer], f"m{layer}")), "logits"]
    return {
        "cfg": {
            "n_layers": sizes.n_layers,
            "n_heads": sizes.n_heads,
            "parallel_attn_mlp": sizes.parallel,
            "d_model": sizes.d_model,
        },
        "nodes": {name: {"in_graph": name in touched} for name in names},
        "edges": {name: {"score": score, "in_graph": True} for name, score in scores.items()},
    }


def write_mib(graph: Graph, sizes: Sizes, file: str | Path) -> Path:
    """Write the circuit, whole or not at all."""
    text = json.dumps(to_mib(graph, sizes), allow_nan=False)
    with written_aside(Path(file)) as aside:
        aside.write_text(text, encoding="utf-8")
    return Path(file)


def _writer(unit: Unit) -> str | None:
    match unit.kind:
        case "head":
            return f"a{unit.layer}.h{unit.index}"
        case "mlp":
            return f"m{unit.layer}"
        case "input" | "embedding":
            return "input"
    return None


def _reader(unit: Unit) -> str | None:
    match unit.kind:
        case "head_q" | "head_k" | "head_v":
            return f"a{unit.layer}.h{unit.index}<{unit.kind[-1]}>"
        case "mlp":
            return f"m{unit.layer}"
        case "logit" | "target":
            return "logits"
    return None


def _parts(name: str) -> tuple[str, str]:
    writer, arrow, reader = name.partition("->")
    if not arrow:
        raise CorruptFileError(f"{name!r} names no edge; an edge looks like m2->a5.h1<q>")
    return writer, reader


def _unit(name: str) -> Unit:
    if name == "input":
        return Unit("input")
    if name == "logits":
        return Unit("target", index=0)
    if match := _MLP.fullmatch(name):
        return Unit("mlp", int(match[1]))
    if match := _HEAD.fullmatch(name):
        return Unit(f"head_{match[3]}" if match[3] else "head", int(match[1]), int(match[2]))
    raise CorruptFileError(f"{name!r} names no component; a component is input, a5.h1, a5.h1<q>, m3 or logits")


def _edge(file: str | Path, name: str, entries: Any) -> tuple[float, bool]:
    score = entries.get("score") if isinstance(entries, dict) else None
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise CorruptFileError(f"{file}: the edge {name} has the score {score!r}, not a number")
    if score != score or abs(score) == float("inf"):
        raise NonFiniteError(f"{file}: the edge {name} has the score {score}")
    return float(score), bool(entries.get("in_graph"))
