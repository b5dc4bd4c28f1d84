"""What setting heads to other values does, as rows of the atlas' table `interventions`, and how far it is linear.

For a unit, a setting (a factor, mean, elsewhere) and what was changed (the unit, or one of two controls), over the
cases (`head_effects.py`):

    effect     mean change of the unit's logits, with its interval
    direct, linear, gradient       means of what is predicted
    slope      Σ effect · gradient / Σ gradient²        1 where the change is small enough for its first order

The linear range of a unit goes from the factor 1, down and up, as far as the slope stays within a fifth of 1 at every
factor measured. It is known at these factors only.

Intervals are 2.5 % and 97.5 % quantiles of 1,000 bootstrap samples of a unit's cases; for few cases too narrow.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.analysis.head_effects import KINDS, Becomes, HeadEffects
from clearhead.ops.bootstrap import RESAMPLES, bounds

TOLERANCE = 0.2
"""How far the slope may be from 1 where a change counts as linear."""
NUMBERS = ("direct", "linear", "gradient", "loss", "kl")


def intervention_rows(found: HeadEffects, names: Sequence[str], seed: int = 0) -> dict[str, list[Any]]:
    """Columns of the table: by unit (names, in the order of the units measured), setting and kind of change."""
    columns = ("unit_id", "becomes", "changed", "effect", "low", "high", "slope", *NUMBERS, "cases")
    rows: dict[str, list[Any]] = {name: [] for name in columns}
    generator = np.random.default_rng(seed)
    for unit in np.unique(found.unit):
        at = np.flatnonzero(found.unit == unit)
        picks = generator.integers(len(at), size=(RESAMPLES, len(at)))
        for place, setting in enumerate(found.becomes):
            for kind in KINDS:
                values = {name: numbers[place, at] for name, numbers in found.values[kind].items()}
                low, high = bounds(values["effect"][picks].mean(1))
                row = (
                    names[unit],
                    setting_name(setting),
                    kind,
                    float(values["effect"].mean()),
                    float(low),
                    float(high),
                    _known(fit_slope(values["gradient"], values["effect"])),
                    *(float(values[name].mean()) for name in NUMBERS),
                    len(at),
                )
                for column, value in zip(rows.values(), row, strict=True):
                    column.append(value)
    return rows


def setting_name(setting: Becomes) -> str:
    """A setting as it is written: 0.5, 2, mean."""
    return setting if isinstance(setting, str) else f"{setting:g}"


def linear_range(rows: dict[str, list[Any]], unit: str) -> tuple[float, float] | None:
    """The least and the largest factor up to which the unit's changes are linear; None where no factor was measured."""
    slopes = {1.0: 1.0}
    for name, becomes, changed, slope in zip(
        *(rows[column] for column in ("unit_id", "becomes", "changed", "slope")), strict=True
    ):
        if name == unit and changed == "own" and becomes not in ("mean", "elsewhere"):
            slopes[float(becomes)] = slope if slope is not None else np.inf
    if len(slopes) == 1:
        return None
    ends = []
    for beyond in (sorted((f for f in slopes if f < 1), reverse=True), sorted(f for f in slopes if f > 1)):
        end = 1.0
        for factor in beyond:
            if abs(slopes[factor] - 1) > TOLERANCE:
                break
            end = factor
        ends.append(end)
    return ends[0], ends[1]


def fit_slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> Any:
    """Of y = slope · x, along the last axis; NaN where x is 0."""
    square = (x * x).sum(-1)
    return np.where(square > 0, (x * y).sum(-1) / np.where(square > 0, square, 1), np.nan)


def _known(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
