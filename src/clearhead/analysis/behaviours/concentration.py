"""How far what a unit does comes from few tokens, compared with a unit that does it on any.

    top(w)  share of the five tokens with the largest contributions w
    c       ( top(w) − top of a unit without preference ) / ( 1 − the same ),   at least 0

for the tokens read and for the query's tokens; the larger c counts. A unit without preference draws as many cases as
this one has, from all cases of the probe: few cases are concentrated by themselves. Unequal contributions count as
fewer cases: n = (Σ w)² / Σ w².
"""

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
TOKENS = 2**20
"""More than any vocabulary has."""


def concentration(probe: Probe, readings: list[Reading], rows: Rows) -> Float64[np.ndarray, " n"]:
    """Concentration c of every unit, in [0, 1]; 0 for one that shows nothing."""
    read, asked = [], []
    for batch, reading in enumerate(readings):
        tokens, block = probe.batches[batch].cpu().numpy(), reading.block.cpu().numpy()
        read.append(tokens[block, largest_key(reading, probe.expected[batch])])
        asked.append(tokens[block, reading.query.cpu().numpy()])
    sides = zip((read, asked), _all_cases(probe), strict=True)
    return np.maximum(*(_beyond_chance(rows, np.concatenate(tokens), usual) for tokens, usual in sides))


def _beyond_chance(rows: Rows, token: Int64[np.ndarray, " e"], usual: np.ndarray) -> Float64[np.ndarray, " n"]:
    """Concentration for one side."""
    n_units = rows.n_units
    total, squares = rows.per_unit(rows.on), rows.per_unit(rows.on**2)
    cases = np.divide(total**2, squares, out=np.ones(n_units), where=squares > 0)
    of_unit, group = np.unique(rows.unit * TOKENS + token, return_inverse=True)  # one number for each pair
    top = _top(of_unit // TOKENS, np.bincount(group, weights=rows.on, minlength=len(of_unit)), n_units)
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
    """The tokens read and the query tokens of all cases of the probe; of several keys the earliest."""
    read, asked = [], []
    for tokens, expected in zip(probe.batches, probe.expected, strict=True):
        block, query = expected.any(-1).nonzero(as_tuple=True)
        read.append(tokens[block, expected[block, query].int().argmax(-1)].cpu().numpy())
        asked.append(tokens[block, query].cpu().numpy())
    return np.concatenate(read), np.concatenate(asked)


def _chance(tokens: np.ndarray) -> list[float]:
    """The share of the top tokens among each of `DRAWN` many cases drawn at random."""
    if not len(tokens):
        return [1.0] * len(DRAWN)
    shares = []
    for n in DRAWN:
        draws = mix(CASE_DRAW, n, np.arange(REPEATS * n)) % np.uint64(len(tokens))
        found = [np.unique(part, return_counts=True)[1] for part in tokens[draws.astype(np.int64)].reshape(REPEATS, n)]
        shares.append(float(np.mean([np.sort(counts)[-FEW:].sum() / n for counts in found])))
    return shares
