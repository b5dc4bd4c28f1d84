"""Connected circuits of graph edges, and the file in which EAP-IG and MIB exchange them.

A circuit may hold edges that do nothing: those into a head or MLP from which nothing kept leads on, and those out of
one that nothing kept reaches. `drop_disconnected` removes them until none is left. With corrupt ablation the circuit
computes the same as before, because what reads only replaced writers writes what the replacing run wrote; with zero or
mean ablation a component without inputs still writes something, and the circuit changes.

`rank_connected` orders edges so that every first part is connected to the logits: the best edge into the logits first,
then always the best edge into anything that is already in the circuit.

Not here: scores (curves/graph_scores.py), measuring (curves/graph_edges.py).
"""

import heapq
import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from clearhead.circuits.patching.graph_parts import GraphParts
from clearhead.errors import ClearheadError
from clearhead.runs import written_aside


def drop_disconnected(parts: GraphParts, keep: Bool[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """The kept edges that lie on a path of kept edges from the embedding to the logits."""
    _check(parts, keep)
    writer, reader = parts.ends
    feeds = _feeds(parts)
    kept = keep.clone()
    while True:
        reached = _any(reader[kept], len(parts.reader_names))
        used = _any(writer[kept], len(parts.writers))
        alive = (feeds & reached[:, None]).any(0)
        alive[0] = True  # the embedding needs no input
        leads = (feeds & used).any(1)
        leads[-1] = True  # the logits lead nowhere
        left = kept & alive[writer] & leads[reader]
        if torch.equal(left, kept):
            return kept
        kept = left


def rank_connected(parts: GraphParts, scores: Float[Tensor, " n"], *, absolute: bool = False) -> Int64[Tensor, " n"]:
    """All edges, best first among those whose reader is in the circuit that the earlier ones make.

    Ties go to the edge with the smaller index.
    """
    _check(parts, scores)
    key = (scores.abs() if absolute else scores).tolist()
    feeds = _feeds(parts)
    into = [[reader for reader in column.nonzero()[:, 0].tolist()] for column in feeds.T]
    writer, reader = parts.ends
    counts = torch.bincount(reader, minlength=len(parts.reader_names))
    starts = (counts.cumsum(0) - counts).tolist()
    sources = writer.tolist()
    order: list[int] = []
    waiting: list[tuple[float, int]] = []
    opened: set[int] = set()

    def open_reader(index: int) -> None:
        if index not in opened:
            opened.add(index)
            for edge in range(starts[index], starts[index] + int(counts[index])):
                heapq.heappush(waiting, (-key[edge], edge))

    open_reader(len(parts.reader_names) - 1)
    while waiting:
        _, edge = heapq.heappop(waiting)
        order.append(edge)
        for index in into[sources[edge]]:
            open_reader(index)
    return torch.tensor(order)


def eap_graph(parts: GraphParts, scores: Float[Tensor, " n"], keep: Bool[Tensor, " n"] | None = None) -> dict[str, Any]:
    """The graph in the form of EAP-IG's and MIB's JSON: settings, nodes and edges with scores and `in_graph`.

    A score is positive where the edge helps. An edge into the k or v of a kv head is written for each of its query
    heads with the same score, since these files know query heads alone. Raises `ClearheadError` for other sizes.
    """
    keep = torch.ones(parts.n_edges, dtype=torch.bool) if keep is None else keep
    _check(parts, scores, keep)
    model = parts.model
    edges: dict[str, Any] = {}
    nodes = {name: {"in_graph": False} for name in (*parts.writers, "logits")}
    columns = zip(parts.names, scores.tolist(), keep.tolist(), strict=True)
    for name, score, kept in columns:
        writer, _, reader = name.partition("->")
        for one in _query_heads(parts, reader):
            edges[f"{writer}->{one}"] = {"score": score, "in_graph": kept}
            if kept:
                nodes[writer]["in_graph"] = nodes[one.partition("<")[0]]["in_graph"] = True
    settings = {
        "n_layers": model.n_layers,
        "n_heads": model.n_heads,
        "parallel_attn_mlp": parts.parallel,
        "d_model": model.d_model,
    }
    return {"cfg": settings, "nodes": nodes, "edges": edges}


def write_eap(
    path: Path, parts: GraphParts, scores: Float[Tensor, " n"], keep: Bool[Tensor, " n"] | None = None
) -> None:
    """Writes `eap_graph` as JSON, whole or not at all."""
    text = json.dumps(eap_graph(parts, scores, keep))
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def _query_heads(parts: GraphParts, reader: str) -> list[str]:
    """The reader's name, or that of each query head which a kv head serves: a5.kv0<k> → a5.h0<k>, a5.h1<k>."""
    place, _, rest = reader.partition(".kv")
    if not rest:
        return [reader]
    group, _, kind = rest.partition("<")
    geometry = parts.parts.layers[int(place[1:])].geometry
    ratio = geometry.n_heads // geometry.n_kv_heads
    return [f"{place}.h{head}<{kind}" for head in range(int(group) * ratio, (int(group) + 1) * ratio)]


def _feeds(parts: GraphParts) -> Bool[Tensor, "r u"]:
    """Whether what a reader receives goes into what a writer writes: a head has its q and its group's k and v."""
    place = {name: index for index, name in enumerate(parts.writers)}
    feeds = torch.zeros(len(parts.reader_names), len(parts.writers), dtype=torch.bool)
    for index, reader in enumerate(parts.reader_names[:-1]):
        for name in _query_heads(parts, reader):
            feeds[index, place[name.partition("<")[0]]] = True
    return feeds


def _any(indices: Tensor, size: int) -> Bool[Tensor, " size"]:
    return torch.zeros(size, dtype=torch.bool).index_fill_(0, indices, value=True)


def _check(parts: GraphParts, *given: Tensor) -> None:
    for one in given:
        if one.shape != (parts.n_edges,):
            raise ClearheadError(f"expected a number for each of {parts.n_edges} edges, got {list(one.shape)}")
