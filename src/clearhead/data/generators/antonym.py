"""Antonym: the opposite of a word.

    The opposite of "large" is "  ->  "small"

The corrupt prompt asks for the opposite of another word with equally many tokens (corruption "word"); its opposite is
the wrong answer. Pairs are taken in both directions, and only pairs whose opposite is one word that most people would
say. Labels: word (its last token), end.

Sentences and list are our own.
"""

from clearhead.data import templates
from clearhead.data.task_item import TaskItem
from clearhead.data.templates import Lot
from clearhead.model.access import Model

TEMPLATES = (
    'The opposite of "{word}" is "',
    "The opposite of {word} is",
    'The antonym of "{word}" is "',
    "hot -> cold, up -> down, {word} ->",
    "Not every one of them is {word}; some are quite the opposite, they are",
    'In the dictionary, the word "{word}" is listed as the opposite of "',
)
PAIRS = (
    "large small, big little, tall short, fast slow, early late, old young, rich poor, strong weak, light dark, "
    "hard soft, high low, wide narrow, deep shallow, thick thin, clean dirty, wet dry, "
    "full empty, open closed, good bad, happy sad, loud quiet, left right, first last, true false, "
    "easy difficult, cheap expensive, near far, safe dangerous, public private, positive negative, "
    "inside outside, front back, north south, east west, day night, summer winter, love hate, war peace, "
    "win lose, buy sell, push pull, begin end, life death, success failure, increase decrease, modern ancient, "
    "male female, present absent, possible impossible, legal illegal, always never, before after, above below"
)
CORRUPTIONS = ("word",)
PAIR_DRAW, SIDE_DRAW = range(2)


def generate(model: Model, n: int, seed: int, corrupt: str | None = None) -> tuple[TaskItem, ...]:
    """`n` items. Raises `UnknownNameError` for another corruption, `ClearheadError` where the tokenizer takes none."""
    templates.chosen("antonym", corrupt, CORRUPTIONS)
    pairs = [pair.split() for pair in PAIRS.split(", ")]

    def make(lot: Lot) -> TaskItem:
        template = lot.turn(TEMPLATES)
        one, another, *_ = lot.shuffled(PAIR_DRAW, pairs)
        side = lot.one_of(SIDE_DRAW, (0, 1))
        lead = "" if template.endswith('"') else " "
        return templates.fill(
            model,
            template,
            {"word": one[side]},
            {"word": another[side]},
            name=f"antonym {TEMPLATES.index(template)}",
            answers=[lead + one[1 - side]],
            wrong_answers=[lead + another[1 - side]],
            labels=["word"],
        )

    return templates.generate("antonym", model, n, seed, make)
