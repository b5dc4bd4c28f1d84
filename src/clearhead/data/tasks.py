"""A task: prompts whose answer shows whether a model has a behaviour, and what the model makes of them.

    behaviour = task("ioi", model, n=128, seed=0)
    measure(model, behaviour).accuracy

The measure of one prompt is the logit difference at its last token,

    mean logit of the answers - mean logit of the wrong answers,

and a prompt is right where the best answer's logit exceeds every wrong one's. An item that a tokenizer cannot take
(an answer of several tokens, clean and corrupt of different lengths, labels of another tokenizer) is in `refused` with
its reason and in no average; rows of a file that make no item are counted in `left_out`. Prompts of different lengths
are never padded: `batches` groups them by length, so no mask is needed, and a label means the same index in every row.

The generators are in modules of their own (`TASKS`); the file format is in task_item.py, those of other projects are in
task_import.py, and what one wants to know before trusting a task is in task_description.py.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from clearhead.config.task import is_file
from clearhead.data.generators import (
    agreement,
    antonym,
    capitals,
    copy_tokens,
    docstring,
    greater_than,
    ioi,
    pronoun,
    sums,
    told_key,
)
from clearhead.data.task_import import read_task
from clearhead.data.task_item import TaskItem, write_items
from clearhead.data.task_tokens import TokenIds, tokenised
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from clearhead.model.access import Model

__all__ = ["Measurement", "Task", "TaskBatch", "TaskItem", "logit_difference", "measure", "task"]

TASKS = {
    "ioi": ioi.generate,
    "greater_than": greater_than.generate,
    "copy": copy_tokens.generate,
    "pronoun": pronoun.generate,
    "docstring": docstring.generate,
    "capitals": capitals.generate,
    "agreement": agreement.generate,
    "antonym": antonym.generate,
    "passkey": told_key.generate,
    "addition": sums.generate,
}
"""Name -> generator of (model, n, seed, corrupt), where corrupt is None for the generator's default."""


class TaskBatch(NamedTuple):
    """Items of equal length as rows."""

    items: list[int]
    """Index of each row's item in the task."""
    clean: Int64[Tensor, "b t"]
    corrupt: Int64[Tensor, "b t"]
    answers: list[list[int]]
    """Token ids of each row's answers."""
    wrong_answers: list[list[int]]
    labels: dict[str, Int64[Tensor, " b"]]
    """Position of each row, for the names that all rows have."""


@dataclass(frozen=True)
class Task:
    """Items, and what they are in the tokens of one model."""

    name: str
    items: tuple[TaskItem, ...]
    tokens: Mapping[int, TokenIds]
    """Index of an item -> its token ids, for the items that the tokenizer can take."""
    refused: Mapping[int, str]
    """Index of an item -> why not, for the others."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Reason -> how many rows of the file that the task was read from make no item for it."""

    @classmethod
    def of_items(
        cls, name: str, model: Model, items: tuple[TaskItem, ...], left_out: Mapping[str, int] | None = None
    ) -> Self:
        """The task in the model's tokens. Raises `ClearheadError` where not one item can be taken."""
        left_out = {} if left_out is None else left_out
        tokens: dict[int, TokenIds] = {}
        refused: dict[int, str] = {}
        for index, item in enumerate(items):
            found = tokenised(model, item)
            if isinstance(found, str):
                refused[index] = found
            else:
                tokens[index] = found
        if not tokens:
            raise ClearheadError(
                f"no item of the task {name!r} can be used with {model.name}: "
                f"{_count(refused, left_out)}. Generate the task with this model's tokenizer"
            )
        return cls(name, items, tokens, refused, left_out)

    @classmethod
    def load(cls, path: str | Path, model: Model, *, corrupt: str | None = None) -> Self:
        """The task of a file of ours or of another project (see task_import.py), named after the file.

        corrupt: the column of the corrupt prompts, where the format has several.
        Raises what `read_task` raises.
        """
        path = Path(path)
        found = read_task(path, model, corrupt)
        return cls.of_items(path.stem, model, found.items, found.left_out)

    def save(self, path: str | Path) -> None:
        """Writes all items, refused ones included, as JSONL."""
        write_items(Path(path), self.items)

    def __len__(self) -> int:
        """Items that can be used."""
        return len(self.tokens)

    def batches(self, size: int = 32) -> Iterator[TaskBatch]:
        """The usable items in batches of at most `size` rows of equal length, short ones first, else in order."""
        lengths: dict[int, list[int]] = {}
        for index, ids in self.tokens.items():
            lengths.setdefault(len(ids.clean), []).append(index)
        for length in sorted(lengths):
            group = lengths[length]
            for start in range(0, len(group), size):
                yield self._batch(group[start : start + size])

    def _batch(self, indices: list[int]) -> TaskBatch:
        rows = [self.tokens[index] for index in indices]
        labels = [self.items[index].labels for index in indices]
        shared = [name for name in labels[0] if all(name in row for row in labels)]
        return TaskBatch(
            items=indices,
            clean=torch.tensor([row.clean for row in rows]),
            corrupt=torch.tensor([row.corrupt for row in rows]),
            answers=[row.answers for row in rows],
            wrong_answers=[row.wrong_answers for row in rows],
            labels={name: torch.tensor([row[name] for row in labels]) for name in shared},
        )


