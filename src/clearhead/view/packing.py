"""How data is laid into a page: gzipped JSON in base64, numbers of four digits, and each text once.

A page opens its packed parts when it needs them. Tokens and titles are made visible (`visible.visible`) and stored in a
vocabulary, so that a word shown a thousand times is embedded once.
"""

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from clearhead.view.visible import visible


@dataclass
class Vocabulary:
    """Visible forms of tokens and texts, each stored once."""

    entries: list[str] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)

    def place(self, token: str) -> int:
        """Where `token` stands in `entries`, added if new."""
        if token not in self._places:
            self._places[token] = len(self.entries)
            self.entries.append(visible(token))
        return self._places[token]

    def effects(self, entries: Sequence[Mapping[str, Any]] | None) -> list[list[Any]]:
        """Place and value of each token of a column such as `raised`; nothing for an empty cell."""
        return [[self.place(entry["token"]), brief(entry["logit"])] for entry in entries or []]


def pack(value: Any) -> str:
    """Gzipped JSON in base64; the same value always gives the same text."""
    raw = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
    return base64.b64encode(gzip.compress(raw, compresslevel=6, mtime=0)).decode("ascii")


def unpack(text: str) -> Any:
    """The value that `pack` was given."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


def brief(value: float | None) -> float | None:
    """Four significant digits: more than a reader needs, and a third of the size."""
    return None if value is None else float(f"{value:.4g}")


def divide(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """The items in lists of `size`; the last may be shorter."""
    iterator = iter(items)
    while some := list(islice(iterator, size)):
        yield some


def group_by(rows: Iterable[Mapping[str, Any]], *keys: str) -> dict[Any, list[Any]]:
    """Rows by the value of a column, or by the values of several; order is kept."""
    grouped: dict[Any, list[Any]] = {}
    for row in rows:
        grouped.setdefault(row[keys[0]] if len(keys) == 1 else tuple(row[key] for key in keys), []).append(row)
    return grouped
