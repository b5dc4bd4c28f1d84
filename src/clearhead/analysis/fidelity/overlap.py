"""Do two dictionaries miss the same? Their error vectors e = y - y_hat, on the same tokens.

    correlation        Pearson, of |e_a|^2 and |e_b|^2 over tokens       rank_correlation: Spearman
    relative_rank_correlation   Spearman of |e_a|^2 / |y|^2 and |e_b|^2 / |y|^2: large outputs have large errors in
                       any dictionary, and this is what remains without them
    cosine             mean over tokens of e_a . e_b / (|e_a| |e_b|)
    pooled_cosine      sum e_a . e_b / sqrt(sum |e_a|^2 sum |e_b|^2)
    shuffled_...       the same with e_b taken at another token of the batch: what unrelated errors give

Intervals are 95 % percentiles over resampled blocks. Dark matter is what both miss; that their errors point the same
way is needed for it and does not show why.
"""

from typing import Any

import numpy as np
import scipy.stats
from jaxtyping import Float, Int
from numpy.typing import NDArray

from clearhead.ops.bootstrap import bounds, draw_counts

ROUNDING = 1e-9
"""Relative differences of values that are the same but for rounding."""
Numbers = NDArray[np.float64]


def compare_errors(
    square_a: Float[np.ndarray, " n"],
    square_b: Float[np.ndarray, " n"],
    inner: Float[np.ndarray, " n"],
    shuffled_inner: Float[np.ndarray, " n"],
    shuffled_square: Float[np.ndarray, " n"],
    square_y: Float[np.ndarray, " n"],
    block: Int[np.ndarray, " n"],
    seed: int = 0,
) -> dict[str, Any]:
    """The module's numbers for the errors a and b at n tokens: squared norms, inner products, the block of each token.

    shuffled_inner and shuffled_square belong to the e_b of another token. Numbers that do not exist (an error that is
    the same everywhere has no correlation) are None.
    """
    scale = np.sqrt(square_a * square_b)
    cosine = np.divide(inner, scale, out=np.zeros_like(inner), where=scale > 0)
    shuffled_scale = np.sqrt(square_a * shuffled_square)
    shuffled = np.divide(shuffled_inner, shuffled_scale, out=np.zeros_like(inner), where=shuffled_scale > 0)
    whole = float(np.sqrt(square_a.sum() * square_b.sum()))
    relative_a, relative_b = square_a / square_y, square_b / square_y
    return {
        "tokens": len(inner),
        "correlation": pearson(square_a, square_b),
        "correlation_interval": _correlation_interval(square_a, square_b, block, seed),
        "rank_correlation": spearman(square_a, square_b),
        "relative_rank_correlation": spearman(relative_a, relative_b),
        "cosine": float(cosine.mean()),
        "cosine_interval": _mean_interval(cosine, block, seed),
        "pooled_cosine": float(inner.sum() / whole) if whole else None,
        "shuffled_cosine": float(shuffled.mean()),
        "shuffled_correlation": pearson(square_a, shuffled_square),
    }


def pearson(a: Numbers, b: Numbers) -> float | None:
    """Correlation; None where one of the two does not vary or there are fewer than 3 values."""
    if len(a) < 3 or any(np.ptp(values) <= ROUNDING * np.abs(values).max() for values in (a, b)):
        return None
    a, b = a - a.mean(), b - b.mean()
    return float(a @ b) / float(np.sqrt((a @ a) * (b @ b)))


def spearman(a: Numbers, b: Numbers) -> float | None:
    """Correlation of ranks, equal values sharing the mean of theirs."""
    return pearson(scipy.stats.rankdata(a), scipy.stats.rankdata(b))


def _resampled(columns: Numbers, block: NDArray[np.int64], seed: int) -> Numbers:
    """Sums of `columns` [n, c] over resampled blocks: [r, c]."""
    _, place = np.unique(block, return_inverse=True)
    sums = np.stack([np.bincount(place, weights=column) for column in columns.T], 1)
    return (draw_counts(len(sums), seed) @ sums).astype(np.float64)


def _mean_interval(values: Numbers, block: NDArray[np.int64], seed: int) -> list[float]:
    total, count = _resampled(np.stack([values, np.ones_like(values)], 1), block, seed).T
    return bounds(total / count).tolist()


def _correlation_interval(a: Numbers, b: Numbers, block: NDArray[np.int64], seed: int) -> list[float] | None:
    if pearson(a, b) is None:
        return None
    a, b = a / a.mean(), b / b.mean()  # so that moments of any unit keep their digits
    n, sa, sb, aa, bb, ab = _resampled(np.stack([np.ones_like(a), a, b, a * a, b * b, a * b], 1), block, seed).T
    spread = (aa / n - (sa / n) ** 2) * (bb / n - (sb / n) ** 2)
    found = (ab / n - sa * sb / n**2)[spread > 0] / np.sqrt(spread[spread > 0])
    return bounds(found).tolist() if len(found) else None
