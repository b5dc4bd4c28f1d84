"""How FVU falls with size or with active units: a power law with an offset.

    L(N) = a N^-b + c        a > 0, b > 0, c >= 0, least squares over the measured points

At a given b the rest is linear; b is searched on a grid and refined. Fewer than `SIZES` different N are not fitted, nor
are values that do not fall. With as many points as parameters the curve passes through its points and its error is not
known; `degrees` says so. A fit is not asked about an N outside of the measured ones.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import ClearheadError

SIZES = 3
EXPONENTS = (0.02, 6.0)
"""Range in which b is looked for; a fit at its edge is refused, since it is no power law with an offset."""
POOR = 0.3
"""A curve farther from its points than this share of their spread describes something else."""
Numbers = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class PowerFit:
    """A fitted power law, in the range where it was measured."""

    a: float
    b: float
    c: float
    low: float
    """Smallest N."""
    high: float
    """Largest N."""
    points: int
    rms: float
    """Root of the mean squared distance of the points from the curve, in units of L."""
    left_out: float | None
    """Largest distance of a point from the curve that was fitted without it; None where too few are left."""

    @property
    def degrees(self) -> int:
        """Points beyond the three parameters: 0 means that the error of the fit is not known."""
        return self.points - 3

    def at(self, n: float) -> float:
        """L at n; raises `ClearheadError` outside of the measured range."""
        if not self.low <= n <= self.high:
            raise ClearheadError(
                f"the fit was measured from {self.low:,.0f} to {self.high:,.0f} and says nothing about {n:,.0f}; "
                "train that size"
            )
        return self.a * n**-self.b + self.c


def fit_power(n: Sequence[float], loss: Sequence[float]) -> PowerFit:
    """Fit L(N) = a N^-b + c to points; raises `ClearheadError`, saying why, where they do not carry a fit."""
    x, y = np.asarray(n, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    sizes = len(np.unique(x))
    if sizes < SIZES:
        raise ClearheadError(f"{sizes} different sizes carry no fit; measure at least {SIZES}")
    a, b, c = _least_squares(x, y)
    if a <= 0:
        raise ClearheadError("the values do not fall with size, so there is no power law to fit")
    if not EXPONENTS[0] * 1.01 < b < EXPONENTS[1] * 0.99:
        raise ClearheadError("the values bend in no way that a power law with an offset has; measure more sizes")
    distance = y - (a * x**-b + c)
    rms = float(np.sqrt(np.mean(distance**2)))
    if rms > POOR * float(y.std()):
        raise ClearheadError("the values bend in no way that a power law with an offset has; measure more sizes")
    left_out = []
    for place in range(len(x)):
        rest = np.arange(len(x)) != place
        inside = x[rest].min() <= x[place] <= x[rest].max()
        if inside and len(np.unique(x[rest])) >= SIZES:
            other = _least_squares(x[rest], y[rest])
            left_out.append(abs(float(y[place] - (other[0] * x[place] ** -other[1] + other[2]))))
    return PowerFit(a, b, c, float(x.min()), float(x.max()), len(x), rms, max(left_out) if left_out else None)


def _least_squares(x: Numbers, y: Numbers) -> tuple[float, float, float]:
    """a, b, c of the smallest squared distance with a and c not negative."""
    unit = math.exp(float(np.log(x).mean()))  # keeps powers near 1
    scaled = x / unit
    low, high = (math.log(edge) for edge in EXPONENTS)
    for _ in range(6):
        grid = np.linspace(low, high, 41)
        errors = [_linear(scaled, y, math.exp(log_b))[2] for log_b in grid]
        best = int(np.argmin(errors))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    b = math.exp((low + high) / 2)
    a, c, _ = _linear(scaled, y, b)
    return a * unit**b, b, c


def _linear(x: Numbers, y: Numbers, b: float) -> tuple[float, float, float]:
    """a, c and the squared distance at exponent b, with c >= 0 and a >= 0."""
    power = x**-b
    centred = power - power.mean()
    a = float(centred @ y) / float(centred @ centred)
    c = float(y.mean()) - a * float(power.mean())
    if c < 0:
        a, c = float(power @ y) / float(power @ power), 0.0
    if a < 0:
        a, c = 0.0, float(y.mean())
    return a, c, float(np.sum((y - a * power - c) ** 2))
