"""Inclusion curves: how much of a behaviour the k most important components keep, for every k that matters.

    F(k) = (M(C_k) − M(∅)) / (M(V) − M(∅)),   C_k the k first of a ranking, all others overwritten

The counts are a geometric grid with MIB's shares in it. Then every count between the last one below the threshold and
the first one above is evaluated: F is not monotone, so bisection would find some crossing and not the first. Where the
gap is wider than `STEP_POINTS` (attention edges), it is cut into so many and the search goes on in the part that holds
the crossing; elsewhere crossings are exact up to the spacing of the grid around them, which `counts` shows.

Rankings are made on one set of prompts and evaluated on another. Prompts that the whole model gets wrong belong in
neither: there is no behaviour in them to explain, their effect is small or reversed and would enter the ratio of means
as noise; they are counted in the protocol. Where components differ between prompts (attention edges), every prompt is
ranked by its own scores, and the protocol says so.

Not here: what components are (level.py and its levels), formulas of the numbers (statistics.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from clearhead.circuits.curves import statistics
from clearhead.circuits.curves.level import METHODS, Level, Method
from clearhead.circuits.curves.protocol import Policy
from clearhead.circuits.curves.statistics import Interval
from clearhead.circuits.patching.metrics import METRICS, Metric
from clearhead.circuits.patching.nodes import select_rows
from clearhead.data.tasks import TaskBatch
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError

THRESHOLD = 0.9
MIN_EFFECT = 0.5
"""Logits."""
STEP_POINTS = 64
RANDOM_RANKINGS = 3
_GRID = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100)
_GROWTH = 1.25


@dataclass(frozen=True, eq=False)
class Scores:
    """What each component is worth, per evaluated batch: [b, n], or [1, n] where all prompts share one ranking."""

    method: str
    of_batches: tuple[Float64[Tensor, "_ n"], ...]

    def keys(self, policy: Policy) -> list[Float64[Tensor, "_ n"]]:
        """What components are sorted by, largest first: the score, or its absolute value."""
        return [scores.abs() if policy == "absolute" else scores for scores in self.of_batches]


@dataclass(frozen=True, eq=False)
class Curve:
    """One ranking's circuits, measured; axes k evaluated counts, p prompts, m metrics."""

    method: str
    policy: Policy
    metric: Metric
    threshold: float
    counts: tuple[int, ...]
    items: tuple[int, ...]
    templates: tuple[str, ...]
    values: Float64[Tensor, "k p m"]
    first: int | None
    """First crossing of the threshold; None where no count reaches it."""
    stable: int | None
    tied: int
    """Components that share the score at which the stable circuit is cut; with 1 the cut is unambiguous."""
    complement: float | None
    """F of all components but the stable circuit: near 0 where the circuit is necessary."""
    circuit: tuple[str, ...]
    """Unit ids of the stable circuit, most important first; empty where prompts have their own."""

    @property
    def primary(self) -> Float64[Tensor, "k p"]:
        """Values of the metric that the curve is about."""
        return self.values[..., METRICS.index(self.metric)]

    @property
    def f(self) -> Float64[Tensor, " k"]:
        """F at every evaluated count."""
        return statistics.faithfulness(self.primary, self.primary[0], self.primary[-1])

    @property
    def auc(self) -> float:
        """Area under F over shares of the components."""
        return statistics.area(self.counts, self.f)

    @property
    def cpr(self) -> float:
        """MIB's circuit performance ratio; meant for signed rankings."""
        return statistics.cpr(self._at_shares())

    @property
    def cmd(self) -> float:
        """MIB's circuit-model distance; meant for absolute rankings."""
        return statistics.cmd(self._at_shares())

    def _at_shares(self) -> Tensor:
        place = {count: index for index, count in enumerate(self.counts)}
        return self.f[[place[count] for count in statistics.mib_counts(self.counts[-1])]]

    def per_prompt(self) -> list[int | None]:
        """The stable crossing of each prompt alone; None where its own effect is reversed or it never stays above."""
        effect = self.primary[-1] - self.primary[0]
        curves = (self.primary - self.primary[0]) / torch.where(effect == 0, 1, effect)
        return [
            statistics.stable_crossing(self.counts, curves[:, p], self.threshold) if effect[p] > 0 else None
            for p in range(len(self.items))
        ]

    def intervals(self, *, by_template: bool, seed: int = 0) -> dict[str, Interval | None]:
        """95 % intervals of first, stable, auc and max F, all None with a single prompt or template.

        Crossings are among the evaluated counts; resamples without any behaviour count as never crossing.
        """
        groups: Sequence[object] = self.templates if by_template else self.items
        if len(set(groups)) < 2:
            return dict.fromkeys(("first", "stable", "auc", "max_f"))
        times = statistics.resample(groups, seed=seed)
        effect = times @ (self.primary[-1] - self.primary[0])
        draws = (times @ (self.primary - self.primary[0]).T)[effect > 0] / effect[effect > 0, None]
        nothing: list[float | None] = [None] * int((effect <= 0).sum())
        crossing = {"first": statistics.first_crossing, "stable": statistics.stable_crossing}
        found: dict[str, list[float | None]] = {
            name: [cross(self.counts, f, self.threshold) for f in draws] for name, cross in crossing.items()
        }
        shares = torch.tensor(self.counts, dtype=torch.float64) / self.counts[-1]
        found["auc"] = torch.trapezoid(draws, shares, dim=1).tolist()
        found["max_f"] = draws.amax(1).tolist()
        return {name: statistics.interval([*values, *nothing]) for name, values in found.items()}

    def to_dict(self, seed: int = 0) -> dict[str, Any]:
        """All numbers as JSON values."""
        return {
            "rank": self.method,
            "policy": self.policy,
            "metric": self.metric,
            "threshold": self.threshold,
            "first": self.first,
            "stable": self.stable,
            "auc": self.auc,
            "max_f": float(self.f.max()),
            "max_f_at": self.counts[int(self.f.argmax())],
            "cpr": self.cpr,
            "cmd": self.cmd,
            "tied_at_stable": self.tied,
            "complement_f": self.complement,
            "intervals_prompts": self.intervals(by_template=False, seed=seed),
            "intervals_templates": self.intervals(by_template=True, seed=seed),
            "counts": list(self.counts),
            "f": self.f.tolist(),
            "means": {name: self.values[..., m].mean(1).tolist() for m, name in enumerate(METRICS)},
            "items": list(self.items),
            "templates": list(self.templates),
            "per_prompt_stable": self.per_prompt(),
            "per_prompt_values": self.primary.T.tolist(),
            "circuit": list(self.circuit),
        }


