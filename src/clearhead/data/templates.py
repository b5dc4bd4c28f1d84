"""Prompts from templates: slots filled twice, clean and corrupt, and where the words of a slot end in the tokens.

    TEMPLATE = "The capital of {country} is the city of"
    generate("capitals", model, n, make)     items 0 .. n-1, item i = the first of make(Lot(seed, i, 0)),
                                             make(Lot(seed, i, 1)), ... that the tokenizer takes (task_tokens.py)

so that every generator says only what it draws: words that the tokenizer splits, and pairs of words of different
lengths, are drawn again. A tokenizer that takes none of `TRIES` draws is refused, with the reason and an example of
what it splits. An item depends on nothing but its index, the seed and the tokenizer.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from clearhead.data.task_item import TaskItem
from clearhead.data.task_tokens import token_ids, tokenised
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

T = TypeVar("T")
TRIES = 200
"""Draws of one item before the tokenizer is refused."""


@dataclass(frozen=True)
class Lot:
    """What decides the draws of one item."""

    seed: int
    index: int
    attempt: int

    def one_of(self, purpose: int, options: Sequence[T]) -> T:
        """One of the options."""
        return options[int(mix(self.seed, self.index, self.attempt, purpose)[0] % np.uint64(len(options)))]

    def shuffled(self, purpose: int, options: Sequence[T]) -> list[T]:
        """All options in some order."""
        keys = mix(self.seed, self.index, self.attempt, purpose, np.arange(len(options)))
        return [options[place] for place in np.argsort(keys)]

    def turn(self, options: Sequence[T]) -> T:
        """The option whose turn it is: item i has number i, so that all occur equally often."""
        return options[self.index % len(options)]


def generate(task: str, model: Model, n: int, seed: int, make: Callable[[Lot], TaskItem]) -> tuple[TaskItem, ...]:
    """`n` items that the tokenizer takes. Raises `ClearheadError` where `TRIES` draws of one give none."""
    return tuple(_first(task, model, seed, index, make) for index in range(n))


def _first(task: str, model: Model, seed: int, index: int, make: Callable[[Lot], TaskItem]) -> TaskItem:
    reasons: Counter[str] = Counter()
    example = make(Lot(seed, index, 0))
    for attempt in range(TRIES):
        item = make(Lot(seed, index, attempt))
        found = tokenised(model, item)
        if not isinstance(found, str):
            return item
        reasons[found] += 1
        if found in ("an answer of several tokens", "a wrong answer of several tokens"):
            example = item
    counted = ", ".join(f"{number} × {reason}" for reason, number in reasons.most_common())
    raise ClearheadError(
        f"{task}: the tokenizer of {model.name} takes none of {TRIES} prompts like {example.clean!r}: {counted}"
        f"{_split(model, example)}. Take a model with a larger vocabulary, such as smollm2"
    )


def _split(model: Model, item: TaskItem) -> str:
    """The first answer that is several tokens, as its tokens; else prompts of different lengths; else nothing."""
    prompt = token_ids(model, item.clean)
    for answer in (*item.answers, *item.wrong_answers):
        both = token_ids(model, item.clean + answer)
        if both[:-1] != prompt:
            return f"; it splits {answer!r} into {'|'.join(model.token_strings(both[len(prompt) :]))!r}"
    corrupt = len(token_ids(model, item.corrupt))
    return "" if corrupt == len(prompt) else f"; it has {len(prompt)} tokens and the corrupt one {corrupt}"


def fill(
    model: Model,
    template: str,
    clean: Mapping[str, str],
    corrupt: Mapping[str, str],
    *,
    name: str,
    answers: Sequence[str],
    wrong_answers: Sequence[str],
    labels: Sequence[str],
) -> TaskItem:
    """The item of a template; each label is a slot's name and means the last token of its words. `end` is added."""
    text = template.format(**clean)
    ids = token_ids(model, text)
    places = {slot: end_of_slot(model, template, slot, clean, ids) for slot in labels}
    places["end"] = len(ids) - 1
    return TaskItem(
        clean=text,
        corrupt=template.format(**corrupt),
        answers=tuple(answers),
        wrong_answers=tuple(wrong_answers),
        template=name,
        labels=places,
        label_tokens=dict(zip(places, model.token_strings(ids[place] for place in places.values()), strict=True)),
    )


def end_of_slot(model: Model, template: str, slot: str, words: Mapping[str, str], whole: list[int]) -> int:
    """The index of the last token of a slot in `whole`, the tokens of the filled template.

    Raises `ClearheadError` where the text up to the slot's end is cut otherwise when the sentence goes on.
    """
    mark = f"{{{slot}}}"
    head = template[: template.index(mark) + len(mark)].format(**words)
    begin = token_ids(model, head)
    if whole[: len(begin)] != begin:
        raise ClearheadError(f"the tokenizer of {model.name} cuts {head!r} otherwise where the sentence goes on")
    return len(begin) - 1


def single_tokens(model: Model, words: Sequence[str], *, at_least: int, task: str) -> list[str]:
    """The words that are one token behind a space. Raises `ClearheadError` where they are too few."""
    prompt = token_ids(model, "The")
    ids = {word: token_ids(model, f"The {word}") for word in words}
    found = [word for word, both in ids.items() if both[:-1] == prompt]
    if len(found) < at_least:
        split = next(word for word in words if word not in found)
        pieces = "|".join(model.token_strings(ids[split][len(prompt) :]))
        raise ClearheadError(
            f"{task}: the tokenizer of {model.name} has {len(found)} of {len(words)} words as single tokens, "
            f"{at_least} are needed; it splits {f' {split}'!r} into {pieces!r}. Take a model with a larger "
            "vocabulary, such as smollm2"
        )
    return found


def chosen(task: str, corrupt: str | None, corruptions: Sequence[str]) -> str:
    """The corruption asked for, the first where none is. Raises `UnknownNameError` for one that does not exist."""
    if corrupt is None:
        return corruptions[0]
    if corrupt not in corruptions:
        raise UnknownNameError(f"corruption of {task}", corrupt, corruptions)
    return corrupt
