"""Are the explanations of one set of units better than those of another? Win, tie or loss, layer by layer.

For each layer and scorer with scores on both sides: as many units of either as the smaller side has, drawn at random
and matched at random; a two-sided Mann-Whitney test of their scores (normal approximation with correction for ties and
continuity). The first set wins where its scores are higher with p < alpha, loses where they are lower, and ties
otherwise. The difference of the matched pairs' scores is given with its 95 % bootstrap interval, pairs resampled.

Tests of several layers and scorers are counted, not corrected: of k comparisons without any difference, alpha k end
otherwise than tied by chance.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu

from clearhead.atlas import Atlas
from clearhead.errors import ClearheadError
from clearhead.explain.questions import SCORERS
from clearhead.ops.bootstrap import mean_bounds

ALPHA = 0.05
LEAST = 5
"""Units per side; with fewer no two-sided test reaches alpha, or hardly."""


class Comparison(NamedTuple):
    """One layer, one scorer: who has the better explanations."""

    layer: int
    scorer: str
    result: Literal["win", "tie", "loss"]
    units: int
    """On each side."""
    mean: float
    other_mean: float
    difference: float
    low: float
    high: float
    p: float


def compare_scores(
    ours: Sequence[float], others: Sequence[float], *, seed: int = 0, alpha: float = ALPHA
) -> tuple[Literal["win", "tie", "loss"], NDArray[np.float64], NDArray[np.float64], float]:
    """(result for `ours`, its scores, those matched with them, p); raises `ClearheadError` below `LEAST` units."""
    n = min(len(ours), len(others))
    if n < LEAST:
        raise ClearheadError(
            f"a test needs scores of {LEAST} units on each side; there are {len(ours)} and {len(others)}"
        )
    rng = np.random.default_rng([seed, 3])
    first, second = (np.asarray(side, dtype=np.float64)[rng.permutation(len(side))[:n]] for side in (ours, others))
    p = 1.0 if (first == first[0]).all() and (second == first[0]).all() else float(_mann_whitney(first, second))
    if p >= alpha:
        return "tie", first, second, p
    greater = (first[:, None] > second).sum() > (first[:, None] < second).sum()
    return "win" if greater else "loss", first, second, p


def _mann_whitney(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    return mannwhitneyu(first, second, alternative="two-sided", method="asymptotic").pvalue


def compare_units(
    ours: Mapping[tuple[int, str], Sequence[float]],
    others: Mapping[tuple[int, str], Sequence[float]],
    *,
    seed: int = 0,
    alpha: float = ALPHA,
) -> list[Comparison]:
    """A comparison for every (layer, scorer) with enough scores on both sides, by layer."""
    found = []
    order = {scorer: place for place, scorer in enumerate(SCORERS)}
    for layer, scorer in sorted(ours.keys() & others.keys(), key=lambda key: (key[0], order.get(key[1], len(order)))):
        if min(len(ours[layer, scorer]), len(others[layer, scorer])) < LEAST:
            continue
        result, first, second, p = compare_scores(ours[layer, scorer], others[layer, scorer], seed=seed, alpha=alpha)
        pairs = first - second
        low, high = mean_bounds(pairs, [seed, 4])
        means = float(first.mean()), float(second.mean())
        found.append(Comparison(layer, scorer, result, len(pairs), *means, means[0] - means[1], low, high, p))
    return found


def scores_in(atlas: Atlas, explainer: str, judge: str, kind: str | None = None) -> dict[tuple[int, str], list[float]]:
    """Scores of an atlas' units by (layer, scorer), what this explainer wrote and this judge judged.

    Raises `ClearheadError` when there are none, saying what there is.
    """
    rows = atlas.sql(
        "select layer, scorer, score from explanations join units using (unit_id) where explainer = $1 and judge = $2 "
        "and score is not null and layer is not null and ($3 is null or kind = $3) order by unit_id",
        [explainer, judge, kind],
    )
    if not rows:
        known = atlas.sql("select distinct explainer, judge from explanations where score is not null")
        have = "; ".join(f"{row['explainer']} judged by {row['judge']}" for row in known) or "none at all"
        raise ClearheadError(
            f"{atlas.path} holds no scores of explanations by {explainer} judged by {judge} (it holds {have}); type "
            f"clearhead explain {atlas.path} with the same explainer and judge"
        )
    scores: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row in rows:
        scores[row["layer"], row["scorer"]].append(row["score"])
    return dict(scores)


def count_results(comparisons: Sequence[Comparison]) -> dict[str, int]:
    """How many comparisons were won, lost and tied."""
    return {result: sum(one.result == result for one in comparisons) for result in ("win", "loss", "tie")}
