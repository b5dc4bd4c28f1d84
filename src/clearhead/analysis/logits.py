"""Direct logit effects: which next tokens a unit's write vector raises and lowers.

    effect[n, v] = w_o[n] · W_U[:, v] − mean over v

with the final norm's gain folded into W_U (`model.norms.unembedding`). The mean is removed because adding a constant
to all logits changes no probability. The effect is per unit of activation and before division by the final norm's
scale, so a token's place in the list is exact on the direct path and its size comparable between units. Effects
through later layers are not here (that is tracing).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import ClearheadError

LOGITS_AT_ONCE = 2**25
"""Logits computed at a time: 128 MiB in float32."""


class LogitEffects(NamedTuple):
    """The k logits each unit raises most and the k it lowers most, strongest first."""

    raised: Float[Tensor, "n k"]
    raised_ids: Int[Tensor, "n k"]
    lowered: Float[Tensor, "n k"]
    lowered_ids: Int[Tensor, "n k"]


@torch.no_grad()
def logit_effects(write: Float[Tensor, "n d"], W_U: Float[Tensor, "d v"], k: int = 10) -> LogitEffects:
    """Direct logit effects of n write vectors; raises `ClearheadError` for k above the vocabulary or other widths."""
    n, v = len(write), W_U.shape[1]
    if not 1 <= k <= v:
        raise ClearheadError(f"k must lie between 1 and the vocabulary's {v} tokens; got {k}")
    if write.shape[1] != W_U.shape[0]:
        raise ClearheadError(f"write vectors have width {write.shape[1]}, the unembedding reads {W_U.shape[0]}")
    mean = write @ W_U.mean(1)
    parts = []
    for rows, shift in zip(
        write.split(max(1, LOGITS_AT_ONCE // v)), mean.split(max(1, LOGITS_AT_ONCE // v)), strict=True
    ):
        logits = rows @ W_U
        high = logits.topk(k)
        low = logits.topk(k, largest=False)
        parts.append((high.values - shift[:, None], high.indices, low.values - shift[:, None], low.indices))
    if not n:
        empty = write.new_zeros(0, k)
        return LogitEffects(empty, empty.long(), empty, empty.long())
    return LogitEffects(*(torch.cat(part) for part in zip(*parts, strict=True)))
