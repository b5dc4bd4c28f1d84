"""Tracing: from logits, or any target, back through features and Lorsa heads to tokens, errors and constants.

    start       the fewest logits with a probability of 0.95 together, at most 10, or targets of the user's own
    repeat      explain the features and Lorsa heads of most influence (influence.py) that are not explained yet, a
                batch at a time: one pull of their readers through the frozen model, one product with all sources
    until       `units` are explained, or none that is left has influence

The order changes as edges come in: influence is spread again after every batch. Only the largest edges of a target are
stored (edge_rows.py). Memory: the stored edges, the writes of all sources, and a batch's gradients, batch · t · d
numbers. Not here: which units and edges are shown (prune.py), which heads carry an edge (loadings.py).
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from clearhead.circuits.tracing.edge_rows import KEPT, EdgeRows
from clearhead.circuits.tracing.influence import ERROR, READABLE, Scores, score, spread
from clearhead.circuits.tracing.readers import Reads, read_units
from clearhead.circuits.tracing.sources import Opened
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.runs import progress
from clearhead.units import Unit

UNITS = 1000
"""Features and Lorsa heads that are explained."""
LOGITS, PROBABILITY = 10, 0.95
BATCH = 128
"""Most targets of one pull; more would be chosen from an old order."""
GRADIENTS = 1 << 24
"""Numbers of the gradients of one batch."""


class Start(NamedTuple):
    """What a graph explains: targets, and how much each counts."""

    reads: Reads
    share: NDArray[np.float64]
    """Probability of each logit; 1 for a target of the user's own."""
    words: str = ""
    """What a target of the user's own is."""


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """Edges into everything that was explained, before pruning."""

    opened: Opened
    start: Start
    rows: EdgeRows

    @property
    def weights(self) -> NDArray[np.float64]:
        """How much each node counts as a start: 0 for sources."""
        return np.concatenate([np.zeros(self.rows.n_sources), self.start.share])

    def influence(self) -> NDArray[np.float64]:
        """Influence of every node on the start."""
        return spread(self.rows.entries, self.rows.shares(), self.weights)

    def scores(self) -> Scores:
        """Of everything that was found, whether stored or not."""
        return score(self.rows, self.rows.entries, self.rows.shares(), self.weights, self.rows.class_shares())

    def error_shares(self) -> NDArray[np.float64]:
        """Per node, the share of errors in what comes into it; NaN where nothing was explained."""
        shares = np.full(len(self.rows.units), np.nan)
        shares[self.rows.target] = self.rows.class_shares()[:, ERROR]
        return shares


def likely_logits(opened: Opened) -> Start:
    """The fewest tokens that the model puts `PROBABILITY` on together, at most `LOGITS`."""
    last = len(opened) - 1
    probability = torch.softmax(opened.stream.run["logits"][0, -1].double(), -1)
    if not bool(probability.isfinite().all()):
        raise NonFiniteError(f"the logits of {opened.parts.model.name} hold NaN or infinity")
    values, tokens = probability.topk(min(LOGITS, len(probability)))
    needed = int((values.cumsum(0) - values < PROBABILITY).sum())
    units = [Unit("logit", index=token, position=last) for token in tokens[:needed].tolist()]
    return Start(read_units(opened, units), values[:needed].cpu().numpy())


def trace(opened: Opened, start: Start | Reads, *, units: int = UNITS, kept: int = KEPT, quiet: bool = False) -> Traced:
    """Explains a start, then the features and Lorsa heads of most influence on it, at most `units` of them.

    Raises `ClearheadError` for numbers below 1 and where nothing writes what the start reads, `NonFiniteError` for NaN.
    """
    if units < 1 or kept < 1:
        raise ClearheadError(f"units and kept edges count from 1; got {units} and {kept}")
    if isinstance(start, Reads):
        start = Start(start, np.ones(len(start)))
    sources = opened.sources
    reads = [dataclasses.replace(unit, activation=value) for unit, value in _valued(start.reads)]
    rows = EdgeRows((*sources.units, *reads), len(sources), kept)
    _explain(opened, rows, start.reads, list(range(len(sources), len(rows.units))))
    traced = Traced(opened, start, rows)
    if not min(rows.total) > 0:
        raise ClearheadError(f"nothing in the prompt writes what {reads[int(np.argmin(rows.total))]} reads")
    batch = max(1, min(BATCH, GRADIENTS // opened.frozen.state(0).numel()))
    left = rows.of_class == READABLE
    with progress("trace", units, "units", quiet=quiet) as advance:
        while (explained := len(rows) - len(reads)) < units:
            influence = np.where(left, traced.influence()[: len(sources)], 0.0)
            order = np.argsort(-influence, kind="stable")[: min(batch, units - explained)]
            chosen = order[influence[order] > 0].tolist()
            if not chosen:
                break
            _explain(opened, rows, read_units(opened, [sources.units[place] for place in chosen]), chosen)
            left[chosen] = False
            advance(len(chosen))
    return traced


def _explain(opened: Opened, rows: EdgeRows, reads: Reads, nodes: list[int]) -> None:
    rows.add(nodes, reads.edges(opened), reads.constant, reads.value)


def _valued(reads: Reads) -> list[tuple[Unit, float]]:
    return list(zip(reads.targets, reads.value.tolist(), strict=True))
