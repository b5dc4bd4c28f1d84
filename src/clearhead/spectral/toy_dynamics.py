"""How a toy gets where it ends: all measures over the steps of its training, and the order in which things happen.

For every pair, the step from which on to the end of training

    singular vectors   both features lie in the span of the leading modes, one mode per pair (cosine ≥ 0.95)
    own vector         each lies along its own mode: the same for one pair, later for several, whose modes turn into
                       each other until the error is small against the gaps between their singular values
    logit              σ |w_q| |w_p| is at least 0.95 of the target
    orthogonalisation  the largest overlap of its features with another feature is at most 0.05
    amplitude          σ is within 5 % of where it ends, given that the logit is right there

The logit is right early, with features that are too long; amplitude settles last, because they shorten once they need
not share dimensions. A tolerance of 5 % is 18 degrees for a cosine near 1 and 3 degrees for an overlap near 0: the
curves say more than the steps.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from clearhead.config.spectral_toy import ToySetting
from clearhead.runs import progress
from clearhead.spectral.toy import Losses, Toy, train
from clearhead.spectral.toy_metrics import Measures, make_probe, measure

RECORDS = 100
TOLERANCE = 0.05
ORDER = ("singular vectors", "orthogonalisation", "amplitude")


@dataclass(frozen=True, eq=False)
class Moment:
    """One record: the step, the losses of its batch, and what was measured before it."""

    step: int
    reconstruction: float
    attention: float
    measures: Measures

    def describe(self) -> dict[str, Any]:
        """The record as JSON values, a line of metrics.jsonl."""
        m = self.measures
        vectors = ("query", "key", "contained", "ratio", "overlap")
        return {
            "step": self.step,
            "reconstruction": self.reconstruction,
            "attention": self.attention,
            "error": m.error,
            "sigma": m.sigma[: len(m.targets) + 1].tolist(),
            **{name: getattr(m, name).tolist() for name in vectors},
            "overlap_rms": m.overlap_rms,
            "others_dim": m.others_dim,
            "live": m.live,
            **m.spread._asdict(),
        }


@dataclass(frozen=True, eq=False)
class Watched:
    """A trained toy with its records, the last of them at the end, and the CPU seconds that both took."""

    setting: ToySetting
    seed: int
    toy: Toy
    moments: list[Moment]
    cpu_seconds: float

    @property
    def end(self) -> Measures:
        """What was measured at the end."""
        return self.moments[-1].measures

    def over_steps(self, name: str) -> Tensor:
        """One of the vectors of `Measures` at every record, stacked."""
        return torch.stack([getattr(moment.measures, name) for moment in self.moments])

    def crossings(self) -> dict[str, list[int | None]]:
        """For each event the step at which each pair reached it for good; None where it never did.

        Of pairs that have no mode, because the head is narrower, the amplitude is None.
        """
        least = 1 - TOLERANCE
        ratio, sigma = self.over_steps("ratio"), self.over_steps("sigma")[:, : self.setting.pairs]
        settled = torch.zeros_like(ratio, dtype=torch.bool)
        settled[:, : sigma.shape[1]] = (sigma / sigma[-1] - 1).abs() <= TOLERANCE
        return {
            "singular vectors": self._since(self.over_steps("contained") >= least),
            "own vector": self._since(self.over_steps("aligned") >= least),
            "logit": self._since(ratio >= least),
            "orthogonalisation": self._since(self.over_steps("overlap") <= TOLERANCE),
            "amplitude": self._since(settled & (ratio[-1] >= least)),
        }

    def in_order(self) -> int:
        """How many pairs reached `ORDER` in this order, all three of them."""
        reached = self.crossings()
        each = zip(*(reached[event] for event in ORDER), strict=True)
        return sum(None not in steps and list(steps) == sorted(steps, key=lambda step: step or 0) for steps in each)

    def _since(self, held: Bool[Tensor, "m p"]) -> list[int | None]:
        lasting = held.flip(0).long().cumprod(0).sum(0).tolist()
        return [self.moments[-count].step if count else None for count in lasting]


def train_watched(setting: ToySetting, seed: int, records: int = RECORDS) -> Watched:
    """Train a toy and measure it `records` times on the way, more often early; progress is shown on stderr."""
    probe = make_probe(setting)
    moments: list[Moment] = []
    at = {round(setting.steps * (record / records) ** 2) for record in range(records)}
    begun = time.process_time()
    with progress(f"toy, seed {seed}", setting.steps, unit="steps") as advance:

        def watch(step: int, toy: Toy, losses: Losses) -> None:
            advance(step - (moments[-1].step if moments else 0))
            values = float(losses.reconstruction.detach()), float(losses.attention.detach())
            moments.append(Moment(step, *values, measure(toy, probe)))

        toy = train(setting, seed, watch, at)
    return Watched(setting, seed, toy, moments, time.process_time() - begun)
