"""What one wants to know of a task before trusting a number made with it.

    describe_task(model, behaviour).to_dict()

How many prompts there are, how many differ, how many were refused and why, whether the model can do them, and what the
corrupt prompts leave of it: a curve of how much of a behaviour is explained divides by (clean - corrupt), so a task
with a small gap, or one that the model gets wrong, explains nothing. By template, because templates differ more than
prompts of one template.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.data.task_item import TaskItem
from clearhead.data.tasks import Measurement, Task, measure
from clearhead.model.access import Model


@dataclass(frozen=True)
class TemplateResult:
    """What a model makes of the prompts of one template."""

    prompts: int
    accuracy: float
    mean_difference: float
    """Logit difference of the clean prompts."""
    mean_corrupt_difference: float
    """The same answers' logit difference on the corrupt prompts."""


@dataclass(frozen=True)
class TaskDescription:
    """A task and a model's result on it."""

    task: str
    model: str
    clean: Measurement
    corrupt: Measurement
    distinct: int
    """Different clean prompts among those measured."""
    lengths: tuple[int, int]
    """Fewest and most tokens of a prompt."""
    labels: tuple[str, ...]
    """The positions that every prompt names."""
    by_template: Mapping[str, TemplateResult]
    example: TaskItem
    """The first prompt measured."""
    wrong: Mapping[int, TaskItem]
    """Index -> the items whose best wrong answer has at least the logit of the best answer."""

    def to_dict(self) -> dict[str, Any]:
        """The numbers as JSON values."""
        return {
            "task": self.task,
            "model": self.model,
            "prompts": len(self.clean.items),
            "distinct": self.distinct,
            "refused": sum(self.clean.refused.values()),
            "refused_by_reason": dict(self.clean.refused),
            "templates": len(self.by_template),
            "tokens": list(self.lengths),
            "labels": list(self.labels),
            "accuracy": self.clean.accuracy,
            "top1": self.clean.top1,
            "mean_difference": self.clean.mean_difference,
            "mean_corrupt_difference": self.corrupt.mean_difference,
            "wrong_items": list(self.wrong),
        }


def describe_task(model: Model, behaviour: Task, *, batch: int = 32) -> TaskDescription:
    """Measures clean and corrupt prompts. Raises what `measure` raises."""
    clean = measure(model, behaviour, batch=batch)
    corrupt = measure(model, behaviour, prompts="corrupt", batch=batch)
    items = [behaviour.items[index] for index in clean.items]
    lengths = [len(behaviour.tokens[index].clean) for index in clean.items]
    return TaskDescription(
        task=behaviour.name,
        model=model.name,
        clean=clean,
        corrupt=corrupt,
        distinct=len({item.clean for item in items}),
        lengths=(min(lengths), max(lengths)),
        labels=tuple(name for name in items[0].labels if all(name in item.labels for item in items)),
        by_template=_by_template(items, clean, corrupt),
        example=items[0],
        wrong={index: behaviour.items[index] for index in clean.wrong},
    )


def _by_template(items: list[TaskItem], clean: Measurement, corrupt: Measurement) -> dict[str, TemplateResult]:
    names = np.array([item.template for item in items])
    right, difference, changed = (
        values.double().numpy() for values in (clean.right, clean.difference, corrupt.difference)
    )
    return {
        name: TemplateResult(
            count,
            float(right[names == name].mean()),
            float(difference[names == name].mean()),
            float(changed[names == name].mean()),
        )
        for name, count in sorted(Counter(names.tolist()).items())
    }
