"""Passkey: a number of five digits in text that says the same again and again, to be repeated at the end.

The filler holds nothing that resembles the answer, so this is retrieval at its easiest: one place stands out from all
others. needle.py hides a fact in real text. Task as in Mohtashami & Jaggi 2023 (2305.16300); the wording is our own.
"""

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from clearhead.data.hidden_fact import HiddenFact
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

INTRO = "Somewhere in the long text below a pass key is given. Keep it in mind, it is asked for at the end.\n\n"
FILLER = " The river is wide. The hills are far away. A boat goes down, and a boat comes up. So it was every day."
FACT = " The pass key is{key}. Keep in mind that{key} is the pass key."
QUESTION = "\n\nWhat is the pass key? The pass key is"
SMALLEST, LARGEST = 10_000, 99_999


def passkeys(n: int, seed: int) -> list[HiddenFact]:
    """`n` facts with keys drawn uniformly from 10000 to 99999; number i depends on nothing but i and the seed."""
    drawn = SMALLEST + mix(seed, np.arange(n)) % np.uint64(LARGEST - SMALLEST + 1)
    return [HiddenFact(INTRO, FACT.format(key=f" {key}"), QUESTION, f" {key}") for key in drawn]


def filler(model: Model, n: int, length: int) -> Int64[Tensor, "n t"]:
    """`n` equal rows of `length` tokens or more of the filler, ending where it ends."""
    once = model.tokenize(FILLER, special_tokens=False)
    return once.repeat(n, -(-length // once.shape[1])).to(torch.int64)
