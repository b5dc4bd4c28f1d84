"""Dead units: counted by tokens since they last fired, and revived by an auxiliary loss.

AuxK (arXiv 2406.04093, appendix A.2): the k_aux most active of the dead units predict what the live ones left over,

    e = y - y_hat (detached)        L_aux = || e - sum_{n in top-k_aux of the dead} z_n w_o[n] ||^2

so units (heads of a Lorsa, features) that never win the top-K still receive gradient. The sum is not divided by |e|^2:
targets are normalised once for the whole data set, and a quotient of two batch means would make two processes differ
from one.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.ops.sparse import topk_decode


class DeadUnits:
    """Tokens since each unit was last active, over all processes."""

    def __init__(self, n_units: int, after_tokens: int, device: torch.device | str = "cpu"):
        self.silent_for = torch.zeros(n_units, dtype=torch.int64, device=device)
        self.after_tokens = after_tokens

    def update(self, fired: Bool[Tensor, " n"], n_tokens: int) -> None:
        """Note which units were active on `n_tokens` further tokens."""
        self.silent_for += n_tokens
        self.silent_for[fired] = 0

    @property
    def units(self) -> Int[Tensor, " m"]:
        """Indices of the units that count as dead."""
        return (self.silent_for > self.after_tokens).nonzero().squeeze(1)


def fired(values: Float[Tensor, "r k"], units: Int[Tensor, "r k"], n_units: int) -> Bool[Tensor, " n"]:
    """Which units have a non-zero activation anywhere in the rows."""
    seen = torch.zeros(n_units, dtype=torch.bool, device=values.device)
    seen[units[values != 0]] = True
    return seen


def aux_loss(
    residual: Float[Tensor, "r d"],
    pre: Float[Tensor, "r n"],
    rows: Float[Tensor, "m d"],
    dead: Int[Tensor, " m"],
    k_aux: int,
) -> Float[Tensor, ""]:
    """Mean over tokens of the squared error of the dead units on the residual; 0 without dead units.

    `rows` is what the dead units write, in the order of `dead`.
    """
    if not len(dead) or not k_aux:
        return residual.new_zeros(())
    _, _, guess = topk_decode(pre[:, dead].contiguous(), min(k_aux, len(dead)), rows.contiguous())
    return (residual.detach() - guess).square().sum(-1).mean()
