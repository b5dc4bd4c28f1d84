"""Addition of two numbers below 100, digit by digit: the toy on which sparse attention can be read by eye.

    a1 a0 + b1 b0 = c2 c1 c0          "3 7 + 0 8 = 0 4 5"

All 10,000 pairs, 9,000 to train on and 1,000 held out by a fixed shuffle; no tokenizer, a token is its index in
`TOKENS`. A sum is written with three digits and a summand with two, so that each position has one meaning (`PLACES`).
Causal attention sees the summands whole before the first digit of the sum, so c2 already needs every carry:

    carries[:, 0]   a0 + b0 >= 10, into the tens        carries[:, 1]   into the hundreds, which is c2
    cascades        a1 + b1 = 9: the units alone decide c2

The task is that of Fig. 1 of arXiv 2512.05865, whose format and sizes are not known to us; both are our own.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from clearhead.data.document import Split
from clearhead.errors import UnknownNameError
from clearhead.ops.hash_rng import mix

TOKENS = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "+", "=")
PLUS, EQUALS = 10, 11
PLACES = ("a1", "a0", "+", "b1", "b0", "=", "c2", "c1", "c0")
"""Name of each position."""
ANSWER = slice(6, 9)
"""The positions of the sum. A causal model predicts them at the positions 5, 6 and 7."""
HELD_OUT = 1000


@dataclass(frozen=True)
class Addition:
    """Sums as tokens, and where each has carries."""

    tokens: Int64[Tensor, "n 9"]
    carries: Bool[Tensor, "n 2"]
    """Whether the units carry into the tens, and the tens into the hundreds."""
    cascades: Bool[Tensor, " n"]
    """Whether the tens add up to 9, so that they carry where the units do."""

    @classmethod
    def of_pairs(cls, a: Int64[Tensor, " n"], b: Int64[Tensor, " n"]) -> Self:
        """The sums of numbers from 0 to 99."""
        c = a + b
        plus, equals = torch.full_like(a, PLUS), torch.full_like(a, EQUALS)
        columns = [a // 10, a % 10, plus, b // 10, b % 10, equals, c // 100, c // 10 % 10, c % 10]
        carries = torch.stack([a % 10 + b % 10 >= 10, c >= 100], dim=1)
        return cls(torch.stack(columns, dim=1), carries, a // 10 + b // 10 == 9)

    def __len__(self) -> int:
        return len(self.tokens)


def addition(split: Split, seed: int = 0) -> Addition:
    """The 9,000 sums of "train" or the 1,000 of "held_out", in shuffled order; both depend on the seed alone."""
    if split not in ("train", "held_out"):
        raise UnknownNameError("split", split, ("train", "held_out"))
    order = torch.from_numpy(np.argsort(mix(seed, np.arange(10_000))))
    chosen = order[HELD_OUT:] if split == "train" else order[:HELD_OUT]
    return Addition.of_pairs(chosen // 100, chosen % 100)


def loss_mask() -> Bool[Tensor, " 8"]:
    """True at the inputs `tokens[:, :-1]` whose next token is a digit of the sum: the only predictions that count."""
    mask = torch.zeros(len(PLACES), dtype=torch.bool)
    mask[ANSWER] = True
    return mask[1:]


def token_strings(tokens: Int64[Tensor, " t"]) -> list[str]:
    """The tokens as they are shown on a page."""
    return [TOKENS[token] for token in tokens.tolist()]
