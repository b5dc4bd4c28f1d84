"""Rules: conditions on a token and on what stands before it in the text, found by counting.

A condition names an attribute of a token and the values it may have: the token itself, its word (case and spaces
aside), what kind of token it is, the word k places back, whether it has occurred before in the text, which word stands
anywhere before it, its place in the context. A rule holds where all of its conditions hold. It is fitted to maximise
what it is expected to reach in detection and in fuzzing together,

    J = recall / 2 + ((1 - f)^L + (1 - f)) / 4

recall: share of activating tokens at which it holds; f: share of inactive tokens at which it holds; L: tokens of a
text that is judged. (1 - f)^L is the chance that it holds nowhere in a silent text. Both a rule that always holds and
one that never does have J = 1/2. A value is allowed only if activating tokens in two blocks of text have it, so recall
says what to expect of an example that the rule was not made from. Not here: disjunctions of attributes, anything after
the token.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clearhead.explain.evidence import AFTER, BEFORE, Side, Text

LENGTH = BEFORE + AFTER + 1
BACK = 6
"""Places back that are looked at one by one."""
LONGEST = 12
"""Values that a condition may list."""
MOST = 3
"""Conditions of a rule."""
GAIN = 0.03
"""What a condition must add to J."""
YES = "yes"


class Attribute(NamedTuple):
    """Something a token is asked for: `token`, `word`, `kind`, `back`, `repeat`, `earlier` or `place`."""

    name: str
    back: int = 0
    """Places back (`back`); tokens that must have occurred before in this order (`repeat`)."""
    word: str = ""
    """The word that must stand before (`earlier`)."""

    def values(self, text: Text) -> list[str]:
        """The value at each token of `text`; empty where it has none."""
        tokens = text.tokens
        if self.name == "token":
            return list(tokens)
        if self.name == "kind":
            return [kind_of(token) for token in tokens]
        if self.name == "place":
            return [_band(text.start + place) for place in range(len(tokens))]
        if self.name == "repeat":
            return _repeats(tokens, self.back)
        words = [word_of(token) for token in tokens]
        if self.name == "word":
            return words
        if self.name == "back":
            return [""] * min(self.back, len(words)) + words[: max(len(words) - self.back, 0)]
        first = words.index(self.word) if self.word in words else len(words)
        return [YES if place > first else "" for place in range(len(words))]


class Condition(NamedTuple):
    """An attribute and the values it may have, the most telling first."""

    attribute: Attribute
    allowed: tuple[str, ...]


class Rule(NamedTuple):
    """Conditions that must hold together; without any it holds nowhere."""

    conditions: tuple[Condition, ...] = ()

    def holds(self, text: Text) -> list[bool]:
        """Whether it holds at each token of `text`."""
        if not self.conditions:
            return [False] * len(text.tokens)
        met = [
            [value in allowed for value in attribute.values(text)]
            for attribute, allowed in ((one.attribute, frozenset(one.allowed)) for one in self.conditions)
        ]
        return [all(column) for column in zip(*met, strict=True)]


def fit_rule(side: Side) -> Rule:
    """The rule of largest J on the examples an explanation is written from, one condition after the other."""
    cuts = [example.cut() for example in side.active]
    texts = [text for text, _ in cuts] + [text for _, text in side.inactive]
    activation = np.concatenate([np.asarray(text.activations, dtype=np.float64) for text in texts])
    starts = np.cumsum([0, *(len(text.tokens) for text in texts)])
    asked = np.zeros(len(activation), dtype=bool)
    asked[[starts[i] + at for i, (_, at) in enumerate(cuts)]] = True
    blocks = np.zeros(len(activation), dtype=np.int64)
    for i, example in enumerate(side.active):
        blocks[starts[i] : starts[i + 1]] = example.block
    cases = _Cases(texts, asked, activation == 0, blocks)
    alive, best, conditions = np.ones(len(activation), dtype=bool), 0.5, []
    attributes = [*_ATTRIBUTES, *(Attribute("earlier", word=word) for word in source_words(side)[:3])]
    while len(conditions) < MOST:
        fitted = [(*cases.best_values(attribute, alive), attribute) for attribute in attributes]
        score, allowed, attribute = max(fitted, key=lambda one: one[0])
        if score < best + GAIN:
            break
        best = score
        conditions.append(Condition(attribute, allowed))
        alive &= np.isin(cases.codes(attribute)[1], [cases.codes(attribute)[0][value] for value in allowed])
        attributes.remove(attribute)
    return Rule(tuple(conditions))


class _Cases:
    """Tokens of all texts, which of them are activating examples, which are inactive, and their blocks."""

    def __init__(
        self,
        texts: Sequence[Text],
        asked: NDArray[np.bool_],
        inactive: NDArray[np.bool_],
        blocks: NDArray[np.int64],
    ):
        self.texts, self.asked, self.inactive, self.blocks = texts, asked, inactive, blocks
        self._codes: dict[Attribute, tuple[dict[str, int], NDArray[np.int64]]] = {}

    def codes(self, attribute: Attribute) -> tuple[dict[str, int], NDArray[np.int64]]:
        """The number of each value, and that of every token; 0 for none."""
        if attribute not in self._codes:
            numbers = {"": 0}
            flat = [numbers.setdefault(value, len(numbers)) for text in self.texts for value in attribute.values(text)]
            self._codes[attribute] = (numbers, np.asarray(flat, dtype=np.int64))
        return self._codes[attribute]

    def best_values(self, attribute: Attribute, alive: NDArray[np.bool_]) -> tuple[float, tuple[str, ...]]:
        """The largest J of conditions on `attribute` where `alive` holds already, and the values that reach it."""
        numbers, codes = self.codes(attribute)
        hits = np.bincount(codes[self.asked & alive], minlength=len(numbers))
        misses = np.bincount(codes[self.inactive & alive], minlength=len(numbers))
        pairs = np.unique(np.stack([codes, self.blocks])[:, self.asked & alive], axis=1)
        eligible = np.flatnonzero(np.bincount(pairs[0], minlength=len(numbers)) >= 2)
        eligible = eligible[eligible != 0]
        if not len(eligible):
            return 0.0, ()
        # by the ratio of the two rates, highest first; then by the number of hits
        order = eligible[np.lexsort((-hits[eligible], (misses[eligible] + 0.5) / hits[eligible]))][:LONGEST]
        recall = np.cumsum(hits[order]) / self.asked.sum()
        false = np.cumsum(misses[order]) / max(self.inactive.sum(), 1)
        score = recall / 2 + ((1 - false) ** LENGTH + (1 - false)) / 4
        last = int(score.argmax())
        names = list(numbers)
        return float(score[last]), tuple(names[number] for number in order[: last + 1])


def source_words(side: Side) -> list[str]:
    """Words of the source tokens within the texts shown, by their summed share, largest first."""
    share: dict[str, float] = defaultdict(float)
    for example in side.active:
        for source in example.sources:
            if 0 <= source.place < example.at and source.share > 0:
                share[word_of(example.text.tokens[source.place])] += source.share
    return sorted(share, key=lambda word: -share[word])


def word_of(token: str) -> str:
    """A token without the spaces around it, in lower case; white space stays as it is."""
    return token.strip().casefold() or token


def kind_of(token: str) -> str:
    """What a token looks like, in words."""
    inner = token.strip()
    if not inner:
        return "line breaks" if "\n" in token else "white space"
    if re.fullmatch(r"[\d.,]*\d[\d.,]*", inner):
        return "numbers"
    if not any(character.isalnum() for character in inner):
        return "punctuation"
    if not inner[0].isalpha():
        return "other signs"
    if inner.isupper() and len(inner) > 1:
        return "capitals"
    if inner[0].isupper():
        return "capitalised words"
    return "words in lower case" if token[0].isspace() else "word endings"


def _band(place: int) -> str:
    """The band of widths 1, 1, 2, 4, 8, ... that a place in the context falls into."""
    high = 1 << place.bit_length()
    return f"{high // 2 if place else 0} to {high - 1}" if place > 1 else str(place)


def _repeats(tokens: tuple[str, ...], length: int) -> list[str]:
    """`YES` where the last `length` tokens have stood in this order before."""
    seen: dict[tuple[str, ...], int] = defaultdict(int)
    found = []
    for place in range(len(tokens)):
        run = tokens[max(place + 1 - length, 0) : place + 1]
        found.append(YES if len(run) == length and seen[run] else "")
        seen[run] += 1
    return found


_ATTRIBUTES = (
    Attribute("word"),
    Attribute("token"),
    Attribute("kind"),
    *(Attribute("back", back) for back in range(1, BACK + 1)),
    Attribute("repeat", 1),
    Attribute("repeat", 2),
    Attribute("place"),
)
"""In order of simplicity: the first of several equally good ones is taken."""
