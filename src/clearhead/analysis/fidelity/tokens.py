"""At which tokens a dictionary fails: by position, at first occurrences and repeats, by class, by token.

    relative_error = sqrt( sum |e|^2 / sum |y|^2 )        over the tokens of a row of the table
    share_of_tokens, share_of_error                       of all tokens that count, and of their sum |e|^2

Position p belongs to the row that begins at the largest power of two up to p. A token is a repeat where its id stood
earlier in the block. Classes go by the token's text alone. A token is named among the worst only with `MIN_CASES`
occurrences.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

MIN_CASES = 10
WORST = 24
Numbers = NDArray[np.float64]


def repeats(tokens: Int[Tensor, "b t"]) -> Bool[Tensor, "b t"]:
    """Whether each token's id stood earlier in its block."""
    return (tokens[:, :, None] == tokens[:, None, :]).tril(-1).any(-1)


def class_of(text: str, *, special: bool) -> str:
    """The class of a token by its text: control, line break, space, number, punctuation, word start, word inside."""
    bare = text.strip()
    if special:
        return "control token"
    if not bare:
        return "line break" if "\n" in text else "space"
    if any(letter.isalpha() for letter in bare):
        return "word start" if text[0].isspace() else "word inside or without space"
    return "number" if any(letter.isdigit() for letter in bare) else "punctuation"


def by_position(position: NDArray[np.int64], square_e: Numbers, square_y: Numbers) -> list[dict[str, Any]]:
    """A row for each power of two: where it begins and ends, and the module's numbers."""
    power = np.floor(np.log2(position)).astype(np.int64)
    last = int(position.max())
    named = {at: f"{2**at}" if at == 0 else f"{2**at}–{min(2 ** (at + 1) - 1, last)}" for at in np.unique(power)}
    return table(power, lambda at: named[at], square_e, square_y)


def table(
    key: NDArray[np.int64], name: Callable[[int], str], square_e: Numbers, square_y: Numbers, min_cases: int = 1
) -> list[dict[str, Any]]:
    """A row for each value of `key` with at least `min_cases` tokens, in the order of the values."""
    rows = []
    values, place = np.unique(key, return_inverse=True)
    counts = np.bincount(place)
    errors, outputs = (np.bincount(place, weights=squares) for squares in (square_e, square_y))
    for value, count, error, output in zip(values, counts, errors, outputs, strict=True):
        if count >= min_cases and output > 0:
            rows.append(
                {
                    "name": name(int(value)),
                    "tokens": int(count),
                    "share_of_tokens": float(count / len(key)),
                    "share_of_error": float(error / errors.sum()) if errors.sum() else 0.0,
                    "relative_error": float(np.sqrt(error / output)),
                }
            )
    return rows


def describe_tokens(
    tokens: NDArray[np.int64],
    position: NDArray[np.int64],
    repeated: NDArray[np.bool_],
    square_e: Numbers,
    square_y: Numbers,
    texts: Sequence[str],
    special: frozenset[int],
) -> dict[str, Any]:
    """All tables of the module for one dictionary; `texts` are the vocabulary's, `special` its control tokens."""
    classes, class_by_id = _classified(tuple(texts), special)
    every = table(tokens, lambda at: texts[at], square_e, square_y, MIN_CASES)
    return {
        "positions": by_position(position, square_e, square_y),
        "repeats": table(repeated.astype(np.int64), lambda at: ("first occurrence", "repeat")[at], square_e, square_y),
        "classes": table(class_by_id[tokens], lambda at: classes[at], square_e, square_y),
        "worst": sorted(every, key=lambda row: -row["relative_error"])[:WORST],
        "heaviest": sorted(every, key=lambda row: -row["share_of_error"])[:WORST],
    }


@cache
def _classified(texts: tuple[str, ...], special: frozenset[int]) -> tuple[list[str], NDArray[np.int64]]:
    """The classes of a vocabulary, and the place of each token's; the same for all layers of a report."""
    found = [class_of(text, special=at in special) for at, text in enumerate(texts)]
    classes = sorted(set(found))
    places = {name: place for place, name in enumerate(classes)}
    return classes, np.array([places[name] for name in found])


def place_in_blocks(context: int, blocks: int) -> Int[Tensor, "b t"]:
    """Positions of the tokens that count, those from 1 on."""
    return torch.arange(1, context).expand(blocks, -1)
