"""Which tokens to show for each unit, found in one pass over the data.

    top        the `top` activations of largest magnitude
    quantile   one from each of `quantiles` equal bands of the remaining active tokens, ordered by magnitude
    negative   `negatives` random tokens on which the unit is inactive

Top and a uniform random sample of active tokens are both "the s entries of smallest key per unit": the key is the
negated magnitude for the first and a hash of (seed, unit, token) for the second. So memory is O(units · s), the
result does not depend on how the data are cut into batches or in which order they come, and ties go to the earlier
token. Quantile bands are those of the sample. Contexts and z patterns are attached by `contexts.Contexts`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clearhead.analysis.entries import Entries
from clearhead.errors import ClearheadError
from clearhead.ops.hash_rng import mix

CATEGORIES = ("top", "quantile", "negative")
_SAMPLE_STREAM, _NEGATIVE_STREAM = 1, 2


class Smallest:
    """Per unit, the `size` entries of smallest 32-bit key seen so far, smallest first; ties by token.

    `token` [n, size] int64, -1 where fewer were seen; `value` [n, size] float32.
    """

    def __init__(self, n_units: int, size: int):
        self.key = np.full((n_units, size), 0xFFFFFFFF, dtype=np.uint32)
        self.token = np.full((n_units, size), -1, dtype=np.int64)
        self.value = np.zeros((n_units, size), dtype=np.float32)

    def update(self, entries: Entries, key: NDArray[np.uint32]) -> None:
        """Take the entries with their keys into account."""
        n, size = self.key.shape
        if not size:
            return
        # most entries lose against what is kept already, so the sort below sees few
        hopeful = (key <= self.key[:, -1][entries.unit]) | (self.token[:, -1][entries.unit] < 0)
        entries, key = entries.where(hopeful), key[hopeful]
        touched = np.unique(entries.unit)
        rows, columns = np.nonzero(self.token[touched] >= 0)
        rows = touched[rows]
        unit = np.concatenate([rows, entries.unit])
        token = np.concatenate([self.token[rows, columns], entries.token])
        value = np.concatenate([self.value[rows, columns], entries.value])
        joined = np.concatenate([self.key[rows, columns], key])
        order = np.lexsort((token, (unit.astype(np.uint64) << np.uint64(32)) | joined))
        unit = unit[order]
        rank = np.arange(len(unit)) - np.searchsorted(unit, unit)
        order, unit, rank = (array[rank < size] for array in (order, unit, rank))
        for kept, new in ((self.key, joined), (self.token, token), (self.value, value)):
            kept[unit, rank] = new[order]


class Negatives:
    """Per unit, random tokens on which it is inactive.

    Candidates are drawn in advance, uniformly from all positions ≥ first, four times as many as wanted; those on
    which the unit turns out active are struck out. A unit active on most tokens may so end with fewer than `size`.
    """

    def __init__(self, n_units: int, size: int, n_blocks: int, context: int, first: int, seed: int):
        self.size = size
        unit, draw = np.divmod(np.arange(n_units * 4 * size, dtype=np.int64), max(4 * size, 1))
        place = (mix(seed, _NEGATIVE_STREAM, unit, draw) % np.uint64(n_blocks * (context - first))).astype(np.int64)
        token = place // (context - first) * context + place % (context - first) + first
        order = np.lexsort((draw, unit, token))
        self.unit, self.token, self.draw = unit[order], token[order], draw[order]
        self.n_units = n_units
        repeated = np.zeros(len(order), dtype=bool)
        repeated[1:] = (self.unit[1:] == self.unit[:-1]) & (self.token[1:] == self.token[:-1])
        self.struck = repeated

    def update(self, entries: Entries) -> None:
        """Strike out candidates at which the unit is active."""
        if not len(entries.token) or not len(self.token):
            return
        low, high = np.searchsorted(self.token, [entries.token.min(), entries.token.max() + 1])
        candidates = self.token[low:high] * self.n_units + self.unit[low:high]
        if not len(candidates):
            return
        # candidates are few and sorted; of equal ones all but the first are struck out already
        active = entries.token * self.n_units + entries.unit
        place = np.minimum(np.searchsorted(candidates, active), len(candidates) - 1)
        self.struck[low + place[candidates[place] == active]] = True

    def remaining(self) -> Entries:
        """The first `size` candidates of each unit that are left, in the order they were drawn."""
        left = np.flatnonzero(~self.struck)
        left = left[np.lexsort((self.draw[left], self.unit[left]))]
        rank = np.arange(len(left)) - np.searchsorted(self.unit[left], self.unit[left])
        left = left[rank < self.size]
        return Entries(self.unit[left], self.token[left], np.zeros(len(left), dtype=np.float32))


class Chosen(NamedTuple):
    """The examples of all units, by unit, category and rank; arrays [examples]."""

    unit: NDArray[np.int64]
    token: NDArray[np.int64]
    value: NDArray[np.float32]
    category: NDArray[np.int64]
    """Place in `CATEGORIES`."""
    rank: NDArray[np.int64]


class ExampleCollector:
    """Streaming choice of examples for `n_units` units over `n_blocks` blocks of `context` tokens.

    `first`: positions before it are never chosen (the entries given to `update` must leave them out too).
    Raises `ClearheadError` when top is below 1, another number negative, or no position left.
    """

    def __init__(
        self,
        n_units: int,
        n_blocks: int,
        context: int,
        *,
        top: int = 16,
        quantiles: int = 8,
        negatives: int = 4,
        first: int = 1,
        seed: int = 0,
    ):
        for name, number, least in (("top", top, 1), ("quantiles", quantiles, 0), ("negatives", negatives, 0)):
            if number < least:
                raise ClearheadError(f"{name} must be {least} or more; got {number}")
        if first >= context:
            raise ClearheadError(f"no position is left: blocks hold {context} tokens and first is {first}")
        self.seed, self.quantiles = seed, quantiles
        self.top = Smallest(n_units, top)
        self.sample = Smallest(n_units, 4 * quantiles)
        self.negatives = Negatives(n_units, negatives, n_blocks, context, first, seed)

    def update(self, entries: Entries) -> None:
        """Take one batch into account; each block must come exactly once."""
        # the bits of a non-negative float32 sort like the number
        magnitude = np.abs(entries.value).view(np.uint32)
        self.top.update(entries, np.uint32(0xFFFFFFFE) - magnitude)
        hashed = mix(self.seed, _SAMPLE_STREAM, entries.unit, entries.token) >> np.uint64(32)
        self.sample.update(entries, hashed.astype(np.uint32))
        self.negatives.update(entries)

    def choose(self) -> Chosen:
        """The examples of what was seen so far."""
        top = _listed(self.top.token, self.top.value)
        parts = [top, self._quantiles(), self.negatives.remaining()]
        unit = np.concatenate([part.unit for part in parts])
        category = np.repeat(np.arange(len(parts)), [len(part.unit) for part in parts])
        order = np.lexsort((category, unit))  # stable, so ranks within a category keep their order
        unit, category = unit[order], category[order]
        run = unit * len(parts) + category
        return Chosen(
            unit,
            np.concatenate([part.token for part in parts])[order],
            np.concatenate([part.value for part in parts])[order],
            category,
            np.arange(len(run)) - np.searchsorted(run, run),
        )

    def _quantiles(self) -> Entries:
        """One sampled token per band: the one of smallest hash, a random one of its band."""
        token, value = self.sample.token, self.sample.value
        n, size = token.shape
        if not size:
            return _listed(token, value)
        used = np.zeros((n, size), dtype=bool)
        for column in range(self.top.token.shape[1]):
            used |= token == self.top.token[:, column, None]
        free = (token >= 0) & ~used
        order = np.lexsort((token, np.where(free, -np.abs(value), np.inf)), axis=-1)
        rows = np.arange(n)[:, None]
        count = free.sum(1, keepdims=True)
        # bands in order of magnitude, as even as the count allows; entries that are not free form a last band
        band = np.minimum(np.arange(size) * self.quantiles // np.maximum(count, 1), self.quantiles)
        band[np.arange(size) >= count] = self.quantiles  # the mask [n, size]: places beyond the free entries
        band = np.take_along_axis(band, np.argsort(order, axis=1), axis=1)
        picked = np.full((n, self.quantiles + 1), -1, dtype=np.int64)
        for column in reversed(range(size)):  # columns are in order of hash; the last write, the smallest, stays
            picked[np.arange(n), band[:, column]] = column
        picked = picked[:, : self.quantiles]
        return _listed(np.where(picked >= 0, token[rows, picked], -1), value[rows, picked])


def _listed(token: NDArray[np.int64], value: NDArray[np.float32]) -> Entries:
    unit, column = np.nonzero(token >= 0)
    return Entries(unit, token[unit, column], value[unit, column])
