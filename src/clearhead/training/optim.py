"""Optimiser and schedules: AdamW, warm-up-stable-decay learning rate, and the number of active heads over time.

    lr(s) = peak * min(1, (s+1)/warmup)            while s < steps - decay
            peak * max(floor, (steps-s)/decay)     after that                 (WSD, linear)
    k(s)  = round(k + (k_start - k) * max(0, 1 - s/anneal))                   (linear annealing)

All are pure functions of the step, so a resumed run continues on the same curve.
"""

import dataclasses

import torch
from torch import nn

DECAY_FLOOR = 0.02  # the last steps keep this share of the peak, as the average over them still improves


@dataclasses.dataclass(frozen=True)
class RateSchedule:
    """The learning rate of one run, in steps."""

    steps: int
    peak_lr: float
    warmup: int
    decay: int

    def lr_factor(self, step: int) -> float:
        """Share of the peak learning rate at `step` (from 0)."""
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        left = self.steps - step
        fall = max(DECAY_FLOOR, left / self.decay) if self.decay and left <= self.decay else 1.0
        return rise * min(1.0, fall)


@dataclasses.dataclass(frozen=True)
class Schedule(RateSchedule):
    """The learning rate and the number of active heads of one run, in steps."""

    k: int
    k_start: int
    k_anneal: int

    def active(self, step: int) -> int:
        """Number of heads kept per token at `step`."""
        if not self.k_anneal:
            return self.k
        return round(self.k + (self.k_start - self.k) * max(0.0, 1 - step / self.k_anneal))


def adam(
    groups: list[tuple[list[nn.Parameter], float]],
    lr: float,
    betas: tuple[float, float],
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """AdamW over parameter groups given as (parameters, factor on the learning rate).

    Only matrices decay: a gain or a bias near zero is no simpler than one near its value. Without decay this is Adam.
    """
    kinds = []
    for parameters, factor in groups:
        matrices = [p for p in parameters if weight_decay and p.ndim > 1]
        others = [p for p in parameters if not (weight_decay and p.ndim > 1)]
        kinds += [(part, factor, decay) for part, decay in ((matrices, weight_decay), (others, 0.0)) if part]
    return torch.optim.AdamW(
        [{"params": p, "lr": lr * factor, "factor": factor, "weight_decay": decay} for p, factor, decay in kinds],
        lr=lr,
        betas=betas,
        fused=True,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group, times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("factor", 1.0)
