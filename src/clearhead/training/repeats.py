"""Random tokens that repeat: what a model can predict by induction alone, and how well it does.

A sequence has a period p and tokens drawn uniformly from an alphabet; its number decides both:

    x[n, i] = alphabet[hash(seed, n, i mod p_n)]        p_n uniform in 8..T/2 (T/2 throughout where it is measured)

so a sequence is a function of (seed, number) and never has to be stored. Up to position p nothing can be predicted
(log |alphabet| nats); from p + 1 on, everything can, by whoever finds what followed the same token before.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from clearhead.ops.hash_rng import mix

SHORTEST_PERIOD = 8
MEASURED_SEED = -1  # of no training, so what is measured was never trained on, and is the same in every run


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


@torch.no_grad()
def measure_induction(
    model: PreTrainedModel, alphabet: Int64[Tensor, " a"], context: int, sequences: int
) -> tuple[float, float]:
    """Next-token loss (nats) on the first and on the second half of sequences that repeat once, at T/2.

    The first half is predictions 1..p-1, the second p+1..2p-1: at p itself nothing says that a repetition begins.
    """
    period = context // 2
    tokens = repeated_sequences(MEASURED_SEED, torch.arange(sequences), context, alphabet, period).to(model.device)
    losses = next_token_losses(model, tokens)
    return float(losses[:, : period - 1].mean()), float(losses[:, period : 2 * period - 1].mean())


def next_token_losses(model: Callable[..., Any], tokens: Int64[Tensor, "b t"]) -> Float[Tensor, "b s"]:
    """Loss (nats) of predicting tokens 1..T-1 of each row; [b, t-1]. `model` is called as a transformers model."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)