def score(
    level: Level,
    method: str,
    ranked_on: Sequence[TaskBatch],
    evaluated_on: Sequence[TaskBatch],
    *,
    seed: int = 0,
) -> Scores:
    """Scores by a method of rank.py or `random`, averaged over the prompts of `ranked_on`.

    A level whose components differ between prompts is scored on the evaluated prompts themselves.
    Raises `UnknownNameError` for another method, `NonFiniteError` for scores that are not finite.
    """
    if method == "random":
        generator = torch.Generator().manual_seed(seed)
        rows = len(evaluated_on) if level.per_prompt else 1
        drawn = [
            torch.rand(1, level.count(evaluated_on[row]), generator=generator, dtype=torch.float64)
            for row in range(rows)
        ]
        return Scores(method, tuple(drawn if level.per_prompt else drawn * len(evaluated_on)))
    by_name: dict[str, Method] = {name: name for name in METHODS}
    known = by_name.get(method)
    if known is None:
        raise UnknownNameError("ranking", method, (*METHODS, "random"))
    if level.per_prompt:
        found = level.scores(known, evaluated_on)
    else:
        mean = torch.cat(level.scores(known, ranked_on)).mean(0, keepdim=True)
        found = [mean] * len(evaluated_on)
    for scores, rows in zip(found, evaluated_on, strict=True):
        if not bool(scores.isfinite().all()):
            bad = int((~scores.isfinite()).nonzero()[0, 1])
            raise NonFiniteError(f"the score of {level.names(rows)[bad]} by {method}")
    return Scores(method, tuple(found))


def drop_weak(
    level: Level, batches: Sequence[TaskBatch], *, metric: Metric = "logit_difference", min_effect: float = MIN_EFFECT
) -> tuple[list[TaskBatch], list[int]]:
    """The prompts whose |M(all) − M(none)| reaches `min_effect`, and the items of the others."""
    kept: list[TaskBatch] = []
    dropped: list[int] = []
    for rows in batches:
        ends = level.evaluate(_ends(level.count(rows)), rows)[..., METRICS.index(metric)]
        strong = (ends[1] - ends[0]).abs() >= min_effect
        dropped += [item for item, good in zip(rows.items, strong.tolist(), strict=True) if not good]
        if bool(strong.any()):
            kept.append(select_rows(rows, strong.nonzero()[:, 0].tolist()))
    return kept, dropped


