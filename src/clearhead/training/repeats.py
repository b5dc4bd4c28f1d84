"""How well a model predicts random tokens that repeat (data/repeats.py), and the losses that say so."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from clearhead.data.repeats import MEASURED_SEED, repeated_sequences


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
