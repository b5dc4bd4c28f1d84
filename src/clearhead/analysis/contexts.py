"""What is shown of each example: the tokens around it, the unit's activation on them, and its z pattern.

`choose` (examples.py) says which tokens; this fills in the rest when the blocks come by a second time. Per example it
holds a window of activations and the terms of the z pattern that are at least 1 % of the pre-activation, so memory is
O(examples · window), whatever the amount of data.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from clearhead.analysis.entries import Entries
from clearhead.analysis.examples import CATEGORIES, Chosen
from clearhead.analysis.patterns import Triples, drop_small, z_patterns
from clearhead.analysis.token_texts import Strings
from clearhead.data.text import TokenBlocks
from clearhead.dictionaries.lorsa import Lorsa

BEFORE, AFTER = 80, 15
"""Tokens shown before and after the activating one."""
AT_ONCE = 16_384
"""Examples whose rows are made at a time."""


class Contexts:
    """Windows and z patterns of `chosen`, filled in batch by batch; each batch holds consecutive whole blocks."""

    def __init__(self, chosen: Chosen, context: int):
        self.chosen, self.context = chosen, context
        self.block, self.position = np.divmod(chosen.token, context)
        self.start = np.maximum(self.position - BEFORE, 0)
        self.stop = np.minimum(self.position + AFTER + 1, context)
        n = len(chosen.token)
        self.activations = np.zeros((n, min(BEFORE + AFTER + 1, context)), dtype=np.float32)
        self.total = np.zeros(n, dtype=np.float32)
        self.rest = np.zeros(n, dtype=np.float32)
        self._terms: list[tuple[NDArray[Any], ...]] = []
        self._order = np.argsort(chosen.token, kind="stable")

    def fill_windows(self, first_block: int, n_blocks: int, entries: Entries) -> NDArray[np.int64]:
        """Fill in the activations around the examples in these blocks, and return those examples.

        `entries` are those of the same blocks.
        """
        low, high = first_block * self.context, (first_block + n_blocks) * self.context
        span = np.searchsorted(self.chosen.token[self._order], [low, high])
        here = self._order[span[0] : span[1]]
        if len(here):
            self._fill_windows(here, low, high - low, entries)
        return here

    def fill(self, first_block: int, x: Float[Tensor, "b t d"], entries: Entries, lorsa: Lorsa) -> None:
        """Fill in windows and z patterns of the examples in blocks first_block .. first_block + b."""
        here = self.fill_windows(first_block, len(x), entries)
        active = here[self.chosen.category[here] != CATEGORIES.index("negative")]
        if len(active):
            self._fill_patterns(active, first_block, x, lorsa)

    def _fill_windows(self, here: NDArray[np.int64], low: int, size: int, entries: Entries) -> None:
        key = entries.unit * size + (entries.token - low)
        order = np.argsort(key, kind="stable")
        key = key[order]
        base = self.chosen.unit[here] * size + self.block[here] * self.context - low
        begin = np.searchsorted(key, base + self.start[here])
        count = np.searchsorted(key, base + self.stop[here]) - begin
        example = np.repeat(here, count)
        at = order[np.repeat(begin - np.cumsum(count) + count, count) + np.arange(count.sum())]
        column = entries.token[at] - self.block[example] * self.context - self.start[example]
        self.activations[example, column] = entries.value[at]

    def _fill_patterns(self, here: NDArray[np.int64], first_block: int, x: Tensor, lorsa: Lorsa) -> None:
        triples = Triples(
            torch.from_numpy(self.block[here] - first_block),
            torch.from_numpy(self.position[here]),
            torch.from_numpy(self.chosen.unit[here]),
        )
        sparse = drop_small(z_patterns(lorsa, x, triples))
        self.total[here] = sparse.total.float().cpu().numpy()
        self.rest[here] = sparse.rest.float().cpu().numpy()
        row, key = sparse.row.cpu().numpy(), sparse.key.cpu().numpy()
        self._terms.append((here[row], key.astype(np.int32), sparse.weight.float().cpu().numpy()))

    def example_rows(self, names: list[str], blocks: TokenBlocks, strings: Strings) -> Iterator[dict[str, Any]]:
        """Columns of table `examples`, some thousands of examples at a time.

        names: ids of the units; blocks: the text that was read; strings: the texts of an array of token ids.
        """
        for low in range(0, len(self.block), AT_ONCE):
            yield self._example_rows(low, min(low + AT_ONCE, len(self.block)), names, blocks, strings)

    def _example_rows(
        self, low: int, high: int, names: list[str], blocks: TokenBlocks, strings: Strings
    ) -> dict[str, Any]:
        part = slice(low, high)
        start, length = self.start[part], self.stop[part] - self.start[part]
        columns = np.arange(self.activations.shape[1])
        shown = columns < length[:, None]
        block = self.block[part]
        ids = blocks.tokens.numpy()[block[:, None], np.minimum(start[:, None] + columns, self.context - 1)][shown]
        offsets = np.concatenate([[0], np.cumsum(length)]).astype(np.int32)
        return {
            "example_id": np.arange(low, high),
            "unit_id": [names[unit] for unit in self.chosen.unit[part]],
            "category": [CATEGORIES[category] for category in self.chosen.category[part]],
            "rank": self.chosen.rank[part],
            "activation": self.chosen.value[part],
            "document": [
                blocks.document_at(b, t) for b, t in zip(block.tolist(), self.position[part].tolist(), strict=True)
            ],
            "block": block,
            "position": self.position[part],
            "start": start,
            "tokens": pa.ListArray.from_arrays(offsets, strings(ids)),
            "token_ids": pa.ListArray.from_arrays(offsets, ids),
            "activations": pa.ListArray.from_arrays(offsets, self.activations[part][shown]),
        }

    def terms(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        """The terms of all z patterns: (example, position of the source token, A_ij v_j), by example and position."""
        none = (np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))
        example, key, weight = (np.concatenate(part) for part in zip(none, *self._terms, strict=True))
        order = np.argsort(example, kind="stable")
        return example[order], key[order], weight[order]

    def pattern_rows(self, names: list[str]) -> dict[str, Any]:
        """Columns of table `patterns`: one row per example that is not negative, in order of example."""
        rows = np.flatnonzero(self.chosen.category != CATEGORIES.index("negative"))
        example, key, weight = self.terms()
        offsets = np.searchsorted(example, np.concatenate([rows, [len(self.chosen.token)]])).astype(np.int32)
        return {
            "example_id": rows,
            "unit_id": [names[unit] for unit in self.chosen.unit[rows]],
            "query": (self.position - self.start)[rows],
            "keys": pa.ListArray.from_arrays(offsets, key),
            "weights": pa.ListArray.from_arrays(offsets, weight),
            "rest": self.rest[rows],
            "row_sum": self.total[rows],
        }
