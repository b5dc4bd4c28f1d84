"""The text that attention patterns are looked for on: held-out natural text, and such text said again and again.

    natural   blocks of the default text, spread evenly over its held-out part
    again     first token of a block, then p of its tokens over and over: x1 .. xp x1 .. xp x1 ..     p = 24 .. 48

In the second kind the earlier copies of every token are known, their distance differs from block to block, and the
tokens are those of text, so that units which act on few tokens act here too.
"""

from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from clearhead.data.text import token_blocks
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

CONTEXT = 128
BATCH = 16
NATURAL, AGAIN = 3, 3
"""Batches of each kind."""
SPREAD_OVER = 2**17
"""Tokens of text that the blocks are spread over."""
PERIODS = range(24, 49)
PERIOD_DRAW, START_DRAW = 111, 112


def natural_blocks(model: Model, n: int, context: int = CONTEXT) -> Int[Tensor, "n t"]:
    """`n` blocks of held-out text, evenly spread; raises `ClearheadError` where there are fewer."""
    context = min(context, model.n_ctx or context)
    blocks = token_blocks(model, "default", split="held_out", n_tokens=SPREAD_OVER, context=context, at_most=True)
    if len(blocks) < n:
        raise ClearheadError(f"the held-out default text has {len(blocks)} blocks of {context} tokens; {n} are needed")
    return blocks.tokens[torch.arange(n) * len(blocks) // n].to(model.device)


def said_again(blocks: Int[Tensor, "b t"], seed: int) -> Int[Tensor, "b t"]:
    """Each block's first token, then one piece of the block over and over; pieces shorten with the block."""
    t = blocks.shape[1]
    rows = []
    for number, block in enumerate(blocks):
        period = PERIODS[int(mix(seed, number, PERIOD_DRAW)[0] % np.uint64(len(PERIODS)))] * t // CONTEXT
        start = 1 + int(mix(seed, number, START_DRAW)[0] % np.uint64(t - period))
        place = start + torch.arange(t - 1, device=block.device) % period
        rows.append(torch.cat([block[:1], block[place]]))
    return torch.stack(rows)


def pattern_batches(model: Model, seed: int) -> tuple[Int[Tensor, "b t"], ...]:
    """Batches of natural text, then batches of text said again; the same objects for all probes of one model."""
    return _pattern_batches(model, seed, NATURAL * BATCH, AGAIN * BATCH, BATCH)


@lru_cache(maxsize=1)
def _pattern_batches(
    model: Model, seed: int, n_natural: int, n_again: int, size: int
) -> tuple[Int[Tensor, "b t"], ...]:
    natural, other = natural_blocks(model, n_natural + n_again).split([n_natural, n_again])
    return (*natural.split(size), *said_again(other, seed).split(size))
