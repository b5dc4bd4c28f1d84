"""How well an approximate ranking agrees with exact effects: correlations of the two scores over components.

    exact_i = M(all) − M(all but i), the mean over the prompts that were scored
    Pearson's r and Spearman's ρ of exact and estimated scores

A level with more than `MEASURED` components has half as many of the largest by size measured, and as many drawn from
the others: edges are too many, most of them do nothing, and a correlation over those alone would be one of noise. The
larger the part of large ones, the larger the correlation; it belongs to its sample, which `Agreement` states. Where
prompts have their own components, the pairs of all prompts are taken together.

Not here: which of the two makes the better circuits, which is what curves show (curve.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from clearhead.circuits.curves.curve import Scores
from clearhead.circuits.curves.level import Level
from clearhead.circuits.curves.statistics import correlation, rank_correlation
from clearhead.circuits.patching.metrics import METRICS
from clearhead.data.tasks import TaskBatch

MEASURED = 512
"""Components of a prompt, at most, whose exact effect is measured."""
MASKS = 1 << 26
"""Entries of the masks that are made at once."""


@dataclass(frozen=True)
class Agreement:
    """Exact effects against the scores of a method."""

    method: str
    pearson: float | None
    """None where one of the two is constant."""
    spearman: float | None
    pairs: int
    """Components that were compared, of all prompts where prompts have their own."""
    components: int
    """How many there are to choose from."""


def compare_exact(
    level: Level, scores: Scores, batches: Sequence[TaskBatch], *, most: int = MEASURED, seed: int = 0
) -> Agreement:
    """Agreement of `scores` with exact effects on the prompts that they were made on.

    Raises what `Level.evaluate` raises.
    """
    generator = torch.Generator().manual_seed(seed)
    estimated, exact, total = [], [], 0
    if level.per_prompt:
        for found, rows in zip(scores.of_batches, batches, strict=True):
            chosen = _choose(found, most, generator)
            estimated.append(found.gather(1, chosen).flatten())
            exact.append(effects(level, rows, chosen).flatten())
            total += found.numel()
    else:
        found = scores.of_batches[0]
        chosen = _choose(found, most, generator)
        estimated.append(found.gather(1, chosen)[0])
        exact.append(torch.cat([effects(level, rows, chosen) for rows in batches]).mean(0))
        total = found.shape[1]
    a, b = torch.cat(estimated), torch.cat(exact)
    return Agreement(scores.method, correlation(a, b), rank_correlation(a, b), len(a), total)


def effects(level: Level, rows: TaskBatch, chosen: Int64[Tensor, "_ e"]) -> Float64[Tensor, "b e"]:
    """M(all) − M(all but one) of e components of each prompt, the same for all where `chosen` has one row."""
    n, b, column = level.count(rows), len(rows.items), METRICS.index("logit_difference")
    whole = level.evaluate(torch.ones(1, 1, n, dtype=torch.bool), rows)[..., column]
    measured = []
    for some in chosen.split(max(1, MASKS // (n * len(chosen))), dim=1):
        keep = torch.ones(some.shape[1], len(some), n, dtype=torch.bool)
        keep.scatter_(2, some.T[..., None], value=False)
        measured.append(level.evaluate(keep, rows)[..., column])
    return (whole - torch.cat(measured)).T.view(b, -1)


def _choose(scores: Float64[Tensor, "_ n"], most: int, generator: torch.Generator) -> Int64[Tensor, "_ e"]:
    """The components to measure, each once: all, or the largest by size and some of the others."""
    n = scores.shape[1]
    if n <= most:
        return torch.arange(n).expand(len(scores), -1)
    order = scores.abs().argsort(dim=1, descending=True, stable=True)
    rest = torch.randperm(n - most // 2, generator=generator)[: most - most // 2] + most // 2
    return torch.cat([order[:, : most // 2], order[:, rest]], 1)
