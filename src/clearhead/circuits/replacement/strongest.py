"""The edges that matter most for the logits, and the graph of them.

Influence starts as each target's share of Σ|weight| into the logits and is handed down: every unit's in proportion to
the |weight| of what enters it. An edge's importance is what it hands down, so what leads nowhere is left out however
large it is, and edges into units of different scales are compared.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from clearhead.circuits.replacement.incoming import Incoming
from clearhead.units import Graph, Provenance, Unit


@dataclass(frozen=True)
class Edge:
    """One edge, and what it hands down."""

    importance: float
    source: Unit
    target: Unit
    weight: float


def strongest(blocks: Iterable[Incoming], edges: int) -> tuple[list[Edge], dict[Unit, float]]:
    """The `edges` most important edges in that order, and the influence of every unit; blocks from the logits down."""
    influence: dict[Unit, float] = {}
    kept: list[Edge] = []
    for block in blocks:
        size = block.weight.abs()
        entering = size.sum(0)
        if influence:
            given = torch.tensor([influence.get(unit, 0.0) for unit in block.targets]).to(size)
        else:
            given = entering / entering.sum().clamp_min(torch.finfo(size.dtype).tiny)
            influence |= dict(zip(block.targets, given.tolist(), strict=True))
        handed = size * (given / torch.where(entering > 0, entering, 1))
        for unit, part in zip(block.sources, handed.sum(1).tolist(), strict=True):
            influence[unit] = influence.get(unit, 0.0) + part
        values, at = handed.flatten().topk(min(edges, handed.numel()))
        for value, where in zip(values.tolist(), at.tolist(), strict=True):
            row, column = divmod(where, len(block.targets))
            if value > 0:
                kept.append(Edge(value, block.sources[row], block.targets[column], float(block.weight[row, column])))
    kept.sort(key=lambda edge: -edge.importance)
    return kept[:edges], influence


def graph_of(
    edges: list[Edge],
    influence: Mapping[Unit, float],
    provenance: Provenance,
    *,
    labels: Mapping[Unit, str],
    values: Mapping[str, Mapping[Unit, float]],
    scores: Mapping[str, float],
) -> Graph:
    """The graph of these edges, in their order, its units from bottom to top.

    `values` are numbers of some units, by name, `scores` of the whole. Of influence the graph holds, as every graph,
    the cumulative share.
    """
    joined = dict.fromkeys(unit for edge in edges for unit in (edge.source, edge.target))
    units = sorted(joined, key=lambda unit: (_height(unit), unit.index or 0, unit.kind))
    place = {unit: number for number, unit in enumerate(units)}
    own = np.array([influence[unit] for unit in units])
    down = np.argsort(-own, kind="stable")
    cumulative = np.empty(len(units))
    cumulative[down] = own[down].cumsum() / max(own.sum(), np.finfo(float).tiny)
    told = {name: [numbers.get(unit, np.nan) for unit in units] for name, numbers in values.items()}
    return Graph(
        units,
        [place[edge.source] for edge in edges],
        [place[edge.target] for edge in edges],
        [edge.weight for edge in edges],
        provenance,
        values={"influence": cumulative, **told},
        labels={unit.id: labels[unit] for unit in units if unit in labels},
        scores=scores,
    )


def _height(unit: Unit) -> int:
    """From bottom to top; queries and keys stand below the heads that they serve."""
    if unit.layer is None:
        return 10**9 if unit.kind in ("logit", "target") else -1
    return 3 * unit.layer + {"head_k": 0, "head_q": 0, "lorsa": 1, "head": 1, "feature": 2, "features": 2}[unit.kind]
