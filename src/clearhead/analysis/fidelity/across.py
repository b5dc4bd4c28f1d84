"""FVU over layers: do two kinds of dictionaries find the same layers hard, and by how much do they differ?

    rank_correlation   Spearman over layers of the FVU of two runs of equal budget
    ratio              geometric mean over layers of FVU / FVU of the other; lower: at how many layers it is below 1

Intervals are 95 % percentiles over resampled layers. Layers of one model are not independent draws; the interval says
how much hangs on single layers, not what another model would show.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.analysis.fidelity.overlap import spearman
from clearhead.ops.bootstrap import RESAMPLES, bounds

FEWEST = 5
"""Layers below which there is no correlation."""


def compare_layers(own: Sequence[float], other: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """The module's numbers for the FVU of two runs at every layer, in the same order; None where too few carry one."""
    a, b = np.asarray(own, dtype=np.float64), np.asarray(other, dtype=np.float64)
    logs = np.log(a / b)
    found: dict[str, Any] = {
        "layers": len(a),
        "lower": int((a < b).sum()),
        "ratio": float(np.exp(logs.mean())),
        "ratio_interval": None,
        "rank_correlation": None,
        "rank_correlation_interval": None,
    }
    if len(a) < FEWEST:
        return found
    drawn = np.random.default_rng(seed).integers(len(a), size=(RESAMPLES, len(a)))
    ratios = np.exp(logs[drawn].mean(1))
    ranked = [value for row in drawn if (value := spearman(a[row], b[row])) is not None]
    found["ratio_interval"] = bounds(ratios).tolist()
    found["rank_correlation"] = spearman(a, b)
    found["rank_correlation_interval"] = bounds(np.array(ranked)).tolist() if ranked else None
    return found
