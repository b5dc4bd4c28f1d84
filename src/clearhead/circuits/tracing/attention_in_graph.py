"""What a pruned graph says about attention: which heads carry its edges, and why the most important look where they do.

    loadings   the `LOADED` edges with most influence, each over the heads that are the last on the way from source to
               target; with what passes no head they add up to the edge (loadings.py, "last"). Stored: the fewest heads
               per edge that hold 0.9
    tables     attention scores over pairs of units (qk.py), against the mean of all visible keys, since softmax sees
               differences alone:
               of the attention edges (layer, head, query, key) that carry most, summed over the `EDGES` edges of the
               graph with most influence: Σ carried · |loading| / |edge|
               of the Lorsa heads with most influence, at the key from which they move most

What is carried to a target by a Lorsa is an edge of the graph and has no loading.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from clearhead.circuits.tracing.loadings import split_edge, split_edges
from clearhead.circuits.tracing.prune import Pruned
from clearhead.circuits.tracing.qk import ScoreSplit, ask_edge, ask_lorsa, explain
from clearhead.circuits.tracing.readers import Reads, read_units
from clearhead.spectral.signals import Firing
from clearhead.units import Loadings

LOADED = 1000
EDGES = 24
SHARE = 0.9
TARGETS = 64
"""Targets whose edges are split at once."""


@dataclass(frozen=True, eq=False)
class CarryingEdge:
    """An attention edge and how much of the influence it carries, as a share of what all looked at carry."""

    firing: Firing
    share: float


def load_heads(pruned: Pruned, share: float = SHARE) -> Loadings:
    """The most important edges over the heads that carry them, the fewest per edge that hold `share`."""
    opened, entries = pruned.traced.opened, pruned.entries
    top = np.sort(np.argsort(-pruned.carried, kind="stable")[:LOADED])
    parts: list[Loadings] = []
    for reads, nodes in _targets(pruned, entries.target[top]):
        row = np.full(len(pruned.traced.rows.units), -1)
        row[nodes] = np.arange(len(nodes))
        edges = top[row[entries.target[top]] >= 0]
        device = reads.vector.device
        source, target = (
            torch.as_tensor(places[edges], device=device) for places in (entries.source, row[entries.target])
        )
        weight = torch.as_tensor(entries.weight[edges], device=device).to(reads.vector)
        split = split_edges(opened, reads, source, target, weight, "last")
        parts.append(split.loadings(torch.as_tensor(edges), share))
    if not parts:
        return Loadings([], [], [], [], "last paths")
    edge, layer, head, weight = (
        np.concatenate([part.arrays()[name] for part in parts]) for name in ("edge", "layer", "head", "weight")
    )
    return Loadings(edge, layer, head, weight, parts[0].kind)


def weigh_heads(pruned: Pruned, loadings: Loadings) -> dict[tuple[int, int], float]:
    """By layer and head, how much of the influence on the start it carries, the largest first.

    Σ carried · |loading| / |edge| over the edges, as a share of what all edges of the graph carry; where heads of one
    edge cancel, the shares of all heads exceed what passes heads.
    """
    per_weight = pruned.carried / np.abs(pruned.entries.weight)
    total: dict[tuple[int, int], float] = defaultdict(float)
    sizes = per_weight[loadings.edge] * np.abs(loadings.weight) / pruned.carried.sum()
    for layer, head, size in zip(loadings.layer.tolist(), loadings.head.tolist(), sizes.tolist(), strict=True):
        total[layer, head] += size
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def carrying_edges(pruned: Pruned, count: int) -> list[CarryingEdge]:
    """The attention edges that carry most of the graph's most important edges, the largest first."""
    opened, entries = pruned.traced.opened, pruned.entries
    top = np.argsort(-pruned.carried, kind="stable")[:EDGES]
    total: dict[Firing, float] = defaultdict(float)
    for reads, nodes in _targets(pruned, entries.target[top]):
        for edge in top:
            if entries.target[edge] not in nodes:
                continue
            found = split_edge(opened, reads, int(entries.source[edge]), nodes.index(int(entries.target[edge])), "last")
            scale = float(pruned.carried[edge] / abs(entries.weight[edge]))
            largest = slice(4 * count)  # the order by edge and that of the sum differ little
            columns = [column[largest].tolist() for column in found]
            for layer, head, query, key, weight in zip(*columns, strict=True):
                total[Firing(layer, head, query, key)] += scale * abs(weight)
    whole = float(pruned.carried[top].sum())
    order = sorted(total, key=lambda firing: -total[firing])[:count]
    return [CarryingEdge(firing, total[firing] / whole) for firing in order]


def explain_attention(pruned: Pruned, count: int) -> list[ScoreSplit]:
    """The scores of the `count` attention edges that carry most, and of the `count` most important Lorsa heads.

    An edge from the only visible key has no other key to compare with and is left out.
    """
    opened, rows = pruned.traced.opened, pruned.traced.rows
    edges = [edge.firing for edge in carrying_edges(pruned, count)] if count else []
    asked = [ask_edge(opened, firing, "mean") for firing in edges if firing.query > 0]
    influence = pruned.traced.influence()
    order = pruned.nodes[np.argsort(-influence[pruned.nodes], kind="stable")]
    heads = [rows.units[node] for node in order if rows.units[node].kind == "lorsa"]
    again = [unit for unit in heads if unit.position][:count]
    asked += [ask_lorsa(opened, unit, "mean") for unit in again]
    return explain(opened, asked) if asked else []


def _targets(pruned: Pruned, only: NDArray[np.int64]) -> Iterator[tuple[Reads, list[int]]]:
    """What these targets read, some at a time, and their nodes."""
    rows, opened = pruned.traced.rows, pruned.traced.opened
    wanted = np.unique(only)
    starts = wanted[wanted >= rows.n_sources]
    if len(starts):
        yield pruned.traced.start.reads, list(range(rows.n_sources, len(rows.units)))
    inner = wanted[wanted < rows.n_sources]
    for first in range(0, len(inner), TARGETS):
        nodes = inner[first : first + TARGETS].tolist()
        yield read_units(opened, [rows.units[node] for node in nodes]), nodes
