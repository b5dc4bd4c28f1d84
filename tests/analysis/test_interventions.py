"""Rows of the table by hand, and the linear range read off them."""

import numpy as np
import pytest

from clearhead.analysis.head_effects import KINDS, HeadEffects
from clearhead.analysis.interventions import intervention_rows, linear_range

FACTORS = (0.0, 0.5, 2.0, 4.0, "mean")


def effects(bent=0.0):
    """Two units of three and one cases: gradient (f − 1) g, effect that plus `bent` times its square."""
    unit, strength = np.array([0, 0, 0, 1]), np.array([1.0, 2.0, 3.0, -1.0])
    gradient = np.array([[(f - 1 if f != "mean" else 0.25) * g for g in strength] for f in FACTORS])
    numbers = {name: gradient for name in ("direct", "linear", "gradient", "loss", "kl")}
    values = {kind: numbers | {"effect": gradient + bent * gradient**2} for kind in KINDS}
    return HeadEffects(unit, np.arange(4), FACTORS, values)


def test_a_row_is_the_mean_over_cases():
    rows = intervention_rows(effects(), ["lorsa.0.5", "family.0.0"])
    assert len(rows["unit_id"]) == 2 * 5 * 3
    place = rows["becomes"].index("2")
    assert (rows["unit_id"][place], rows["changed"][place], rows["cases"][place]) == ("lorsa.0.5", "own", 3)
    assert rows["effect"][place] == pytest.approx(2) and rows["slope"][place] == pytest.approx(1)
    assert 1 <= rows["low"][place] < 2 < rows["high"][place] <= 3
    assert rows["effect"][rows["becomes"].index("mean")] == pytest.approx(0.5)


def test_linear_as_far_as_first_order_holds():
    assert linear_range(intervention_rows(effects(), ["a", "b"]), "a") == (0, 4)
    rows = intervention_rows(effects(bent=0.1), ["a", "b"])
    # unit b: effect / gradient = 1 + 0.1 · (f − 1) · (−1): 1.1 at 0, 0.7 at 4; unit a: 0.74 at 0, 0.87 at a half
    assert linear_range(rows, "b") == (0, 2) and linear_range(rows, "a") == (0.5, 1)
    none = {
        name: [v for v, f in zip(values, rows["becomes"], strict=True) if f == "mean"] for name, values in rows.items()
    }
    assert linear_range(none, "a") is None
