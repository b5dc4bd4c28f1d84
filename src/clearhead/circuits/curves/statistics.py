"""Numbers of an inclusion curve: faithfulness, crossings, areas, intervals, overlap.

    F(k)      = (M(C_k) − M(∅)) / (M(V) − M(∅)),   M the mean over prompts
    N_first   = min{k : F(k) ≥ θ}   first crossing
    N_stable  = min{k : F(j) ≥ θ for all j ≥ k}     F is not monotone
    AUC       = ∫ F d(k/n) over [0, 1],  CPR = ∫ F dp,  CMD = ∫ |1 − F| dp          trapezoids

CPR and CMD (MIB, arXiv 2504.13151) take F at fixed shares p of the components, `MIB_SHARES`, with k = ⌊p·n⌋, over
p from 0.001 to 1. F may exceed 1: leaving out components that work against the answer makes a circuit better than the
model. Intervals are percentile bootstraps that draw whole groups, prompts or templates, with replacement.

Not here: the runs behind the numbers (curve.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from clearhead.errors import ClearheadError, NonFiniteError

MIB_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of the components at which MIB evaluates circuits."""
DRAWS = 1000
"""Bootstrap resamples."""


class Interval(NamedTuple):
    """The 2.5 and 97.5 percentiles of a bootstrap."""

    low: float
    high: float


def faithfulness(
    values: Float64[Tensor, "*k p"], empty: Float64[Tensor, " p"], full: Float64[Tensor, " p"]
) -> Float64[Tensor, "*k"]:
    """F of circuits measured on p prompts: a ratio of means, so that no prompt divides by its own small effect.

    Raises `ClearheadError` where the whole model is no better than the empty circuit, `NonFiniteError` for NaN.
    """
    for name, given in (("circuits", values), ("the empty circuit", empty), ("the whole model", full)):
        if not bool(given.isfinite().all()):
            raise NonFiniteError(
                f"the metric of {name} is NaN or infinite on prompt {int((~given.isfinite()).nonzero()[0, -1])}"
            )
    effect = float((full - empty).mean())
    if effect <= 0:
        raise ClearheadError(
            f"the whole model measures {float(full.mean()):.3f} and the empty circuit {float(empty.mean()):.3f}: with"
            " no behaviour to explain there is no faithfulness; use a task that this model does, or another ablation"
        )
    return (values - empty).mean(-1) / effect


def first_crossing(counts: Sequence[int], curve: Float64[Tensor, " k"], threshold: float) -> int | None:
    """The smallest evaluated count whose F reaches the threshold; None where none does."""
    return next((count for count, f in zip(counts, curve.tolist(), strict=True) if f >= threshold), None)


def stable_crossing(counts: Sequence[int], curve: Float64[Tensor, " k"], threshold: float) -> int | None:
    """The smallest evaluated count from which on F stays at the threshold or above; None if the last is below."""
    stable = None
    for count, f in zip(reversed(counts), reversed(curve.tolist()), strict=True):
        if f < threshold:
            break
        stable = count
    return stable


def area(counts: Sequence[int], curve: Float64[Tensor, " k"]) -> float:
    """∫ F d(k/n) by trapezoids over the evaluated counts, which run from 0 to n."""
    x = torch.tensor(counts, dtype=torch.float64) / counts[-1]
    return float(torch.trapezoid(curve, x))


def mib_counts(n: int) -> list[int]:
    """The number of components at each of `MIB_SHARES`."""
    return [int(share * n) for share in MIB_SHARES]


def cpr(curve: Float64[Tensor, " s"]) -> float:
    """Area under F at `MIB_SHARES`: how well the best components of each number perform; larger is better."""
    return float(torch.trapezoid(curve, torch.tensor(MIB_SHARES, dtype=torch.float64)))


def cmd(curve: Float64[Tensor, " s"]) -> float:
    """Area between F at `MIB_SHARES` and 1: how far circuits are from behaving as the model does; smaller is better."""
    return float(torch.trapezoid((1 - curve).abs(), torch.tensor(MIB_SHARES, dtype=torch.float64)))


def resample(groups: Sequence[object], *, draws: int = DRAWS, seed: int = 0) -> Float64[Tensor, "draws p"]:
    """How often each prompt is drawn: as many groups as there are, with replacement, each with all of its prompts.

    `groups` holds each prompt's group: its template, or its own number for a bootstrap over prompts.
    """
    place = {name: index for index, name in enumerate(dict.fromkeys(groups))}
    member = torch.nn.functional.one_hot(torch.tensor([place[group] for group in groups]), len(place)).double()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(place), (draws, len(place)), generator=generator)
    times = torch.zeros(draws, len(place), dtype=torch.float64)
    times.scatter_add_(1, drawn, torch.ones_like(times))
    return times @ member.T


def interval(found: Sequence[float | None]) -> Interval | None:
    """The 95 % interval of what resamples gave.

    None, as for a threshold that is not crossed, counts as infinite; an interval that reaches so far is None as well.
    """
    ordered = sorted(float("inf") if value is None else float(value) for value in found)
    low, high = (ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in (0.025, 0.975))
    return None if high == float("inf") else Interval(low, high)


def overlap(a: Sequence[str], b: Sequence[str]) -> float:
    """Jaccard: components in both, of those in either. Raises `ClearheadError` for two empty circuits."""
    union = set(a) | set(b)
    if not union:
        raise ClearheadError("two empty circuits have no overlap: give circuits of at least one component")
    return len(set(a) & set(b)) / len(union)


def correlation(a: Float64[Tensor, " n"], b: Float64[Tensor, " n"]) -> float | None:
    """Pearson's r of two scorings; None where one of them is constant."""
    a, b = a - a.mean(), b - b.mean()
    norm = float(a.norm() * b.norm())
    return float(a @ b) / norm if norm > 0 else None


def rank_correlation(a: Float64[Tensor, " n"], b: Float64[Tensor, " n"]) -> float | None:
    """Spearman's ρ: Pearson's r of the ranks, tied scores sharing their mean rank."""
    return correlation(_ranks(a), _ranks(b))


def _ranks(scores: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    _, group, size = torch.unique(scores, return_inverse=True, return_counts=True)
    last = size.cumsum(0)
    return (last - (size - 1) / 2).double()[group]
