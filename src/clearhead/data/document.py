"""A document, and the one rule by which documents are held out."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

Split = Literal["train", "held_out"]
HELD_OUT_ONE_IN = 10


class Document(NamedTuple):
    """A piece of text that stands on its own, and where it came from."""

    name: str
    text: str


def stable_hash(key: str) -> int:
    """A number in [0, 2⁶⁴) that depends on nothing but `key`: not on the process, the machine or other keys."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")


def take_turns(streams: Iterable[Iterator[Document]]) -> Iterator[Document]:
    """One document from each stream in turn until all are exhausted, so that any beginning of the result is varied."""
    active = streams
    while True:
        remaining = []
        for stream in active:
            document = next(stream, None)
            if document is not None:
                remaining.append(stream)
                yield document
        if not remaining:
            return
        active = remaining
