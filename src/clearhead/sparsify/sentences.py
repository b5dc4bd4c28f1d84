"""The open edges of a few sentences, and what the dense base attends to at the same places.

    model    A_ij: what multiplies the values, under hard gates; listed where it is above 0
    base     P_ij: the softmax over all keys; listed from `LEAST` on

Weights are rounded to thousandths, and a row is text, "key:weight key:weight ...", as there are many rows: one per
layer, head and query. A sentence is read alone, from position 0 on, after the token that the tokenizer puts in front.
It lies between tokens that end one; where there is no whole one near, it is the beginning of a block.
"""

import itertools
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from clearhead.model.access import Model

SHORTEST, LONGEST = 12, 40
"""Tokens of a sentence."""
TRIES = 16
"""Blocks that are searched for a whole sentence before one is cut."""
LEAST = 0.005
"""The smallest weight of the base that is listed."""
ENDS = (".", "!", "?", "。", "！", "？")
CLOSERS = "\"'”’»)]*_ "


@torch.no_grad()
def read_sentences(
    model: Model, base: Model | None, blocks: Int64[Tensor, "n t"], *, prefix: int = 0, count: int = 2
) -> list[dict[str, Any]]:
    """Patterns on sentences from `count` places spread over `blocks`, which begin with `prefix` special tokens.

    Each is {tokens: [text], layers: [{layer, model: [[row, ...] per head], base: the same or None}]}. Raises
    `ClearheadError` for a model without a tokenizer.
    """
    gates = model.gates
    layers = model.attention_layers if gates is None else list(gates.layers)
    places = range(0, len(blocks), max(1, len(blocks) // count))
    found = []
    for place in list(places)[:count]:
        tokens = _take_sentence(model, blocks[place : place + TRIES], prefix)[None]
        sites = [f"pattern.{layer}" for layer in layers]
        sparse = model.run(tokens, read=sites)
        dense = None if base is None else base.run(tokens, read=sites)
        found.append(
            {
                "tokens": model.token_strings(tokens[0]),
                "layers": [
                    {
                        "layer": layer,
                        "model": _rows(sparse[site][0], 0.0),
                        "base": None if dense is None else _rows(dense[site][0], LEAST),
                    }
                    for layer, site in zip(layers, sites, strict=True)
                ],
            }
        )
    return found


def find_sentence(words: list[str]) -> tuple[int, int] | None:
    """Where the first whole sentence of `SHORTEST` to `LONGEST` tokens begins and ends; None where there is none."""
    starts = [place + 1 for place, word in enumerate(words) if _ends(word)]
    for start, end in itertools.pairwise(starts):
        if SHORTEST <= end - start <= LONGEST:
            return start, end
    return None


def _take_sentence(model: Model, blocks: Int64[Tensor, "n t"], prefix: int) -> Int64[Tensor, " s"]:
    """The first whole sentence in some blocks, else the beginning of the first block; with its prefix."""
    for block in blocks:
        span = find_sentence(model.token_strings(block[prefix:]))
        if span is not None:
            return torch.cat([block[:prefix], block[prefix:][slice(*span)]])
    return blocks[0, : prefix + LONGEST]


def _ends(word: str) -> bool:
    return "\n" in word or word.rstrip(CLOSERS).endswith(ENDS)


def _rows(pattern: Float[Tensor, "h t t"], least: float) -> list[list[str]]:
    """Of each head and query its keys and weights in thousandths."""
    heads = []
    for head in pattern.float().cpu():
        rows = []
        for row in head:
            keys = torch.nonzero((row > 0) & (row >= least))[:, 0].tolist()
            rows.append(" ".join(f"{key}:{round(1000 * float(row[key]))}" for key in keys))
        heads.append(rows)
    return heads
