"""Where a post-training starts: the loss of the dense model, and gate biases under which the model is still intact.

    CE_base = mean next-token loss with all gates open                               (nats)
    b_h: the smallest bias with Σ_ij P_ij σ(S_ij + b_h) / Σ_ij P_ij ≥ kept           per layer and head

P is the dense softmax. Gates that start closed would raise the loss by nats at once, and the multiplier of the
constraint would wind up before the model has learned anything.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from clearhead.model.gates import Gates
from clearhead.training.repeats import next_token_losses

if TYPE_CHECKING:
    from clearhead.model.access import Model

HALVINGS = 40
LONGEST = 512
"""Tokens of a block that are looked at."""
LOW, HIGH = -60.0, 60.0


@torch.no_grad()
def mean_loss(model: "Model", blocks: Int64[Tensor, "n t"], batch: int = 16) -> float:
    """Mean next-token loss of the blocks (nats), under whatever the gates are at the moment."""
    with model.evaluating():
        parts = [next_token_losses(model.hf, part.to(model.device)).double().sum() for part in blocks.split(batch)]
    return float(torch.stack(parts).sum()) / (blocks.shape[0] * (blocks.shape[1] - 1))


@torch.no_grad()
def opening_bias(model: "Model", gates: Gates, blocks: Int64[Tensor, "n t"], kept: float) -> Float[Tensor, "l h"]:
    """For every layer and head the bias at which the gates let `kept` of its softmax mass through on these blocks."""
    found = []
    for layer in gates.layers:  # one at a time: what is laid out grows with the square of the sequence
        scores, mass = [], []
        for block in blocks[:, :LONGEST].split(1):
            with gates.opened():
                run = model.run(block.to(model.device), read=[f"scores.{layer}", f"pattern.{layer}"])
            seen = torch.ones(block.shape[1], block.shape[1], dtype=torch.bool, device=model.device).tril()
            scores.append(run[f"scores.{layer}"][0, :, seen].float())
            mass.append(run[f"pattern.{layer}"][0, :, seen].float())
        found.append(_bisect(torch.cat(scores, 1), torch.cat(mass, 1), kept))
    return torch.stack(found)


def _bisect(scores: Float[Tensor, "h n"], mass: Float[Tensor, "h n"], kept: float) -> Float[Tensor, " h"]:
    """The bias of each head; masked scores (of windows) have no mass and do not count."""
    low = torch.full((len(scores), 1), LOW, device=scores.device)
    high = torch.full_like(low, HIGH)
    total = mass.sum(1, keepdim=True)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = (mass * (scores + middle).sigmoid()).sum(1, keepdim=True) >= kept * total
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high[:, 0]
