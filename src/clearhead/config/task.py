"""The verb that says what a model makes of a task, and which names of tasks are files."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tyro.conf import Positional

from clearhead.config.verb import Dtype, Verb

FILES = (".jsonl", ".json", ".csv", ".parquet")
"""Endings of task files."""


def is_file(task: str) -> bool:
    """Whether the name of a task is that of a file."""
    return Path(task).suffix in FILES


@dataclass(frozen=True, kw_only=True)
class DescribeTask(Verb):
    """Say what a model makes of a task: prompts refused, accuracy, logit difference, wrong answers."""

    verb: ClassVar[str] = "task"

    task: Positional[str]
    """A built-in task (ioi, copy, pronoun, ...), or a file: ours, AutoCircuit, EAP, Edge-Pruning or MIB."""
    model: str = "smollm2"
    """Model under study: a Hugging Face id, a local folder, or a bundled one (smollm2, clearhead-tiny)."""
    prompts: int = 64
    """Prompts of a built-in task."""
    corrupt: str | None = None
    """The corruption; of a file, the column of the corrupt prompts. Derived: the first of the task."""
    seed: int = 0
    """Seed of a built-in task."""
    dtype: Dtype = "float32"
    """Number format of the model's weights."""
    device: str = "auto"
    """Where to compute: a torch device (cpu, cuda, cuda:1, mps), or auto for an accelerator where there is one."""
    out: Path | None = None
    """A JSONL file to write the prompts to. Derived: none is written."""

    def validate(self) -> None:
        """There are prompts; what belongs to a built-in task is not given with a file; the output is JSONL."""
        self._positive("prompts")
        if is_file(self.task):
            self._meaningless(("prompts", "seed"), "all prompts of the file are measured")
        self._refuse(self.out is not None and self.out.suffix != ".jsonl", "out", "give a file that ends in .jsonl")
