"""The multiplier of a constrained training: as few edges as possible while a loss stays at or below its target.

    min_θ max_λ   E(θ) + λ (C(θ) − τ)             stepped on (E + λ (C − τ)) / (1 + λ), so that λ scales no gradient

λ > 0 follows the exponential moving average C̄ of what was measured, corrected for its start (Rezende & Viola 2018,
"Generalized ELBO with Constrained Optimization"; for edges arXiv 2512.05865):

    normalised     log λ += rate · clip((C̄ − τ) / slack, −1, 1)
    exponential    log λ += rate · (C̄ − τ)
    speedup        the same, ten times as fast where C̄ < τ
    additive           λ += rate · (C̄ − τ)

A violation has no bound, but the slack below the target ends at the loss of the unconstrained model: after a violation
of nats the plain rules take thousands of steps of hundredths of nats to come back. The normalised rule counts both
sides in units of that slack and clips them, so that λ falls as fast as it rose. Every rule keeps λ between two clamps
and leaves it alone in the first `freeze` steps. At the optimum λ = −dE/dτ: what a nat of tolerance buys in edges.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError

Rule = Literal["normalised", "exponential", "additive", "speedup"]
SPEEDUP = 10.0


@dataclass(frozen=True)
class GecoSettings:
    """How the multiplier moves. Raises `ClearheadError` for numbers that cannot be."""

    rule: Rule = "normalised"
    rate: float = 0.02
    average: float = 0.99
    """Share of the old average that stays at each update."""
    initial: float = 1.0
    low: float = 1e-2
    high: float = 1e3
    freeze: int = 0
    """Steps at the start in which only the average moves."""

    def __post_init__(self):
        if self.rule not in get_args(Rule):
            raise UnknownNameError("rule of the multiplier", self.rule, get_args(Rule))
        _refuse(not 0 < self.rate < math.inf, f"rate {self.rate}", "a number above 0, such as 0.02")
        _refuse(not 0 <= self.average < 1, f"average {self.average}", "a share from 0 up to, not including, 1")
        _refuse(not 0 < self.low < self.high < math.inf, f"low {self.low}, high {self.high}", "0 < low < high")
        inside = self.low <= self.initial <= self.high
        _refuse(not inside, f"initial {self.initial}", f"a number from low {self.low} to high {self.high}")
        _refuse(self.freeze < 0, f"freeze {self.freeze}", "a number of steps, 0 for none")


class Geco:
    """The multiplier of one constraint C ≤ target. `slack`: the violation that counts as a whole one.

    Raises `NonFiniteError` for a target or slack that is no number, `ClearheadError` for the rule "normalised" without
    a positive slack.
    """

    def __init__(self, settings: GecoSettings, target: float, slack: float):
        if not (math.isfinite(target) and math.isfinite(slack)):
            raise NonFiniteError(f"the constraint's target is {target} and its slack {slack}; both must be numbers")
        normalised = settings.rule == "normalised"
        _refuse(normalised and slack <= 0, f"slack {slack}", "a number above 0 for the rule 'normalised'")
        self.settings, self.target, self.slack = settings, target, slack
        self._low, self._high = math.log(settings.low), math.log(settings.high)
        self._log = math.log(settings.initial)
        self._sum = 0.0
        self._weight = 0.0
        self._at_high = 0

    @property
    def multiplier(self) -> float:
        """λ."""
        return min(max(math.exp(self._log), self.settings.low), self.settings.high)

    @property
    def average(self) -> float:
        """C̄, the weighted mean of the values so far; the target before the first."""
        return self._sum / self._weight if self._weight else self.target

    def update(self, value: float, step: int) -> None:
        """Take in what was measured at `step` (from 0). Raises `NonFiniteError` and changes nothing if it is none."""
        if not math.isfinite(value):
            raise NonFiniteError(f"the constrained loss is {value} at step {step}; lower --lr")
        keep = self.settings.average
        self._sum = keep * self._sum + (1 - keep) * value
        self._weight = keep * self._weight + (1 - keep)
        if step < self.settings.freeze:
            return
        self._log = min(max(self._moved(self.average - self.target), self._low), self._high)
        stuck = self._log == self._high and self.average > self.target
        self._at_high = self._at_high + 1 if stuck else 0

    def _moved(self, violation: float) -> float:
        """The logarithm of λ after one step, before the clamps."""
        rate = self.settings.rate
        if self.settings.rule == "normalised":
            return self._log + rate * min(max(violation / self.slack, -1.0), 1.0)
        if self.settings.rule == "additive":
            return math.log(max(math.exp(self._log) + rate * violation, self.settings.low))
        faster = SPEEDUP if self.settings.rule == "speedup" and violation < 0 else 1.0
        return self._log + rate * faster * violation

    def weigh(self, edges: Float[Tensor, ""], value: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """(E + λ (C − τ)) / (1 + λ), with gradients to both; λ is a constant in it."""
        return (edges + self.multiplier * (value - self.target)) / (1 + self.multiplier)

    def unreachable(self, updates: int = 200) -> str | None:
        """What to tell the user once λ has been at its upper clamp, and C̄ above the target, for so many updates."""
        if self._at_high < updates:
            return None
        return (
            f"the constraint is out of reach so far: the multiplier has been at its upper bound {self.settings.high:g} "
            f"for {self._at_high} updates and the constrained loss still averages {self.average:.4f}, above its target "
            f"{self.target:.4f}. Raise --tolerance, train longer, or change --lr"
        )

    def state(self) -> dict[str, Tensor]:
        """What a resumed training needs, in float64."""
        numbers = [self._log, self._sum, self._weight, float(self._at_high)]
        return {"geco": torch.tensor(numbers, dtype=torch.float64)}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._log, self._sum, self._weight, stuck = tensors["geco"].tolist()
        self._at_high = int(stuck)


def _refuse(wrong: bool, given: str, expected: str) -> None:
    if wrong:
        raise ClearheadError(f"multiplier: got {given}; expected {expected}")
