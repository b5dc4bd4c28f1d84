"""One item of a task: a clean and a corrupt prompt, the answers that tell them apart, and named token positions.

A line of the task file (JSONL), and nothing else is in it:

    {"clean": "When Ann and Tom met, Tom gave a ring to", "corrupt": "...", "answers": [" Ann"],
     "wrong_answers": [" Tom"], "template": "ioi 3 ABBA", "labels": {"IO": 1, "end": 11},
     "label_tokens": {"IO": " Ann", "end": " to"}}

Answers are text as it continues the prompt, its leading space included. A label is an index into the tokens of the
clean prompt as `Model.tokenize` gives them, special tokens counted. `label_tokens`, which may be left out, are the
strings of the tokens there: with another tokenizer the indices mean other places, and the strings show it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from clearhead.errors import CorruptFileError
from clearhead.runs import written_aside


@dataclass(frozen=True)
class TaskItem:
    """A pair of prompts that differ in what decides the answer."""

    clean: str
    corrupt: str
    answers: tuple[str, ...]
    """Right continuations of the clean prompt, each a single token."""
    wrong_answers: tuple[str, ...]
    """The continuations that the right ones are measured against."""
    template: str
    """What the prompt was made from; intervals over templates group by it."""
    labels: Mapping[str, int]
    """Name of a position -> index into the tokens of the clean prompt."""
    label_tokens: Mapping[str, str] = field(default_factory=dict)
    """Name of a position -> the string of the token there; empty where nobody recorded it."""


KEYS = tuple(f.name for f in fields(TaskItem))
OPTIONAL = ("label_tokens",)


def write_items(path: Path, items: tuple[TaskItem, ...]) -> None:
    """Writes one line per item, whole or not at all."""
    lines = [json.dumps(asdict(item), ensure_ascii=False) for item in items]
    with written_aside(path) as aside:
        aside.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def item_of(value: Mapping[str, Any], where: str) -> TaskItem:
    """The item that a line of the file holds.

    Raises `CorruptFileError` naming `where` and the key where it is none.
    """
    value = dict(value)
    missing = [key for key in KEYS if key not in value and key not in OPTIONAL]
    unknown = [key for key in value if key not in KEYS]
    if missing or unknown:
        lacks = f"lacks {', '.join(missing)}" if missing else f"has the unknown key {unknown[0]!r}"
        raise CorruptFileError(f"{where}: {lacks}; an item has {', '.join(KEYS)}")
    for key in ("clean", "corrupt", "template"):
        _expect(isinstance(value[key], str), where, key, "text", value[key])
    for key in ("answers", "wrong_answers"):
        good = (
            isinstance(value[key], list) and value[key] and all(isinstance(text, str) and text for text in value[key])
        )
        _expect(bool(good), where, key, "a list of at least one text", value[key])
        value[key] = tuple(value[key])
    labels = value["labels"]
    good = isinstance(labels, dict) and all(type(index) is int and index >= 0 for index in labels.values())
    _expect(good, where, "labels", "an object of token indices from 0", labels)
    strings = value.get("label_tokens", {})
    good = isinstance(strings, dict) and all(key in labels and isinstance(strings[key], str) for key in strings)
    _expect(good, where, "label_tokens", "an object of texts under names of labels", strings)
    return TaskItem(**value)


def _expect(good: bool, where: str, key: str, expected: str, given: Any) -> None:
    if not good:
        raise CorruptFileError(f"{where}: {key}: expected {expected}, got {json.dumps(given, ensure_ascii=False)}")
