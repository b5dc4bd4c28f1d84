"""Words that the detectors' prompts are made of, in the tokens of one model: ordinal sequences and first names.

    digits 0 .. 9 · number words · weekdays · months · ordinals · capital letters        each behind a space and without

A list holds only the words that are one token; words the tokenizer splits are left out, and with them the step over
them: the successor of an element is the next word of the list only where that one is a token too. Weekdays and months
go round. The lists are short and our own; names are those of the task ioi.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Int64
from torch import Tensor

from clearhead.data.generators.ioi import NAMES
from clearhead.model.access import Model

SHORTEST_SEQUENCE = 4
"""Tokens a sequence must have for "the next of them" to be more than a guess among few."""
ORDINALS = {
    "digits": "0 1 2 3 4 5 6 7 8 9",
    "number words": "one two three four five six seven eight nine ten eleven twelve",
    "weekdays": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "months": "January February March April May June July August September October November December",
    "ordinals": "first second third fourth fifth sixth seventh eighth ninth tenth",
    "letters": "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
}
ROUND = ("weekdays", "months")


@dataclass(frozen=True)
class OrdinalSequence:
    """The elements of one sequence that are single tokens, in order."""

    name: str
    tokens: tuple[int, ...]
    successor: dict[int, int]
    """Token -> token of the next element, where that is single too."""


@dataclass(frozen=True, eq=False)
class Successors:
    """All sequences as tables over the vocabulary."""

    sequence: Int64[Tensor, " v"]
    """Number of the sequence a token is an element of, -1 for the others."""
    following: Int64[Tensor, " v"]
    """Token of the next element, -1 where there is none."""

    @classmethod
    def of_sequences(cls, sequences: list[OrdinalSequence], d_vocab: int) -> "Successors":
        """The tables; no token may be an element of two sequences."""
        sequence = torch.full((d_vocab,), -1)
        following = torch.full((d_vocab,), -1)
        for number, one in enumerate(sequences):
            sequence[list(one.tokens)] = number
            for token, after in one.successor.items():
                following[token] = after
        return cls(sequence, following)


@lru_cache(maxsize=2)
def ordinal_sequences(model: Model) -> list[OrdinalSequence]:
    """The sequences in the tokens of `model`, those behind a space first; shorter ones are left out."""
    found = []
    for space in (True, False):
        for name, words in ORDINALS.items():
            ids = [single_token(model, word, space=space) for word in words.split()]
            after = [*ids[1:], ids[0] if name in ROUND else None]
            tokens = tuple(token for token in ids if token is not None)
            if len(tokens) >= SHORTEST_SEQUENCE:
                pairs = zip(ids, after, strict=True)
                successor = {a: b for a, b in pairs if a is not None and b is not None}
                found.append(OrdinalSequence(name, tokens, successor))
    return found


@lru_cache(maxsize=2)
def name_tokens(model: Model) -> dict[str, int]:
    """First names that are one token behind a space."""
    pairs = ((name, single_token(model, name)) for name in NAMES.split())
    return {name: token for name, token in pairs if token is not None}


def single_token(model: Model, word: str, *, space: bool = True) -> int | None:
    """The token of a word behind another word, or of the word alone; None where it is several."""
    if not space:
        ids = model.tokenize(word, special_tokens=False)[0].tolist()
        return ids[0] if len(ids) == 1 and model.token_strings(ids) == [word] else None
    alone, behind = (model.tokenize(text, special_tokens=False)[0].tolist() for text in ("The", f"The {word}"))
    return behind[-1] if behind[:-1] == alone else None


def rows_of_equal_length(model: Model, texts: list[str]) -> tuple[Int64[Tensor, "b t"], ...]:
    """The texts' tokens, those of one length in one batch, short ones first."""
    by_length: dict[int, list[Tensor]] = {}
    for text in texts:
        row = model.tokenize(text)[0]
        by_length.setdefault(len(row), []).append(row)
    return tuple(torch.stack(by_length[length]) for length in sorted(by_length))
