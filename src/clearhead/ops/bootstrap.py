"""Bootstrap intervals: how far a number moves when the cases that it came from are drawn again.

    resampled_r = the number over n cases, drawn n times with replacement      r = 1 … RESAMPLES
    interval    = the 2.5 and 97.5 percentiles of resampled

Cases that hang together (the tokens of a block, what is asked about one example) are one case here: add up what belongs
together and resample the sums. What was the same for all cases (a training seed, a model) does not vary. Of few cases
the intervals are too narrow rather than too wide.
"""

from collections.abc import Sequence

import numpy as np
import scipy.stats
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 1000
PERCENTILES = (2.5, 97.5)
FEWEST = 0.5
"""A number that exists in a smaller share of the resamples has no interval."""


def draw_counts(n: int, seed: int | Sequence[int]) -> Float[np.ndarray, "r n"]:
    """How often each of n cases comes in each resample; `counts @ sums` resamples sums of cases."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES).astype(np.float64)


def bounds(resampled: Float[np.ndarray, "r ..."]) -> Float[np.ndarray, "2 ..."]:
    """The interval of each number over the resamples in which it is finite; NaN where those are fewer than half."""
    resampled = np.asarray(resampled, dtype=np.float64)
    exists = np.isfinite(resampled)
    known = exists.mean(0) >= FEWEST
    found = np.full((2, *resampled.shape[1:]), np.nan)
    if known.any():
        values = np.where(exists, resampled, np.nan)[:, known]
        found[:, known] = np.nanpercentile(values, PERCENTILES, axis=0)
    return found


def mean_bounds(values: ArrayLike, seed: int | Sequence[int]) -> tuple[float, float]:
    """The interval of the mean of some values."""
    numbers: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    low, high = bounds(draw_counts(len(numbers), seed) @ numbers / len(numbers))
    return float(low), float(high)


def share_bounds(share: float, n: int) -> tuple[float, float]:
    """The interval of a share of n cases: how many are drawn again is binomial, so no sample is needed."""
    low, high = scipy.stats.binom.ppf(np.array(PERCENTILES) / 100, n, share) / n
    return float(low), float(high)
