"""A study of one behaviour: prompts split and checked, components ranked, curves and controls, for all models.

    items that all models get right  →  ranking half, evaluation half (each template in both)
    half of them weak (|M(all) − M(none)| < ε) on some model  →  dropped, counted
    per model: scores on the ranking half, one curve per sign policy on the evaluation half, random rankings

Models are compared on the same items, so that neither gets the easier prompts. A prompt that a model gets wrong has no
behaviour to explain and is counted, not averaged: kept in, it would make circuits of the right prompts look larger.

Not here: what is printed and saved (commands/circuit_curve.py).
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clearhead.circuits.curves.curve import Curve, Scores, drop_weak, score, trace_curve
from clearhead.circuits.curves.level import Level
from clearhead.circuits.curves.protocol import Policy, Protocol
from clearhead.circuits.curves.statistics import overlap
from clearhead.circuits.patching.metrics import Metric
from clearhead.data.tasks import Task, TaskBatch, measure
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.runs import progress

Opener = Callable[[Model, Sequence[TaskBatch]], Level]
"""Makes the level of a model; the prompts are the reference of its ablation."""


class Split(NamedTuple):
    """Items of a task by what they are used for."""

    ranked: list[int]
    evaluated: list[int]
    wrong: list[int]
    accuracy: list[float]
    """Of each model, over the items that it can take."""


@dataclass(frozen=True)
class Settings:
    """What is measured and how."""

    rank: str
    policies: tuple[Policy, ...]
    """The first is the headline."""
    ablation: str
    metric: Metric
    threshold: float
    min_effect: float
    controls: int
    seed: int


@dataclass(frozen=True, eq=False)
class Studied:
    """What was found on one model."""

    protocol: Protocol
    accuracy: float
    curves: tuple[Curve, ...]
    """One per policy, then the random rankings."""
    scores: Scores
    names: tuple[str, ...]
    """Unit ids in the order of the scores; of the first evaluated prompt where prompts have their own."""
    level: Level
    scored: tuple[TaskBatch, ...]
    """The prompts that components were ranked on."""
    evaluated: tuple[TaskBatch, ...]
    seconds: Mapping[str, float]
    """CPU time by what it was spent on."""

    def named_scores(self) -> dict[str, float]:
        """Unit → score; empty where prompts have their own components."""
        shared = all(scores.shape[0] == 1 for scores in self.scores.of_batches)
        return dict(zip(self.names, self.scores.of_batches[0][0].tolist(), strict=True)) if shared else {}


def split_items(models: Sequence[Model], tasks: Sequence[Task]) -> Split:
    """Halves of the items that every model can take and gets right; templates are spread over both.

    Items with the same clean prompt go into the same half: a generator may make one twice.

    Raises `ClearheadError` where fewer than two such items are left.
    """
    usable = set.intersection(*(set(task.tokens) for task in tasks))
    measured = [measure(model, task) for model, task in zip(models, tasks, strict=True)]
    wrong = {item for one in measured for item in one.wrong} & usable
    items = tasks[0].items
    right = sorted(usable - wrong, key=lambda item: (items[item].template, item))
    same: dict[tuple[int, ...], list[int]] = {}
    for item in right:
        same.setdefault(tuple(tasks[0].tokens[item].clean), []).append(item)
    accuracy = [one.accuracy for one in measured]
    if len(same) < 2:
        shares = ", ".join(f"{model.name} {share:.0%}" for model, share in zip(models, accuracy, strict=True))
        raise ClearheadError(
            f"{len(right)} of {len(usable)} prompts of the task {tasks[0].name!r} are answered right (accuracy:"
            f" {shares}), and at least 2 different ones are needed: use a task that the model does, or more prompts"
        )
    ranked, evaluated = (sorted(sum(list(same.values())[half::2], [])) for half in (0, 1))
    return Split(ranked, evaluated, sorted(wrong), accuracy)


def study(models: Sequence[Model], tasks: Sequence[Task], open_level: Opener, settings: Settings) -> list[Studied]:
    """One result per model, all on the same items. Raises what the steps raise."""
    split = split_items(models, tasks)
    levels, dropped = [], set()
    for model, task in zip(models, tasks, strict=True):
        level = open_level(model, _batches(task, split.ranked))
        for half in (split.ranked, split.evaluated):
            weak = drop_weak(level, _batches(task, half), metric=settings.metric, min_effect=settings.min_effect)[1]
            dropped |= set(weak)
        levels.append(level)
    ranked, evaluated = ([item for item in half if item not in dropped] for half in (split.ranked, split.evaluated))
    if not ranked or not evaluated:
        raise ClearheadError(
            f"components change the {settings.metric} by less than {settings.min_effect} on {len(dropped)} of"
            f" {len(split.ranked) + len(split.evaluated)} prompts, which leaves none: use a corrupt prompt that"
            " matters, more prompts, or a smaller --min-effect"
        )
    used = split._replace(ranked=ranked, evaluated=evaluated)
    return [
        _study_one(model, task, level, used, sorted(dropped), accuracy, settings)
        for model, task, level, accuracy in zip(models, tasks, levels, split.accuracy, strict=True)
    ]


def _study_one(
    model: Model, task: Task, level: Level, split: Split, dropped: list[int], accuracy: float, settings: Settings
) -> Studied:
    templates = {item: task.items[item].template for item in split.evaluated}
    ranked, evaluated = _batches(task, split.ranked), _batches(task, split.evaluated)
    clock = time.process_time()
    scores = score(level, settings.rank, ranked, evaluated, seed=settings.seed)
    seconds = {"scores": time.process_time() - clock}

    def trace(scores: Scores, policy: Policy, *, refine: bool = True) -> Curve:
        return trace_curve(
            level,
            scores,
            policy,
            evaluated,
            templates,
            metric=settings.metric,
            threshold=settings.threshold,
            refine=refine,
        )

    curves = []
    with progress(f"curves of {model.name}", len(settings.policies) + settings.controls, "rankings") as advance:
        for policy in settings.policies:
            clock = time.process_time()
            curves.append(trace(scores, policy))
            seconds[f"curve, {policy}"] = time.process_time() - clock
            advance(1)
        clock = time.process_time()
        for control in range(settings.controls):
            drawn = score(level, "random", ranked, evaluated, seed=settings.seed + 1 + control)
            curves.append(trace(drawn, "signed", refine=False))
            advance(1)
        seconds["random rankings"] = time.process_time() - clock
    counts = sorted({level.count(rows) for rows in evaluated})
    protocol = Protocol(
        model=model.name,
        model_note=model.note,
        task=task.name,
        level=level.name,
        components=str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}",
        ablation=settings.ablation,
        reference=level.described,
        rank=settings.rank,
        policy=settings.policies[0],
        metric=settings.metric,
        threshold=settings.threshold,
        min_effect=settings.min_effect,
        ranked_on=tuple(split.evaluated if level.per_prompt else split.ranked),
        evaluated_on=tuple(split.evaluated),
        wrong=tuple(split.wrong),
        dropped=tuple(dropped),
        refused=dict(Counter(task.refused.values()) + Counter(task.left_out)),
        seed=settings.seed,
        notes=(*level.notes, "prompts that the model gets wrong are left out and counted"),
    )
    return Studied(
        protocol=protocol,
        accuracy=accuracy,
        curves=tuple(curves),
        scores=scores,
        names=tuple(level.names(evaluated[0])),
        level=level,
        scored=tuple(evaluated if level.per_prompt else ranked),
        evaluated=tuple(evaluated),
        seconds=seconds,
    )


def compare_circuits(a: Curve, b: Curve, counts: Sequence[int] = (5, 10, 20)) -> dict[str, float]:
    """Jaccard overlap of the first components of two circuits of one level, and of the circuits themselves."""
    found = {}
    if a.circuit and b.circuit:
        found["stable circuits"] = overlap(a.circuit, b.circuit)
        for count in counts:
            if count <= min(len(a.circuit), len(b.circuit)):
                found[f"first {count}"] = overlap(a.circuit[:count], b.circuit[:count])
    return found


def _batches(task: Task, items: Sequence[int]) -> list[TaskBatch]:
    return list(dataclasses.replace(task, tokens={item: task.tokens[item] for item in items}).batches())
