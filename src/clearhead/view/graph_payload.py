"""The data of a graph's page: units as columns, edges from the heaviest on, loadings and attention tables in parts.

Every unit has a rank in [0, 1], small for important ones: the graph's cumulative influence where it holds one, else the
cumulative share of Σ|weight| of a unit's edges. Nothing is thrown away but loadings and edges beyond a limit that the
page states. No model is needed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.units.annotations import AttentionTable
from clearhead.units.graph import Graph
from clearhead.units.unit import Unit
from clearhead.view.graph_compare import Comparison
from clearhead.view.graph_ranks import edge_sums, shares_of, unit_ranks
from clearhead.view.graph_words import LOADINGS
from clearhead.view.packing import Vocabulary, brief, divide, pack
from clearhead.view.visible import visible

ATTENTION = frozenset({"head", "kvhead", "lorsa", "mode", "edge", "attn", "attn_error"})
"""Kinds whose row of a layer lies below that of its MLP."""
READS = frozenset({"head_q", "head_k", "head_v"})
"""Kinds whose row of a layer lies below that of its attention."""
TARGETS = frozenset({"logit", "target"})
EDGES_PER_PART = 512


@dataclass(frozen=True)
class Payload:
    """What the page holds: plain data that is there at once, and packed parts by kind."""

    index: dict[str, Any]
    parts: dict[str, list[str]]


@dataclass(frozen=True)
class Limits:
    """How much of a graph a page holds; None for all of it."""

    edges: int | None = None
    loadings: int | None = None
    """Per edge, the largest."""


def build_graph_payload(graph: Graph, limits: Limits, compared: Comparison | None = None) -> Payload:
    """The page's data; `compared` where `graph` is the difference of two."""
    vocabulary = Vocabulary()
    order = np.argsort(-np.abs(graph.weight), kind="stable")[: limits.edges]
    loadings = _loadings(graph, order, limits.loadings)
    edges = {
        "source": graph.source[order].tolist(),
        "target": graph.target[order].tolist(),
        "weight": [brief(value) for value in graph.weight[order].tolist()],
    }
    if compared is not None:
        edges |= {
            name: [brief(value) for value in weights[order].tolist()]
            for name, weights in zip(("first", "second"), compared.weights, strict=True)
        }
    sums = edge_sums(graph)
    told = shares_of(graph, "error_share") if compared is None else None
    if told is not None:
        # the graph's own knows edges that were pruned
        sums["errors"] = np.where(np.isnan(told), sums["errors"], told)
    ranks = unit_ranks(graph) if compared is None else compared.ranks
    by_influence = "influence" in graph.values if compared is not None else shares_of(graph, "influence") is not None
    index = {
        "tokens": [vocabulary.place(token) for token in graph.tokens],
        "units": unit_columns(graph, ranks, sums, vocabulary),
        "values": {visible(name): [_known(value) for value in array.tolist()] for name, array in graph.values.items()},
        "sides": None if compared is None else {"names": list(map(visible, compared.names)), "of": compared.side},
        "ranked": "influence" if by_influence else "weight_rank",
        "rows": row_names(graph),
        "edges": {"held": len(order), "all": len(graph), "carried": _share(graph, order)},
        "loadings": None
        if not graph.loadings
        else {
            "kind": visible(graph.loadings.kind),
            "words": next((words for word, words in LOADINGS.items() if graph.loadings.kind.startswith(word)), ""),
            "limit": limits.loadings,
            "heads": _head_totals(graph),
            "size": EDGES_PER_PART,
        },
        "attention": [_attention_line(table, graph, vocabulary) for table in graph.attention],
        "elsewhere": {name: vocabulary.place(words) for name, words in _words_elsewhere(graph).items()},
        "supernodes": [{"name": visible(group.name), "units": list(group.units)} for group in graph.supernodes],
    }
    parts = {
        "edges": [pack(edges)],
        "loadings": [pack(chunk) for chunk in divide(loadings, EDGES_PER_PART)],
        "attention": [pack(_attention_table(table)) for table in graph.attention],
    }
    return Payload({"vocab": vocabulary.entries, **index}, parts)


def unit_columns(
    graph: Graph, ranks: NDArray[np.float64], sums: Mapping[str, NDArray[np.float64]], vocabulary: Vocabulary
) -> dict[str, list[Any]]:
    """A row per unit: name, place, activation, rank, sums of its edges, and the words that go with it."""
    columns: dict[str, list[Any]] = {}
    for place, unit in enumerate(graph.units):
        token = None
        if unit.position is not None and unit.position < len(graph.tokens):
            token = vocabulary.place(graph.tokens[unit.position])
        words = graph.labels.get(unit.id)
        values = {
            "id": unit.id,
            "kind": unit.kind,
            "layer": unit.layer,
            "position": unit.position,
            "row": row_of(unit),
            "token": token,
            "words": None if words is None else vocabulary.place(words),
            "activation": None if unit.activation is None else brief(float(unit.activation)),
            "rank": brief(float(ranks[place])),
            "read": _length(unit.read),
            "write": _length(unit.write),
            **{name: brief(float(array[place])) for name, array in sums.items()},
        }
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    return columns


