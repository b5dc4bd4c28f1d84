"""Share of a unit's activity that shows a behaviour, over the rows where it could.

    score = Σ |activation| gain / Σ |activation|            over the rows that are cases, at least 0

gain is 1 where the row shows the behaviour, 0 where it does not, and slightly negative where chance alone would have
shown it now and then (`correct_for_chance`). This is for behaviours of what units write; where they read is weighed
key by key in tally.py.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.analysis.behaviours.behaviour import Case, Scores
from clearhead.analysis.behaviours.reading import Reading

MOST_KEYS = 5
"""Keys listed with the case that shows a behaviour best."""
RAISED = 2.0
"""Standard deviations over the vocabulary by which an effect must stand above the mean."""


class ShownActivity:
    """Sums over the readings of one population."""

    def __init__(self, n_units: int):
        self.shown = np.zeros(n_units)
        self.active = np.zeros(n_units)
        self.cases = np.zeros(n_units, dtype=np.int64)
        self.best = BestCase(n_units)

    def add(self, batch: int, reading: Reading, rows: Int[Tensor, " m"], gain: Float[Tensor, " m"]) -> None:
        """Counts these rows of the reading as cases."""
        n = len(self.cases)
        unit = reading.unit[rows].numpy()
        size = reading.activation[rows].abs().double().numpy()
        shown = size * gain.double().numpy()
        self.shown += np.bincount(unit, shown, minlength=n)
        self.active += np.bincount(unit, size, minlength=n)
        self.cases += np.bincount(unit, minlength=n)
        self.best.offer(batch, reading, rows, shown)

    def scores(self) -> Scores:
        """What the sums come to; 0 for a unit without cases."""
        share = np.divide(self.shown, self.active, out=np.zeros_like(self.shown), where=self.active > 0)
        return Scores(share.clip(0, 1), self.cases, self.best.cases)


class BestCase:
    """Per unit, the row that shows a behaviour most."""

    def __init__(self, n_units: int):
        self.cases: list[Case | None] = [None] * n_units
        self._largest = np.zeros(n_units)

    def offer(self, batch: int, reading: Reading, rows: Int[Tensor, " m"], shown: np.ndarray) -> None:
        """Takes rows into account, with how much each shows; 0 and less is nothing."""
        unit = reading.unit[rows].numpy()
        order = np.lexsort((-shown, unit))
        for place in order[np.unique(unit[order], return_index=True)[1]]:
            if shown[place] > self._largest[unit[place]]:
                self._largest[unit[place]] = shown[place]
                self.cases[unit[place]] = _case(batch, reading, int(rows[place]))


def _case(batch: int, reading: Reading, row: int) -> Case:
    parts = signed_parts(reading, torch.tensor([row]))[0]
    order = parts.argsort(descending=True, stable=True)[:MOST_KEYS]
    keys = tuple(int(key) for key in order if parts[key] > 0)
    return Case(batch, int(reading.block[row]), int(reading.query[row]), keys)


def signed_parts(reading: Reading, rows: Int[Tensor, " m"]) -> Float[Tensor, "m t"]:
    """Contributions by source position, positive where they push the activation the way it went."""
    return reading.parts[rows] * reading.activation[rows].sign()[:, None]


def main_source(reading: Reading, rows: Int[Tensor, " m"]) -> Int[Tensor, " m"]:
    """The position that contributes most to each row."""
    return signed_parts(reading, rows).argmax(-1)


def rows_at(reading: Reading, queries: Bool[Tensor, "b q"]) -> Int[Tensor, " m"]:
    """The rows at these queries."""
    return queries[reading.block, reading.query].nonzero()[:, 0]


def correct_for_chance(won: Bool[Tensor, " m"], chance: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """1 for what was won, and what makes the mean 0 where it was won by chance: (won − p) / (1 − p)."""
    return (won.to(chance.dtype) - chance) / (1 - chance)


def stands_out(
    effects: Float[Tensor, "m k"], target: Bool[Tensor, "m k"], rivals: Bool[Tensor, "m k"]
) -> Bool[Tensor, " m"]:
    """Whether the target's effect exceeds every rival's and is at least `RAISED`."""
    reached = effects.masked_fill(~target, -torch.inf).amax(-1)
    return (reached >= RAISED) & (reached > effects.masked_fill(~rivals, -torch.inf).amax(-1))


def visible_keys(keys: Bool[Tensor, "b t"]) -> Bool[Tensor, "b q k"]:
    """These keys as each query from them on sees them."""
    return keys[:, None, :] & torch.ones(keys.shape[1], keys.shape[1], dtype=torch.bool).tril()
