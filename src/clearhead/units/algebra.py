"""Adding graphs: the weighted sum of several graphs over the union of their units and edges.

    weight(u → v) = Σ_g factor_g · weight_g(u → v),    0 where a graph has no such edge

`merge` has factors of 1, or 1/G for the mean of G graphs, `diff` of 1 and −1. Units are the same when their names are;
with `from_end`, when their names are after positions were counted from the end of each prompt, so that prompts of
different length meet at their last token. Loadings and attention tables add like edges. What cannot be added (named
values of units, activations, scores) is averaged over the graphs that have it in a merge, and subtracted in a
difference.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import ClearheadError
from clearhead.units.annotations import AttentionTable, Loadings, Supernode
from clearhead.units.provenance import Provenance
from clearhead.units.unit import Unit

if TYPE_CHECKING:
    from clearhead.units.graph import Graph

DIFFERS = "⋯"
"""Stands for a token that is not the same in all merged prompts."""


def combine(graphs: Sequence["Graph"], factors: Sequence[float], word: str, from_end: bool) -> dict[str, Any]:
    """The arguments of the graph Σ factor · graph; factors are all equal (a merge) or 1 and −1 (a difference).

    Raises `ClearheadError` when graphs are to meet at their ends and one does not say how long its prompt is.
    """
    shifts = end_shifts(graphs) if from_end else [0] * len(graphs)
    names = [[shifted(unit, by) for unit in graph.units] for graph, by in zip(graphs, shifts, strict=True)]
    units = list(dict.fromkeys(unit for some in names for unit in some))
    place = {unit: p for p, unit in enumerate(units)}
    moved = [np.array([place[unit] for unit in some], dtype=np.int64) for some in names]
    keys = [to[graph.source] * len(units) + to[graph.target] for graph, to in zip(graphs, moved, strict=True)]
    edges, where = np.unique(np.concatenate(keys), return_inverse=True)
    weight = np.concatenate([factor * graph.weight for factor, graph in zip(factors, graphs, strict=True)])
    subtract = min(factors) < 0
    activations = [np.array([np.nan if u.activation is None else u.activation for u in g.units]) for g in graphs]
    activation = _by_unit(activations, moved, len(units), subtract)
    return {
        "units": [
            replace(u, activation=None if np.isnan(a) else float(a)) for u, a in zip(units, activation, strict=True)
        ],
        "source": edges // max(len(units), 1),
        "target": edges % max(len(units), 1),
        "weight": np.bincount(where, weight, minlength=len(edges)),
        "provenance": _provenance(graphs, word),
        "values": {
            name: _by_unit(
                [graph.values.get(name, np.full(len(graph.units), np.nan)) for graph in graphs],
                moved,
                len(units),
                subtract,
            )
            for name in dict.fromkeys(name for graph in graphs for name in graph.values)
        },
        "loadings": _loadings(graphs, factors, np.split(where, np.cumsum([len(graph) for graph in graphs])[:-1])),
        "attention": _tables(graphs, factors, shifts),
        "supernodes": _supernodes(graphs, shifts),
        "scores": {
            name: _one([graph.scores[name] for graph in graphs], subtract)
            for name in graphs[0].scores
            if all(name in graph.scores for graph in graphs)
        },
        "tokens": _tokens(graphs, shifts),
        "labels": {
            shifted(Unit.parse(name), by).id: label
            for graph, by in reversed(list(zip(graphs, shifts, strict=True)))
            for name, label in graph.labels.items()
        },
    }


def shifted(unit: Unit, by: int) -> Unit:
    """The unit `by` positions further to the right, the key position of an attention edge included."""
    if not by or unit.position is None:
        return unit
    part = unit.part + by if unit.kind == "edge" and unit.part is not None else unit.part
    return replace(unit, position=unit.position + by, part=part)


def carriers(weight: NDArray[np.float64], share: float) -> NDArray[np.int64]:
    """Places (ascending) of the fewest entries that carry `share` of Σ|weight|, with 1 all that are not 0.

    Of equal ones the first are taken.
    """
    size = np.abs(weight)
    order = np.argsort(-size, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(size[order])[:-1]]) if len(order) else size
    # an entry counts while those heavier than it fall short of the share; zeros carry nothing
    short = (before < share * size.sum() * (1 - 1e-12)) | (share == 1)
    return np.sort(order[short & (size[order] > 0)])


def end_shifts(graphs: Sequence["Graph"]) -> list[int]:
    """How far each graph's positions move to the right for all prompts to end at one position."""
    lengths = [len(graph.tokens) or len(graph.provenance.token_ids) for graph in graphs]
    if not all(lengths):
        raise ClearheadError(
            f"graph {lengths.index(0)} has neither tokens nor token ids, so positions cannot be counted from its end; "
            f"align by name, or build it with tokens="
        )
    return [max(lengths) - length for length in lengths]


