"""Pruning: the units and edges of a traced prompt that carry most of the influence on its start.

    units   the fewest that hold 0.8 of all influence; embeddings and starts stay
    edges   of those between them, the fewest that hold 0.98 of Σ Â_ts · flow_t, with influence spread anew
    then    features and Lorsa heads without incoming edges go, and all but embeddings and starts without outgoing
            ones, until nothing changes

Shares Â are those of the whole row, what was not stored included, at every step. What was removed counts as error in
the scores of the pruned graph, so they are at most those of the whole one (influence.py). Weights stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

import numpy as np
from numpy.typing import NDArray

from clearhead.circuits.tracing.edge_rows import CLASSES, Entries
from clearhead.circuits.tracing.influence import READABLE, TOKEN, Scores, score, spread
from clearhead.circuits.tracing.trace import Traced
from clearhead.errors import ClearheadError
from clearhead.units import AttentionTable, Graph, Loadings, Provenance
from clearhead.units.algebra import carriers

UNITS_SHARE = 0.8
EDGES_SHARE = 0.98
PROTOCOL = (
    "attribution graph: weight of an edge is the target's read vector on what the source wrote, with norm scales and "
    "attention patterns (the model's own, or those of the Lorsa) frozen; into features and Lorsa heads it is a share "
    "of their pre-activation, into a logit one of the logit above the mean logit, before any soft-cap"
)
VERSIONED = ("clearhead", "torch", "transformers")


@dataclass(frozen=True, eq=False)
class Pruned:
    """What is left of a traced prompt."""

    traced: Traced
    nodes: NDArray[np.int64]
    """Nodes that are left, in order."""
    entries: Entries
    """Edges that are left, between nodes."""
    carried: NDArray[np.float64]
    """Influence that each of them carries."""
    scores: Scores
    shares: tuple[float, float]
    """Of the influence of units and of edges that was to be kept."""

    def graph(
        self, prompt: str = "", loadings: Loadings | None = None, attention: Sequence[AttentionTable] = ()
    ) -> Graph:
        """As a graph of units; values: influence (cumulative, from the most important), probability, error_share.

        `loadings` number the edges as `entries` does.
        """
        rows, opened = self.traced.rows, self.traced.opened
        influence = _cumulative(self.traced.influence())
        probability = np.full(len(rows.units), np.nan)
        starts = slice(rows.n_sources, None)
        probability[starts] = self.traced.start.share
        influence[starts] = 0.0
        model, (of_units, of_edges) = opened.parts.model, self.shares
        provenance = Provenance(
            model=model.name,
            protocol=f"{PROTOCOL}. Pruned to {of_units} of the influence of units and {of_edges} of that of edges. "
            "Attention scores are those above the mean of all visible keys",
            prompt=prompt,
            token_ids=tuple(opened.stream.tokens),
            versions={name: metadata.version(name) for name in VERSIONED},
        )
        whole, pruned = self.traced.scores(), self.scores
        return Graph(
            [rows.units[node] for node in self.nodes],
            np.searchsorted(self.nodes, self.entries.source),
            np.searchsorted(self.nodes, self.entries.target),
            self.entries.weight,
            provenance,
            values={
                "influence": influence[self.nodes],
                "probability": probability[self.nodes],
                "error_share": self.traced.error_shares()[self.nodes],
            },
            scores={
                "replacement": whole.replacement,
                "completeness": whole.completeness,
                "error_share": whole.errors,
                "replacement_pruned": pruned.replacement,
                "completeness_pruned": pruned.completeness,
            },
            loadings=loadings,
            attention=attention,
            tokens=model.token_strings(opened.stream.tokens) if model.tokenizer is not None else (),
            labels=self._labels(),
        )

    def _labels(self) -> dict[str, str]:
        """Words for what the graph starts from: a logit's token, what a target is."""
        start, model = self.traced.start, self.traced.opened.parts.model
        words = {unit.id: start.words for unit in start.reads.targets if unit.kind == "target" and start.words}
        if model.tokenizer is not None:
            logits = [unit for unit in start.reads.targets if unit.kind == "logit" and unit.index is not None]
            strings = model.token_strings([int(unit.index or 0) for unit in logits])
            words |= {unit.id: word for unit, word in zip(logits, strings, strict=True)}
        return words


def prune(traced: Traced, units: float = UNITS_SHARE, edges: float = EDGES_SHARE) -> Pruned:
    """What holds these shares of the influence; 1 keeps all that has any.

    Raises `ClearheadError` for shares that are not above 0 and at most 1.
    """
    for name, share in (("units", units), ("edges", edges)):
        if not 0 < share <= 1:
            raise ClearheadError(f"the share of {name} to keep lies above 0 and at most at 1; got {share}")
    rows, start = traced.rows, traced.weights
    fixed = start > 0
    fixed[: rows.n_sources] |= rows.of_class == TOKEN
    stays = fixed | _largest(traced.influence(), units)
    entries, shares = _among(rows.entries, rows.shares(), stays)
    flow = spread(entries, shares, start) + start
    kept = _largest(shares * flow[entries.target], edges)
    entries, shares = _chosen(entries, shares, kept)
    needs_incoming = np.zeros(len(fixed), dtype=bool)
    needs_incoming[: rows.n_sources] = rows.of_class == READABLE
    while True:
        incoming = np.bincount(entries.target, minlength=len(fixed)) > 0
        outgoing = np.bincount(entries.source, minlength=len(fixed)) > 0
        alive = stays & (fixed | outgoing) & (~needs_incoming | incoming)
        if (alive == stays).all():
            break
        stays = alive
        entries, shares = _among(entries, shares, stays)
    carried = shares * (spread(entries, shares, start) + start)[entries.target]
    return Pruned(traced, np.flatnonzero(stays), entries, carried, _score(traced, entries, shares), (units, edges))


def _score(traced: Traced, entries: Entries, shares: NDArray[np.float64]) -> Scores:
    """With the classes of the edges that are left; the rest of every row is missing."""
    rows = traced.rows
    mass = np.zeros((len(rows.units), len(CLASSES)))
    np.add.at(mass, (entries.target, rows.of_class[entries.source]), shares)
    return score(rows, entries, shares, traced.weights, mass[rows.target])


def _largest(sizes: NDArray[np.float64], share: float) -> NDArray[np.bool_]:
    kept = np.zeros(len(sizes), dtype=bool)
    kept[carriers(sizes, share)] = True
    return kept


def _cumulative(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of the sum in this one and all larger ones."""
    order = np.argsort(-sizes, kind="stable")
    shares = np.zeros(len(sizes))
    shares[order] = np.cumsum(sizes[order]) / max(float(sizes.sum()), np.finfo(np.float64).tiny)
    return np.minimum(shares, 1.0)


def _among(
    entries: Entries, shares: NDArray[np.float64], nodes: NDArray[np.bool_]
) -> tuple[Entries, NDArray[np.float64]]:
    return _chosen(entries, shares, nodes[entries.source] & nodes[entries.target])


def _chosen(
    entries: Entries, shares: NDArray[np.float64], kept: NDArray[np.bool_]
) -> tuple[Entries, NDArray[np.float64]]:
    return entries.where(kept), shares[kept]
