"""How much every unit of an attribution graph matters for where it starts, and how much of that is explained.

    Â_ts = |edge s → t| / Σ_s |edge s → t|      influence = p (Â + Â² + Â³ + …)       p the probability of each start

The sum ends by itself: edges go up the layers. Flow is influence + p, at the targets that have been explained. Then

    replacement  = I_tokens / (I_tokens + I_errors)                         what reaches embeddings, against errors
    completeness = Σ_t flow_t (1 − error share of t) / Σ_t flow_t

Errors are what the dictionaries miss and whole MLPs. Influence that ends in features that were not explained, or in
edges that were not stored, counts as error too, and that of constants as neither. Sources: circuit-tracer's scores.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clearhead.circuits.tracing.edge_rows import CLASSES, EdgeRows, Entries

TOKEN, ERROR, BIAS, READABLE = range(len(CLASSES))


@dataclass(frozen=True)
class Scores:
    """Where the influence ends, in shares of all of it, and the two scores."""

    tokens: float
    errors: float
    biases: float
    unexplained: float
    """In features and Lorsa heads that were not explained, and in edges that are not there."""
    completeness: float

    @property
    def replacement(self) -> float:
        """Tokens against tokens, errors and unexplained; 1 where there is nothing but constants."""
        rest = self.tokens + self.errors + self.unexplained
        return self.tokens / rest if rest > 0 else 1.0


def spread(entries: Entries, shares: NDArray[np.float64], start: NDArray[np.float64]) -> NDArray[np.float64]:
    """Influence of every node [n], given the share of every edge and p of every node."""
    influence, step = np.zeros_like(start), start
    while True:
        step = np.bincount(entries.source, shares * step[entries.target], len(start))
        if not step.any():
            return influence
        influence += step


def score(
    rows: EdgeRows,
    entries: Entries,
    shares: NDArray[np.float64],
    start: NDArray[np.float64],
    mass: NDArray[np.float64],
) -> Scores:
    """The scores of a graph with these edges and targets, what comes into each row by class being `mass` [r, 4].

    What is missing of a row counts as error, as it does after pruning.
    """
    influence = spread(entries, shares, start)
    flow = (influence + start)[rows.target]
    ends = flow @ mass
    passed = float(influence[[node for node in rows.target if node < rows.n_sources]].sum())
    missing = np.maximum(1 - mass.sum(1), 0)
    whole = float(start.sum())
    return Scores(
        tokens=float(ends[TOKEN]) / whole,
        errors=float(ends[ERROR]) / whole,
        biases=float(ends[BIAS]) / whole,
        unexplained=(max(float(ends[READABLE]) - passed, 0.0) + float(flow @ missing)) / whole,
        completeness=float(flow @ (1 - mass[:, ERROR] - missing) / flow.sum()),
    )
