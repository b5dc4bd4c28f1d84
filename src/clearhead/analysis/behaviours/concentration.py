"""How far what a unit does comes from few tokens, compared with a unit that does it on any.

    top(w)  share of the five tokens with the largest contributions w
    c       ( top(w) − top of a unit without preference ) / ( 1 − the same ),   at least 0

for the tokens read and for the query's tokens; the larger c counts. A unit without preference draws as many cases as
this one has, from all cases of the probe: few cases are concentrated by themselves. Cases of one token in one block
count as one, and unequal contributions as fewer: n = (Σ w)² / Σ w².
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float64, Int64

from clearhead.analysis.behaviours.behaviour import Probe
from clearhead.analysis.behaviours.reading import Reading
from clearhead.analysis.behaviours.tally import Rows, largest_key
from clearhead.ops.hash_rng import mix

FEW = 5
DRAWN = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Numbers of cases at which the unit without preference is drawn; between them its share is interpolated."""
REPEATS = 40
CASE_DRAW = 121
TOKENS, BLOCKS, BLOCKS_PER_BATCH = 2**20, 2**20, 2**10
"""Bounds that three numbers are packed into one by."""


def concentration(probe: Probe, readings: list[Reading], rows: Rows) -> Float64[np.ndarray, " n"]:
    """c of every unit, in [0, 1]; 0 for one that shows nothing."""
    block, read, asked = [], [], []
    for batch, reading in enumerate(readings):
        key = largest_key(reading, probe.expected[batch])
        place = reading.block.cpu().numpy()
        tokens = probe.batches[batch].cpu().numpy()
        block.append(place + batch * BLOCKS_PER_BATCH)
        read.append(tokens[place, key])
        asked.append(tokens[place, reading.query.cpu().numpy()])
    shown = rows.on > 0
    where = np.concatenate(block)[shown]
    sides = []
    for tokens, usual in zip((read, asked), _all_cases(probe), strict=True):
        sides.append(_beyond_chance(rows, shown, where, np.concatenate(tokens)[shown], usual))
    return np.maximum(*sides)


def _beyond_chance(
    rows: Rows, shown: np.ndarray, block: Int64[np.ndarray, " m"], token: Int64[np.ndarray, " m"], usual: np.ndarray
) -> Float64[np.ndarray, " n"]:
    """c for one side."""
    of_unit = rows.unit[shown] * TOKENS + token  # one number for each pair of unit and token
    distinct, group = np.unique(of_unit * BLOCKS + block, return_inverse=True)
    weight = np.bincount(group, weights=rows.on[shown], minlength=len(distinct))
    unit, n_units = distinct // (TOKENS * BLOCKS), rows.n_units
    total = np.bincount(unit, weights=weight, minlength=n_units)
    squares = np.bincount(unit, weights=weight**2, minlength=n_units)
    cases = np.divide(total**2, squares, out=np.ones(n_units), where=squares > 0)
    pairs, group = np.unique(distinct // BLOCKS, return_inverse=True)
    top = _top(pairs // TOKENS, np.bincount(group, weights=weight, minlength=len(pairs)), n_units)
    share = np.divide(top, total, out=np.zeros(n_units), where=total > 0)
    chance = np.interp(np.log(cases), np.log(DRAWN), _chance(usual))
    excess = np.divide(share - chance, 1 - chance, out=np.zeros(n_units), where=chance < 1)
    return np.clip(excess, 0, 1)


def _top(unit: np.ndarray, weight: np.ndarray, n_units: int) -> Float64[np.ndarray, " n"]:
    """Sum of each unit's `FEW` largest weights."""
    order = np.lexsort((-weight, unit))
    unit, weight = unit[order], weight[order]
    start = np.searchsorted(unit, unit)  # where this unit's entries begin
    kept = np.arange(len(unit)) - start < FEW
    return np.bincount(unit[kept], weights=weight[kept], minlength=n_units)


def _all_cases(probe: Probe) -> tuple[np.ndarray, np.ndarray]:
    """The tokens read and the query tokens of all cases of the probe, one of each in a block."""
    read, asked = [], []
    for tokens, expected in zip(probe.batches, probe.expected, strict=True):
        for block, keys in zip(tokens.cpu().numpy(), expected.cpu().numpy(), strict=True):
            queries = keys.any(1)
            read.append(np.unique(block[keys[queries].argmax(1)]))
            asked.append(np.unique(block[queries]))
    return np.concatenate(read), np.concatenate(asked)


def _chance(tokens: np.ndarray) -> Iterable[float]:
    """The share of the top tokens among each of `DRAWN` many cases drawn at random."""
    if not len(tokens):
        return [1.0] * len(DRAWN)
    shares = []
    for n in DRAWN:
        draws = mix(CASE_DRAW, n, np.arange(REPEATS * n)) % np.uint64(len(tokens))
        found = [np.unique(part, return_counts=True)[1] for part in tokens[draws.astype(np.int64)].reshape(REPEATS, n)]
        shares.append(float(np.mean([np.sort(counts)[-FEW:].sum() / n for counts in found])))
    return shares