def task(name: str, model: Model, n: int, seed: int = 0, *, corrupt: str | None = None) -> Task:
    """`n` prompts of a built-in task in the tokens of `model`, the same for the same seed, tokenizer and n or more.

    corrupt: which of the task's corruptions (`CORRUPTIONS` of its module), None for the first of its own; ioi has
        "resample" and "s2_flip", copy "last" and "earlier", docstring "arguments", "definition" and "docstring",
        agreement "subject" and "both", every other one.
    Raises `UnknownNameError` for a task or a corruption that does not exist, `ClearheadError` for n < 1 and where
    the tokenizer splits the words that the task is made of.
    """
    if name not in TASKS:
        raise UnknownNameError("task", name, TASKS)
    if n < 1:
        raise ClearheadError(f"n: expected at least 1 prompt, got {n}")
    return Task.of_items(name, model, TASKS[name](model, n, seed, corrupt))


def open_task(name_or_file: str, model: Model, n: int = 128, seed: int = 0, *, corrupt: str | None = None) -> Task:
    """A built-in task, or that of a file: what every `--task` option takes. `n` and `seed` are for built-in ones.

    Raises what `task` and `Task.load` raise.
    """
    if name_or_file in TASKS or not is_file(name_or_file):
        return task(name_or_file, model, n, seed, corrupt=corrupt)
    return Task.load(name_or_file, model, corrupt=corrupt)


@dataclass(frozen=True)
class Measurement:
    """What a model makes of the clean prompts of a task; one entry per usable item, in the order of `items`."""

    items: tuple[int, ...]
    difference: Float32[Tensor, " n"]
    """Logit difference."""
    right: Bool[Tensor, " n"]
    """Whether the best answer's logit exceeds every wrong answer's."""
    first: Bool[Tensor, " n"]
    """Whether an answer has the largest logit of the whole vocabulary."""
    refused: Mapping[str, int]
    """Reason -> how many items were not measured for it."""

    @property
    def mean_difference(self) -> float:
        """Mean logit difference over all measured prompts, right and wrong."""
        return float(self.difference.double().mean())

    @property
    def accuracy(self) -> float:
        """Share of measured prompts that are right."""
        return float(self.right.double().mean())

    @property
    def top1(self) -> float:
        """Share of measured prompts whose most likely next token is an answer."""
        return float(self.first.double().mean())

    @property
    def wrong(self) -> list[int]:
        """The items that the model gets wrong."""
        return [item for item, right in zip(self.items, self.right.tolist(), strict=True) if not right]


def measure(
    model: Model, behaviour: Task, *, prompts: Literal["clean", "corrupt"] = "clean", batch: int = 32
) -> Measurement:
    """Logit difference, accuracy and top-1 of each clean prompt, or of each corrupt one with the clean one's answers.

    Raises `NonFiniteError` for logits that are not.
    """
    found: dict[int, tuple[float, bool, bool]] = {}
    for rows in behaviour.batches(batch):
        logits = model.run(rows.clean if prompts == "clean" else rows.corrupt, read=["logits"]).logits[:, -1].float()
        if not bool(logits.isfinite().all()):
            raise NonFiniteError(f"logits of {model.name} on the task {behaviour.name!r}, items {rows.items}")
        differences = logit_difference(logits, rows)
        for row, item in enumerate(rows.items):
            best = logits[row, rows.answers[row]].max()
            right = best > logits[row, rows.wrong_answers[row]].max()
            found[item] = (float(differences[row]), bool(right), bool(best == logits[row].max()))
    items = tuple(sorted(found))
    difference, right, first = zip(*(found[item] for item in items), strict=True)
    return Measurement(
        items,
        torch.tensor(difference),
        torch.tensor(right),
        torch.tensor(first),
        Counter(behaviour.refused.values()) + Counter(behaviour.left_out),
    )


def logit_difference(logits: Float[Tensor, "b v"], rows: TaskBatch) -> Float[Tensor, " b"]:
    """Mean logit of the answers minus that of the wrong answers, from the logits at the last token; differentiable."""
    return torch.stack(
        [
            row[answers].mean() - row[wrong].mean()
            for row, answers, wrong in zip(logits, rows.answers, rows.wrong_answers, strict=True)
        ]
    )


def _count(refused: Mapping[int, str], left_out: Mapping[str, int]) -> str:
    counted = Counter(refused.values()) + Counter(left_out)
    return ", ".join(f"{number} × {reason}" for reason, number in counted.most_common())
