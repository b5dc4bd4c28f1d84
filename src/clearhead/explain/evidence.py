"""What is known of a unit from an atlas: its examples and where each came from, and who may see which.

An example is a window of tokens around one activating token, with the unit's activation on each, and, where the unit
has a z pattern, its source tokens with their share

    share_j = sign(activation) A_ij v_j / (sum_j |A_ij v_j| of the sources kept + |rest|)

so the magnitudes add up to at most 1, and a negative share works against the activation. An explanation is written
from one half of the examples and judged on the other. No document is on both sides; where one document holds more
than half of a unit's active examples, no block is.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from clearhead.atlas import Atlas
from clearhead.errors import ClearheadError

BEFORE, AFTER = 24, 7
"""Tokens shown before and after the activating one; texts that are judged hold no more."""
LEAST = 4
"""A unit with fewer active examples is not explained: two to write from, two to be judged on."""
UNITS_AT_ONCE = 64


class Text(NamedTuple):
    """Consecutive tokens: their strings, the unit's activation on each, the place of the first in its block."""

    tokens: tuple[str, ...]
    activations: tuple[float, ...]
    start: int

    def part(self, low: int, high: int) -> "Text":
        """Tokens low .. high of this text."""
        low = max(low, 0)
        return Text(self.tokens[low:high], self.activations[low:high], self.start + low)


class Source(NamedTuple):
    """A source token: its place among the tokens of the example (negative before the first) and its share."""

    place: int
    share: float


class Example(NamedTuple):
    """One example: its window, the place of the token it is an example of (`at`), and its source tokens."""

    number: int
    document: str
    block: int
    text: Text
    at: int
    activation: float
    sources: tuple[Source, ...]

    def cut(self) -> tuple[Text, int]:
        """The text as it is judged, `BEFORE` and `AFTER` tokens around `at`, and the place of `at` in it."""
        low = max(self.at - BEFORE, 0)
        return self.text.part(low, self.at + AFTER + 1), self.at - low


class Side(NamedTuple):
    """The examples of one side, and texts on which the unit is inactive throughout."""

    active: tuple[Example, ...]
    inactive: tuple[tuple[Example, Text], ...]
    """Each text with the example it was cut from."""


class Evidence(NamedTuple):
    """All that is known of a unit: what its explanation is written from, and what that is judged on."""

    unit_id: str
    largest: float
    """Largest magnitude of its activation among all its examples."""
    written: Side
    judged: Side
    divided_by: str
    """What no two sides share: `document` or `block`."""


def read_evidence(atlas: Atlas, unit_ids: Sequence[str]) -> Iterator[Evidence]:
    """The evidence on each unit in turn, but for those with fewer than `LEAST` active examples, or all in one block."""
    for low in range(0, len(unit_ids), UNITS_AT_ONCE):
        wanted = list(unit_ids[low : low + UNITS_AT_ONCE])
        rows = atlas.sql(
            "select e.*, p.keys, p.weights, p.rest from examples e left join patterns p using (example_id) "
            "where e.unit_id in (select unnest(?)) order by example_id",
            [wanted],
        )
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            found[row["unit_id"]].append(row)
        for unit_id in wanted:
            evidence = divide(unit_id, found[unit_id])
            if evidence is not None:
                yield evidence


def explainable(atlas: Atlas, kind: str | None = None) -> list[str]:
    """Ids of the units with enough active examples, by layer and index; raises `ClearheadError` when there are none."""
    rows = atlas.sql(
        "select unit_id from units join (select unit_id, count(*) as n from examples where category != 'negative' "
        "group by unit_id) using (unit_id) where n >= $1 and ($2 is null or kind = $2) order by kind, layer, index",
        [LEAST, kind],
    )
    if not rows:
        what = "no unit" if kind is None else f"no unit of kind {kind!r}"
        raise ClearheadError(
            f"{what} of {atlas.path} has {LEAST} active examples; write an atlas with `clearhead analyze`, on more text"
        )
    return [row["unit_id"] for row in rows]


def divide(unit_id: str, rows: Sequence[dict[str, Any]]) -> Evidence | None:
    """The evidence in rows of table `examples` joined with those of `patterns`; None if they are too few."""
    active = [_example(row) for row in rows if row["category"] != "negative"]
    negative = [_example(row) for row in rows if row["category"] == "negative"]
    if len(active) < LEAST:
        return None
    documents = Counter(example.document for example in active)
    by = "document" if documents.most_common(1)[0][1] * 2 <= len(active) else "block"
    sides = _sides(unit_id, [*active, *negative], len(active), by)
    halves = [
        Side(
            tuple(example for example in active if sides[_group(example, by)] == side),
            tuple(pair for example in negative if sides[_group(example, by)] == side for pair in _silent(example)),
        )
        for side in (0, 1)
    ]
    if min(len(half.active) for half in halves) < 2:
        return None
    largest = max(abs(example.activation) for example in active)
    written, judged = halves
    return Evidence(unit_id, largest, written, judged, by)


def _example(row: dict[str, Any]) -> Example:
    at = row["position"] - row["start"]
    sources: tuple[Source, ...] = ()
    if row["keys"]:
        total = sum(map(abs, row["weights"])) + abs(row["rest"])
        sign = 1.0 if row["activation"] >= 0 else -1.0
        pairs = zip(row["keys"], row["weights"], strict=True)
        found = [Source(key - row["start"], sign * weight / total) for key, weight in pairs if weight]
        sources = tuple(sorted(found, key=lambda source: -abs(source.share)))
    text = Text(tuple(row["tokens"]), tuple(row["activations"]), row["start"])
    return Example(row["example_id"], row["document"], row["block"], text, at, row["activation"], sources)


def _group(example: Example, by: str) -> str:
    return example.document if by == "document" else str(example.block)


def _sides(unit_id: str, examples: Sequence[Example], n_active: int, by: str) -> dict[str, int]:
    """The side of each document (or block): the largest first, each to the side that has less of its kind.

    Ties go by a hash of unit and name, so that no side gets what comes first in the alphabet.
    """
    held: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for place, example in enumerate(examples):
        held[_group(example, by)][0 if place < n_active else 1] += 1
    order = sorted(held, key=lambda name: (-held[name][0], -held[name][1], _hash(unit_id, name)))
    sides: dict[str, int] = {}
    totals = [[0, 0], [0, 0]]
    for name in order:
        kind = 0 if held[name][0] else 1
        even = totals[0][kind] == totals[1][kind]
        side = _hash(name, unit_id) % 2 if even else int(totals[1][kind] < totals[0][kind])
        sides[name] = side
        totals[side] = [total + more for total, more in zip(totals[side], held[name], strict=True)]
    return sides


def _silent(example: Example) -> list[tuple[Example, Text]]:
    """Texts of the size that is judged, cut side by side from a negative example, on which the unit is inactive."""
    size = BEFORE + AFTER + 1
    first, _ = example.cut()
    lows = {first.start - example.text.start}
    low = first.start - example.text.start
    while low - size >= 0:
        low -= size
        lows.add(low)
    parts = [example.text.part(low, low + size) for low in sorted(lows)]
    return [(example, part) for part in parts if not any(part.activations)]


def _hash(*words: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(words).encode(errors="backslashreplace")).digest()[:8], "big")
