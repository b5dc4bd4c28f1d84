"""How often and how strongly each unit is active: counts, sums and a histogram, streaming.

The histogram has 40 equal bins over [0, r), r the least power of two above the unit's largest activation (over
[-r, r) where activations are signed). When a larger activation arrives, r doubles and bins merge in pairs: their
edges are nested and scaling by powers of two is exact in floating point, so counts do not depend on the order or on
how the data are cut into batches. The largest activation lies in the upper half of the bins of its side.
"""

import numpy as np
from numpy.typing import NDArray

from clearhead.analysis.entries import Entries

BINS = 40


class Activity:
    """Counts [n], sums [n] and histograms [n, 40] of `n_units` units. `signed`: activations may be negative."""

    def __init__(self, n_units: int, *, signed: bool = False):
        self.signed = signed
        self.count = np.zeros(n_units, dtype=np.int64)
        self.total = np.zeros(n_units, dtype=np.float64)
        self.histogram = np.zeros((n_units, BINS), dtype=np.int64)
        self.exponent = np.full(n_units, np.iinfo(np.int32).min, dtype=np.int64)
        """log2 of r; the least integer for a unit never seen active."""

    def update(self, entries: Entries) -> None:
        """Take one batch into account."""
        n = len(self.count)
        self.count += np.bincount(entries.unit, minlength=n)
        self.total += np.bincount(entries.unit, entries.value, minlength=n)
        # frexp: |x| = m 2^e with m in [0.5, 1), so 2^e is the least power of two above |x|
        needed = self.exponent.copy()
        np.maximum.at(needed, entries.unit, np.frexp(entries.value)[1].astype(np.int64))
        self._widen(needed)
        scaled = np.ldexp(entries.value.astype(np.float64), -self.exponent[entries.unit].astype(np.int32))
        middle, side = self._sides()
        place = middle + np.floor(scaled * side).astype(np.int64)
        self.histogram += np.bincount(entries.unit * BINS + place, minlength=n * BINS).reshape(n, BINS)

    def _sides(self) -> tuple[int, int]:
        """(bin that starts at 0, bins per side)."""
        return (BINS // 2, BINS // 2) if self.signed else (0, BINS)

    def _widen(self, needed: NDArray[np.int64]) -> None:
        shift = np.where(self.histogram.any(axis=1), needed - self.exponent, 0)
        half = self._sides()[0] // 2
        while (wide := np.flatnonzero(shift > 0)).size:
            pairs = self.histogram[wide].reshape(-1, BINS // 2, 2).sum(-1)
            self.histogram[wide] = 0
            self.histogram[wide, half : half + BINS // 2] = pairs
            shift[wide] -= 1
        self.exponent = needed

    @property
    def mean(self) -> NDArray[np.float64]:
        """Mean activation over active tokens, [n]; NaN for a unit that was never active."""
        return np.divide(self.total, self.count, out=np.full(len(self.count), np.nan), where=self.count > 0)

    def edges(self) -> NDArray[np.float64]:
        """The 41 edges of each unit's bins, [n, 41]; a unit never active has bins over [0, 1] (or [-1, 1])."""
        radius = np.ldexp(1.0, np.where(self.count > 0, self.exponent, 0).astype(np.int32))
        middle, side = self._sides()
        return radius[:, None] * (np.arange(BINS + 1) - middle) / side
