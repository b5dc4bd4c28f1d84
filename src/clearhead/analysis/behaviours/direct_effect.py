"""How far a write raises a token's logit on the direct path, in standard deviations over the vocabulary.

    effect(w, v) = ( w · W_U[v] − mean over the vocabulary ) / standard deviation over the vocabulary

with the final norm's gain folded into W_U and its scale left out, which both sides of the division share. The two
moments come from the mean and the covariance of the rows of W_U (of evenly spaced ones in a large vocabulary), so that
no logit but those asked for is computed. Effects through later layers are not here.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.analysis.behaviours.behaviour import Probe
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.norms import unembedding
from clearhead.ops.hash_rng import mix

MOST_ROWS = 4096
"""Rows of the vocabulary that the two moments are measured on, at most."""


LEANS = (0.9, 0.7, 0.5)
"""How far the writes of planted units lie along the logit direction they are for (cosines)."""


@dataclass(frozen=True, eq=False)
class DirectEffect:
    """An unembedding and the moments of its rows."""

    W_U: Float[Tensor, "v d"]
    mean: Float[Tensor, " d"]
    covariance: Float[Tensor, "d d"]

    @classmethod
    def of_probe(cls, probe: Probe) -> "DirectEffect":
        """That of a probe for detectors of what units write; `ClearheadError` for a probe without one."""
        if probe.unembedding is None:
            raise ClearheadError(f"the probe {probe.name!r} has no logit directions; give it `unembedding`")
        rows = probe.unembedding[:: max(1, len(probe.unembedding) // MOST_ROWS)]
        mean = rows.mean(0)
        return cls(probe.unembedding, mean, (rows - mean).T @ (rows - mean) / len(rows))

    def __call__(self, writes: Float[Tensor, "m d"], tokens: Int[Tensor, " k"]) -> Float[Tensor, "m k"]:
        """Standardised effect of each write on each of these tokens; 0 for a write that moves no logit."""
        writes = writes.to(self.W_U.dtype)
        raw = writes @ (self.W_U[tokens] - self.mean).T
        variance = ((writes @ self.covariance) * writes).sum(-1).clamp_min(0)
        return raw / variance.sqrt().clamp_min(torch.finfo(raw.dtype).tiny)[:, None]


def lean(directions: Float[Tensor, "v d"], tokens: Int[Tensor, " m"], seed: int, share: float) -> Float[Tensor, "m d"]:
    """Writes of length 1 that raise these tokens, as a planted unit does: `share` of it along them, the rest its own.

    What a unit adds of its own differs from token to token.
    """
    towards = F.normalize(directions[tokens] - directions.mean(0), dim=-1)
    own = torch.empty_like(towards)
    for token in tokens.unique().tolist():
        generator = torch.Generator().manual_seed(int(mix(seed, token)[0] >> np.uint64(1)))
        own[tokens == token] = torch.randn(own.shape[1], generator=generator)
    return F.normalize(share * towards + (1 - share**2) ** 0.5 * F.normalize(own, dim=-1), dim=-1)


@torch.no_grad()
def logit_directions(model: Model) -> Float[Tensor, "v d"]:
    """W_U of a model with the final norm folded in, one row per token."""
    return unembedding(model)[0].detach().T.contiguous()
