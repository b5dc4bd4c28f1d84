"""Random tokens that repeat, alone or among blocks of text: what a model can predict by induction alone.

A sequence has a period p and tokens drawn uniformly from an alphabet; its number decides both:

    x[n, i] = alphabet[hash(seed, n, i mod p_n)]        p_n uniform in 8..T/2 (T/2 throughout where it is measured)

so a sequence is a function of (seed, number) and never has to be stored. Up to position p nothing can be predicted
(log |alphabet| nats); from p + 1 on, everything can, by whoever finds what followed the same token before.

`mixed_blocks` is text of which a share is such sequences, as `clearhead pretrain` mixes them: what a dictionary has to
see to imitate the heads that a model needs for them. Not here: losses on them (training/repeats.py).
"""

import dataclasses
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from clearhead.data.document import Split
from clearhead.data.text import TokenBlocks, hash_tokens, token_blocks
from clearhead.ops.hash_rng import mix

if TYPE_CHECKING:
    from clearhead.model.access import Model

SHORTEST_PERIOD = 8
MEASURED_SEED = -1  # of no training, so what is measured was never trained on, and is the same in every run
MIXED_SEEDS: dict[Split, int] = {"train": -2, "held_out": MEASURED_SEED}  # seeds that are given are 0 or more
NAME = "random tokens that come twice"


def repeated_sequences(
    seed: int,
    numbers: Int64[Tensor, " b"],
    context: int,
    alphabet: Int64[Tensor, " a"],
    period: int | None = None,
) -> Int64[Tensor, "b t"]:
    """The sequences of these numbers, `context` tokens each; `period` overrides the drawn ones."""
    n = numbers.numpy()[:, None]
    longest = context // 2
    shortest = min(SHORTEST_PERIOD, longest)
    if period is None:
        periods = shortest + (mix(seed, n) % np.uint64(longest - shortest + 1)).astype(np.int64)
    else:
        periods = np.full_like(n, period)
    draws = mix(seed, n, np.arange(context) % periods) % np.uint64(len(alphabet))
    return alphabet[torch.from_numpy(draws.astype(np.int64))]


def alphabet_of(tokenizer: PreTrainedTokenizerBase) -> Int64[Tensor, " a"]:
    """The tokens that random sequences are made of: all but the special ones."""
    special = set(tokenizer.all_special_ids)
    return torch.tensor([token for token in range(len(tokenizer)) if token not in special])


def mixed_blocks(
    model: "Model", text: str, *, split: Split, n_tokens: int, context: int, repeat_share: float
) -> TokenBlocks:
    """Blocks of a text, at most `n_tokens` in all, and behind them that share of random tokens repeated.

    The share is rounded down to whole blocks. A shorter text gives fewer of both. What a tokenizer puts in front of
    text (a beginning-of-sequence token) stands in front of random tokens too. The sequences are the same for every
    text and every seed of a training, others for each split. Errors as for `token_blocks`.
    """
    total, share = -(-n_tokens // context), Fraction(str(repeat_share))  # 0.29 of 100 blocks are 29, in floats 28
    wanted = total - int(share * total)
    blocks = token_blocks(model, text, split=split, n_tokens=wanted * context, context=context, at_most=True)
    if len(blocks) < wanted:
        total = int(len(blocks) / (1 - share))
    count = total - len(blocks)
    if not count:
        return blocks
    body, front = context - blocks.prefix, blocks.tokens[:1, : blocks.prefix]
    drawn = repeated_sequences(MIXED_SEEDS[split], torch.arange(count), body, alphabet_of(model._tokenizer()))
    tokens = torch.cat([blocks.tokens, torch.cat([front.expand(count, -1), drawn], 1)])
    return dataclasses.replace(
        blocks,
        tokens=tokens,
        documents=torch.cat([blocks.documents, torch.full((count,), len(blocks.names))]),
        starts=torch.cat([blocks.starts, torch.tensor([len(blocks) * body])]),
        names=[*blocks.names, NAME],
        sha256=hash_tokens(tokens.numpy()),
        repeat_share=repeat_share,
    )
