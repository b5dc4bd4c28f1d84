"""Greater-than: a span of years is begun, and only a year after its first one can end it.

    The siege lasted from the year 1632 to the year 16  ->  "33" ... "99", not "00" ... "32"

How the answer is asked depends on how the tokenizer cuts years; nothing else differs:

    two digits   the year is century and YY (GPT-2): the answers are all YY that are greater, the wrong ones all others
    one digit    each digit is a token (SmolLM2): the answers are all greater tens digits, the wrong ones all smaller.
                 The equal digit may begin a right or a wrong year and is in neither; the tens are 1 to 8

A year that the tokenizer cuts otherwise (" 1600" is one token of GPT-2) is not asked for, is in neither list and begins
no span; a century where more than a tenth of the years are so is left out. The corrupt prompt begins in the year 01 of
the same century, so that every end but 00 and 01 is right. Labels: noun, century (the last token of the first one), YY
(the first token of the two digits), end (the last token).

Task as in Hanna et al. 2023 (2305.00586), whose measure is P(greater) - P(not greater); here it is that of every task,
the difference of mean logits. The nouns are our own.
"""

from typing import NamedTuple

import numpy as np

from clearhead.data.task_item import TaskItem
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

SENTENCE = "The {noun} lasted from the year {century}{start} to the year {century}"
NOUNS = (
    "war siege strike drought famine expedition campaign voyage reign study project trial conflict alliance plague "
    "epidemic festival journey tour mission quest search battle revolt rebellion treaty occupation exile partnership "
    "marriage lease ban boycott blockade experiment construction restoration course program"
)
CENTURIES = range(11, 19)
CORRUPTIONS = ("year_01",)
FIRST_YEAR = "01"
FEWEST_YEARS = 90  # of the hundred of a century
NOUN_DRAW, START_DRAW, UNITS_DRAW = range(3)


class Start(NamedTuple):
    """What a span may begin with, and the continuations that end it rightly and wrongly."""

    century: int
    digits: str
    """YY, or the tens digit where digits are tokens."""
    greater: tuple[str, ...]
    others: tuple[str, ...]


def generate(model: Model, n: int, seed: int, corrupt: str | None = None) -> tuple[TaskItem, ...]:
    """`n` items; item i depends on nothing but i, the seed and the tokenizer.

    Raises `UnknownNameError` for a corruption other than "year_01", `ClearheadError` where the tokenizer cuts years
    neither in two and two digits nor in single ones.
    """
    if corrupt is not None and corrupt not in CORRUPTIONS:
        raise UnknownNameError("corruption of greater_than", corrupt, CORRUPTIONS)
    starts = [start for century in CENTURIES for start in _starts(model, century)]
    if not starts:
        raise ClearheadError(
            f"greater_than: the tokenizer of {model.name} cuts years neither into century and year (17|32) nor into"
            " single digits; take a model that does, such as smollm2"
        )
    return tuple(_item(model, starts, index, seed) for index in range(n))


def _starts(model: Model, century: int) -> list[Start]:
    """The spans that may begin in a century: by two digits, else by one, else none."""
    ends = endings(model, SENTENCE.format(noun="war", century=century, start=FIRST_YEAR))
    begin = ends[1:-1] if len(ends) == 10 else [year for year in ends[:-1] if year > FIRST_YEAR]
    return [Start(century, digits, *split_at(ends, digits)) for digits in begin]


def endings(model: Model, prompt: str) -> list[str]:
    """What can end a prompt that ends in a century: years of two digits, else the ten digits, else nothing."""
    years = continuations(model, prompt, [f"{year:02}" for year in range(100)])
    if len(years) >= FEWEST_YEARS and FIRST_YEAR in years:
        return years
    digits = [str(digit) for digit in range(10)]
    if all(continuations(model, text, digits) == digits for text in (prompt, *(prompt + ten for ten in digits))):
        return digits
    return []


def split_at(ends: list[str], start: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The endings that are right and those that are wrong for a span from the year `start` (YY, or its tens digit)."""
    if ends and len(ends[0]) == 1:
        return tuple(ends[int(start[0]) + 1 :]), tuple(ends[: int(start[0])])
    return tuple(year for year in ends if year > start), tuple(year for year in ends if year <= start)


def continuations(model: Model, prompt: str, texts: list[str]) -> list[str]:
    """Those of the texts that are one token behind the prompt and leave its own tokens as they are."""
    ids = model.tokenize(prompt)[0].tolist()
    return [text for text in texts if model.tokenize(prompt + text)[0].tolist()[:-1] == ids]


def _item(model: Model, starts: list[Start], index: int, seed: int) -> TaskItem:
    nouns = NOUNS.split()
    noun = nouns[_draw(seed, index, NOUN_DRAW, len(nouns))]
    start = starts[_draw(seed, index, START_DRAW, len(starts))]
    one_digit = len(start.digits) == 1
    year = start.digits + str(_draw(seed, index, UNITS_DRAW, 10)) if one_digit else start.digits
    clean = SENTENCE.format(noun=noun, century=start.century, start=year)
    ids = model.tokenize(clean)[0]
    to_noun = f"The {noun}"
    to_century = SENTENCE[: SENTENCE.index("{start}")].format(noun=noun, century=start.century)
    century = _last(model, to_century)
    labels = {"noun": _last(model, to_noun), "century": century, "YY": century + 1, "end": len(ids) - 1}
    return TaskItem(
        clean=clean,
        corrupt=SENTENCE.format(noun=noun, century=start.century, start=FIRST_YEAR),
        answers=start.greater,
        wrong_answers=start.others,
        template=f"greater_than {'one digit' if one_digit else 'two digits'}",
        labels=labels,
        label_tokens=dict(zip(labels, model.token_strings(ids[list(labels.values())]), strict=True)),
    )


def _last(model: Model, head: str) -> int:
    """The index of the last token of the beginning of a prompt."""
    return model.tokenize(head).shape[1] - 1


def _draw(seed: int, index: int, purpose: int, n: int) -> int:
    return int(mix(seed, index, purpose)[0] % np.uint64(n))