def row_of(unit: Unit) -> str:
    """Where a unit stands from bottom to top: `embedding`, `L.reads`, `L.attention`, `L.mlp`, `target`."""
    if unit.kind in TARGETS:
        return "target"
    if unit.layer is None:
        return "embedding"
    if unit.kind in READS:
        return f"{unit.layer}.reads"
    return f"{unit.layer}.{'attention' if unit.kind in ATTENTION else 'mlp'}"


def row_names(graph: Graph) -> list[str]:
    """The rows that units stand in, from bottom to top."""

    def height(name: str) -> tuple[int, int]:
        if name in ("embedding", "target"):
            return (-1, 0) if name == "embedding" else (10**9, 0)
        layer, half = name.split(".")
        return int(layer), ("reads", "attention", "mlp").index(half)

    return sorted({row_of(unit) for unit in graph.units}, key=height)


def _share(graph: Graph, order: NDArray[np.int64]) -> float:
    total = float(np.abs(graph.weight).sum())
    return float(np.abs(graph.weight[order]).sum()) / total if total else 1.0


def _known(value: float) -> float | None:
    return None if math.isnan(value) else brief(value)


def _length(vectors: Any) -> float | None:
    return None if vectors is None else brief(float(np.linalg.norm(np.asarray(vectors, dtype=np.float64))))


def _loadings(graph: Graph, order: NDArray[np.int64], limit: int | None) -> list[list[Any]]:
    """Per edge in the page's order: Σ|loading| and Σ loading of all, and [layer, head, loading, …] of the largest."""
    if not graph.loadings:
        return []
    held = graph.loadings
    place = np.full(len(graph), -1, dtype=np.int64)
    place[order] = np.arange(len(order))
    found: list[list[tuple[int, int, float]]] = [[] for _ in order]
    for edge, *entry in zip(
        place[held.edge].tolist(), held.layer.tolist(), held.head.tolist(), held.weight.tolist(), strict=True
    ):
        if edge >= 0:
            found[edge].append((entry[0], entry[1], entry[2]))
    rows = []
    for entries in found:
        entries.sort(key=lambda entry: -abs(entry[2]))
        totals = [brief(sum(abs(entry[2]) for entry in entries)), brief(sum(entry[2] for entry in entries))]
        flat = [value for layer, head, weight in entries[:limit] for value in (layer, head, brief(weight))]
        rows.append([*totals, flat, max(0, len(entries) - len(flat) // 3)])
    return rows


def _head_totals(graph: Graph) -> list[list[Any]]:
    """[layer, head, Σ|loading| over the edges of the whole graph], the largest first."""
    assert graph.loadings is not None
    return [[*head, brief(total)] for head, total in graph.loadings.by_head().items()]


def _words_elsewhere(graph: Graph) -> dict[str, str]:
    """Words for units that attention tables name and that are not in the graph."""
    named = {name for table in graph.attention for name in table.names()}
    return {name: words for name, words in graph.labels.items() if name in named and name not in graph}


def _attention_line(table: AttentionTable, graph: Graph, vocabulary: Vocabulary) -> dict[str, Any]:
    """What the list of attention tables says of one; the rest is in its part."""
    unit = Unit.parse(table.unit)
    key = unit.part if unit.kind == "edge" else None
    tokens = [
        vocabulary.place(graph.tokens[place]) if place is not None and place < len(graph.tokens) else None
        for place in (unit.position, key, table.against)
    ]
    return {
        "unit": table.unit,
        "kind": unit.kind,
        "layer": unit.layer,
        "head": unit.index,
        "query": unit.position,
        "key": key,
        "tokens": tokens,
        "score": brief(table.score),
        "total": brief(table.total),
        "against": table.against,
        "pairs": len(table.pairs),
    }


def _attention_table(table: AttentionTable) -> dict[str, Any]:
    """The table with every unit's name once: `units`, and lists of places in it with contributions."""
    names = table.names()
    place = {name: at for at, name in enumerate(names)}
    return {
        "units": names,
        "pairs": [[place[query], place[key], brief(weight)] for query, key, weight in table.pairs],
        "queries": [[place[name], brief(weight)] for name, weight in table.queries],
        "keys": [[place[name], brief(weight)] for name, weight in table.keys],
        "triples": [[place[query], mode, place[key], brief(weight)] for query, mode, key, weight in table.triples],
    }