def _by_unit(
    values: Sequence[NDArray[np.float64]], moved: Sequence[NDArray[np.int64]], n: int, subtract: bool
) -> NDArray[np.float64]:
    """Named numbers of the united units: mean over the graphs that have one, or difference where both do."""
    table = np.full((len(values), n), np.nan)
    for row, some, to in zip(table, values, moved, strict=True):
        row[to] = some
    if subtract:
        return table[0] - table[1]
    known = np.isfinite(table)
    total = np.where(known, table, 0).sum(0)
    return np.where(known.any(0), total / np.maximum(known.sum(0), 1), np.nan)


def _one(values: Sequence[float], subtract: bool) -> float:
    return values[0] - values[1] if subtract else sum(values) / len(values)


def _loadings(
    graphs: Sequence["Graph"], factors: Sequence[float], edges: Sequence[NDArray[np.int64]]
) -> Loadings | None:
    """Added where every graph has loadings of one kind; otherwise none, for they would not add up to the edges."""
    found = [graph.loadings for graph in graphs if graph.loadings is not None]
    if len(found) < len(graphs) or len({loadings.kind for loadings in found}) > 1:
        return None
    return Loadings.add(found, edges, factors)


def _tables(graphs: Sequence["Graph"], factors: Sequence[float], shifts: Sequence[int]) -> tuple[AttentionTable, ...]:
    """Added where they explain the same unit against the same key."""
    found: dict[tuple[str, int | None], AttentionTable] = {}
    for graph, factor, by in zip(graphs, factors, shifts, strict=True):
        for table in graph.attention:
            table = table.changed(lambda name, by=by: shifted(Unit.parse(name), by).id, factor, by)
            key = (table.unit, table.against)
            found[key] = found[key].plus(table) if key in found else table
    return tuple(found.values())


def _supernodes(graphs: Sequence["Graph"], shifts: Sequence[int]) -> tuple[Supernode, ...]:
    """Those of one name are united."""
    members: dict[str, dict[str, None]] = {}
    for graph, by in zip(graphs, shifts, strict=True):
        for group in graph.supernodes:
            ids = [shifted(Unit.parse(name), by).id for name in group.units]
            members.setdefault(group.name, {}).update(dict.fromkeys(ids))
    return tuple(Supernode(name, tuple(ids)) for name, ids in members.items())


def _tokens(graphs: Sequence["Graph"], shifts: Sequence[int]) -> tuple[str, ...]:
    prompts = [(DIFFERS,) * by + graph.tokens for graph, by in zip(graphs, shifts, strict=True)]
    if not all(graph.tokens for graph in graphs):
        return ()
    width = max(map(len, prompts))
    rows = [prompt + (DIFFERS,) * (width - len(prompt)) for prompt in prompts]
    return tuple(column[0] if len(set(column)) == 1 else DIFFERS for column in zip(*rows, strict=True))


def _provenance(graphs: Sequence["Graph"], word: str) -> Provenance:
    parents = tuple(graph.provenance for graph in graphs)
    protocols, models = {parent.protocol for parent in parents}, {parent.model for parent in parents}
    protocol = parents[0].protocol if len(protocols) == 1 else "mixed protocols"
    return Provenance(
        model=parents[0].model if len(models) == 1 else "several models",
        protocol=f"{word} of {len(graphs)} graphs: {protocol}",
        parents=parents,
    )
