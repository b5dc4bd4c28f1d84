"""What makes a head look, from its strongest examples alone: which tokens it looks from, at which, and how far back.

Scores cannot say which keys matter: a key may have the largest one and no value to move (a sink). So the keys that
matter in an example are those it moves from: the largest terms |A_ij v_j| of its z pattern, up to `KEYS` of them, each
at least a tenth of the largest. Over a head's `top` examples

    share   of examples in which a token is the query, or is one of the keys that matter;
            or, for a distance, of the keys that matter
    lift    share / how often the token stands at any position of the text     (a distance has none)

Tokens are reported when they occur in two examples at least, more often than in the text, and with a probability below
`CHANCE` to occur so often in as many random draws. What the query and key read there, split over features and
embeddings, needs dictionaries (score_parts.py).
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import scipy.stats
from jaxtyping import Int
from numpy.typing import NDArray

from clearhead.analysis.contexts import Contexts
from clearhead.analysis.examples import CATEGORIES
from clearhead.analysis.relations import Related
from clearhead.analysis.token_texts import Strings

KEYS = 3
"""Keys per example that count as those that matter, at most."""
WEAKEST = 0.1
"""A key counts when it moves at least this much of what the largest one moves."""
TOKENS = 5
"""Tokens and distances reported per head and side."""
CHANCE = 1e-3
"""Probability of a token's count under the text's frequencies, above which it is left out."""
LEAST_SHARE = 0.1
"""Distances that hold a smaller share of the keys that matter are left out."""


class Looks(NamedTuple):
    """The strongest examples of all units and the keys that matter in them."""

    unit: NDArray[np.int64]
    """By example."""
    query: NDArray[np.int64]
    """By example, the token at the query."""
    example: NDArray[np.int64]
    """By key that matters, the example it belongs to; ascending."""
    key: NDArray[np.int64]
    """By key that matters, its token."""
    offset: NDArray[np.int64]
    """By key that matters, how far back it stands."""
    place: NDArray[np.int64]
    """By key that matters, its position in the block."""


class Counted(NamedTuple):
    """How often something was seen with a unit; arrays [findings], by unit."""

    unit: NDArray[np.int64]
    what: NDArray[np.int64]
    cases: NDArray[np.int64]
    share: NDArray[np.float64]

    def where(self, kept: NDArray[np.bool_]) -> "Counted":
        """The findings at which the mask is true."""
        return Counted(self.unit[kept], self.what[kept], self.cases[kept], self.share[kept])


def strongest_looks(contexts: Contexts, tokens: Int[np.ndarray, "blocks t"]) -> Looks:
    """The `top` examples with the keys that matter."""
    top = np.flatnonzero(contexts.chosen.category == CATEGORIES.index("top"))
    number = np.full(len(contexts.chosen.category), -1)
    number[top] = np.arange(len(top))
    example, key, weight = contexts.terms()
    mine = number[example] >= 0
    example, key, size = number[example[mine]], key[mine].astype(np.int64), np.abs(weight[mine])
    order = np.lexsort((key, -size, example))
    example, key, size = example[order], key[order], size[order]
    first = np.searchsorted(example, example)
    kept = (np.arange(len(example)) - first < KEYS) & (size >= WEAKEST * size[first])
    example, key = example[kept], key[kept]
    block, position = contexts.block[top], contexts.position[top]
    return Looks(
        contexts.chosen.unit[top],
        tokens[block, position],
        example,
        tokens[block[example], key],
        position[example] - key,
        key,
    )


def count_offsets(looks: Looks) -> Counted:
    """Distances of the keys that matter, each by its share of them; largest share first within a unit."""
    return _ordered(*_count(looks.unit[looks.example], looks.offset, looks.unit[looks.example]))


def count_tokens(looks: Looks, side: str) -> Counted:
    """Tokens at the query or among the keys that matter, by the share of examples that hold them."""
    if side == "query":
        return _ordered(*_count(looks.unit, looks.query, looks.unit))
    # a token that stands at several keys of one example counts once
    pairs = np.unique(np.stack([looks.example, looks.key]), axis=1)
    return _ordered(*_count(looks.unit[pairs[0]], pairs[1], looks.unit))


def base_rates(tokens: Int[np.ndarray, "blocks t"], n_tokens: int) -> NDArray[np.float64]:
    """How often each vocabulary entry stands at a position of the text."""
    return np.bincount(tokens.ravel(), minlength=n_tokens) / max(tokens.size, 1)


def beyond_chance(counted: Counted, rates: NDArray[np.float64], looks: Looks, side: str) -> NDArray[np.bool_]:
    """Which tokens occur in two examples at least and more often than random draws from the text would bring them.

    A draw for each query, or for each key that matters, of which an example may have several.
    """
    drawn = looks.unit if side == "query" else looks.unit[looks.example]
    draws = np.bincount(drawn, minlength=int(counted.unit.max(initial=0)) + 1)[counted.unit]
    rate = rates[counted.what]
    tail = scipy.stats.binom.sf(counted.cases - 1, draws, np.minimum(rate, 1))
    return (counted.cases >= 2) & (counted.share > rate) & (tail < CHANCE)


def relate_looks(
    looks: Looks, tokens: Int[np.ndarray, "blocks t"], n_vocabulary: int, strings: Strings
) -> list[Related]:
    """Relations `query` and `key` from statistics: tokens with their lift, distances with their share."""
    rates = base_rates(tokens, n_vocabulary)
    found = []
    for side in ("query", "key"):
        counted = count_tokens(looks, side)
        counted = _first(counted, beyond_chance(counted, rates, looks, side), TOKENS)
        names = np.array([f"embedding.{token}" for token in counted.what.tolist()], dtype=np.str_)
        lift = counted.share / rates[counted.what]
        found.append(Related(side, counted.unit, names, strings(counted.what), lift, counted.share, counted.share))
    counted = count_offsets(looks)
    counted = _first(counted, counted.share >= LEAST_SHARE, TOKENS)
    names = np.array([f"offset.{offset}" for offset in counted.what.tolist()], dtype=np.str_)
    labels = pa.array([name_offset(offset) for offset in counted.what.tolist()], pa.string())
    found.append(Related("key", counted.unit, names, labels, counted.share, counted.share, counted.share))
    return found


def name_offset(offset: int) -> str:
    """A distance in words."""
    return "the token itself" if offset == 0 else f"{offset} token{'s' * (offset > 1)} back"


def _count(
    unit: NDArray[np.int64], what: NDArray[np.int64], cases: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Pairs (unit, what), how often each came, and that per occurrence of the unit in `cases`."""
    wide = int(what.max(initial=0)) + 1
    pair, count = np.unique(unit * wide + what, return_counts=True)
    unit, what = np.divmod(pair, wide)
    return unit, what, count, count / np.bincount(cases, minlength=int(unit.max(initial=0)) + 1)[unit]


def _ordered(
    unit: NDArray[np.int64], what: NDArray[np.int64], count: NDArray[np.int64], share: NDArray[np.float64]
) -> Counted:
    order = np.lexsort((what, -count, unit))
    return Counted(unit[order], what[order], count[order], share[order])


def _first(counted: Counted, kept: NDArray[np.bool_], size: int) -> Counted:
    """The first `size` of each unit among those kept."""
    counted = counted.where(kept)
    rank = np.arange(len(counted.unit)) - np.searchsorted(counted.unit, counted.unit)
    return counted.where(rank < size)