def trace_curve(
    level: Level,
    scores: Scores,
    policy: Policy,
    batches: Sequence[TaskBatch],
    templates: Mapping[int, str],
    *,
    metric: Metric = "logit_difference",
    threshold: float = THRESHOLD,
    refine: bool = True,
) -> Curve:
    """The curve of a ranking on the prompts of `batches`; `templates` maps items to the templates they were made from.

    refine: search the crossings between the counts of the grid; without it the grid alone is evaluated.
    Raises `UnknownNameError` for a metric that does not exist, `ClearheadError` without prompts and where the whole
    model is no better than the empty circuit.
    """
    if metric not in METRICS:
        raise UnknownNameError("metric", metric, METRICS)
    if not batches:
        raise ClearheadError("no prompts are left to evaluate circuits on: give more, or lower the smallest effect")
    orders = [key.argsort(dim=1, descending=True, stable=True) for key in scores.keys(policy)]
    n = max(level.count(rows) for rows in batches)
    measured: dict[int, Tensor] = {}
    _measure(level, orders, batches, _grid(n), measured)
    column = METRICS.index(metric)

    def curve() -> tuple[list[int], Tensor]:
        counts = sorted(measured)
        values = torch.stack([measured[count][:, column] for count in counts])
        return counts, statistics.faithfulness(values, values[0], values[-1])

    while refine and (missing := _missing(*curve(), threshold)):
        _measure(level, orders, batches, missing, measured)
    counts, f = curve()
    stable = statistics.stable_crossing(counts, f, threshold)
    values = torch.stack([measured[count] for count in counts])
    return Curve(
        method=scores.method,
        policy=policy,
        metric=metric,
        threshold=threshold,
        counts=tuple(counts),
        items=tuple(item for rows in batches for item in rows.items),
        templates=tuple(templates[item] for rows in batches for item in rows.items),
        values=values,
        first=statistics.first_crossing(counts, f, threshold),
        stable=stable,
        tied=max(_tied(key, order, stable or n) for key, order in zip(scores.keys(policy), orders, strict=True)),
        complement=None if stable is None else _complement(level, orders, batches, stable, values[..., column], column),
        circuit=() if level.per_prompt or stable is None else _named(level, batches[0], orders[0][0, :stable]),
    )


def _grid(n: int) -> list[int]:
    """0 to n, geometric, with the counts of MIB's shares."""
    counts = {*_GRID, *statistics.mib_counts(n), n}
    count = _GRID[-1]
    while count < n:
        count = int(count * _GROWTH)
        counts.add(count)
    return sorted(count for count in counts if count <= n)


def _missing(counts: list[int], f: Tensor, threshold: float) -> list[int]:
    """Counts to evaluate next: those between the last below the threshold and the first above, for both crossings."""
    above = (f >= threshold).tolist()
    pairs = []
    if True in above and above.index(True) > 0:
        pairs.append(above.index(True))
    if above[-1] and False in above:
        pairs.append(len(above) - above[::-1].index(False))
    missing: set[int] = set()
    for right in pairs:
        low, high = counts[right - 1], counts[right]
        step = max(1, (high - low) // STEP_POINTS)
        missing.update(range(low + step, high, step))
    return sorted(missing)


def _measure(
    level: Level, orders: Sequence[Tensor], batches: Sequence[TaskBatch], counts: Sequence[int], into: dict[int, Tensor]
) -> None:
    """Adds the metrics [p, m] of the circuits of these sizes."""
    found = []
    for order, rows in zip(orders, batches, strict=True):
        keep = torch.stack([_first(order, count) for count in counts])
        found.append(level.evaluate(keep, rows))
    for index, count in enumerate(counts):
        into[count] = torch.cat([part[index] for part in found])


def _first(order: Int64[Tensor, "_ n"], count: int) -> Bool[Tensor, "_ n"]:
    keep = torch.zeros(order.shape, dtype=torch.bool)
    return keep.scatter_(1, order[:, :count], True)  # noqa: FBT003


def _ends(n: int) -> Bool[Tensor, "2 1 n"]:
    """The empty circuit and the whole model."""
    return torch.stack([torch.zeros(1, n, dtype=torch.bool), torch.ones(1, n, dtype=torch.bool)])


def _complement(
    level: Level,
    orders: Sequence[Tensor],
    batches: Sequence[TaskBatch],
    count: int,
    ends: Float64[Tensor, "k p"],
    m: int,
) -> float:
    """F of all but the circuit, by metric number m; `ends` are its values from the empty circuit to the model."""
    found = [level.evaluate(~_first(order, count)[None], rows)[0] for order, rows in zip(orders, batches, strict=True)]
    return float(statistics.faithfulness(torch.cat(found)[:, m], ends[0], ends[-1]))


def _tied(key: Float64[Tensor, "_ n"], order: Int64[Tensor, "_ n"], count: int) -> int:
    """How many components have the score of the last one kept; the largest number over prompts."""
    if count == 0:
        return 1
    cut = key.gather(1, order[:, min(count, key.shape[1]) - 1 :][:, :1])
    return int((key == cut).sum(1).max())


def _named(level: Level, rows: TaskBatch, chosen: Int64[Tensor, " k"]) -> tuple[str, ...]:
    names = level.names(rows)
    return tuple(str(names[index]) for index in chosen.tolist())
