"""What all dictionaries share between their pre-activations and their codes: which units stay active.

    topk, signed-topk   the k largest (by size, for signed) of each row                     codes of k columns
    batchtopk           the k * rows largest of a batch; a fixed threshold once trained     a column for every unit
    jumprelu            z * [z > exp(log_threshold)]                                        a column for every unit
    relu                max(z, 0)                                                           a column for every unit

`compact` brings codes with a column for every unit down to the few that are active.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.ops.topk import batch_topk, jumprelu, topk

Activation = Literal["topk", "signed-topk", "batchtopk", "jumprelu", "relu"]
ROW_SPARSE = ("topk", "signed-topk")  # a fixed number of units per token: codes and decoding touch k rows only


class Codes(NamedTuple):
    """Active features per token; where fewer are active than the last axis holds, the rest have value 0."""

    values: Float[Tensor, "*rows k"]
    features: Int[Tensor, "*rows k"]


class Coded(NamedTuple):
    """What one forward pass of a transcoder, SAE or cross-layer transcoder computes."""

    y: Float[Tensor, "*rows d"]
    """Prediction of the output."""
    pre: Float[Tensor, "*rows n"]
    """Pre-activations of all features."""
    codes: Codes
    """Activations; for relu, jumprelu and batchtopk all features are listed and most values are 0."""


def activate(
    gate: Float[Tensor, "r n"],
    k: int,
    kind: Activation,
    *,
    training: bool = False,
    threshold: Tensor | None = None,
    log_threshold: Float[Tensor, " n"] | None = None,
    bandwidth: float = 0.0,
    through_all: bool = False,
) -> tuple[Float[Tensor, "r m"], Int[Tensor, "r m"]]:
    """Values and units that stay active: k columns for the top-k kinds, all n otherwise.

    batchtopk uses `threshold` when it is not training and one has been learned (above 0). `through_all` is the
    gradient of `jumprelu`'s gate to z as well as to the threshold.
    """
    if kind in ROW_SPARSE:
        return topk(gate, k, signed=kind == "signed-topk")
    if kind == "relu":
        values = F.relu(gate)
    elif kind == "jumprelu":
        assert log_threshold is not None
        values = jumprelu(gate, log_threshold, bandwidth, through_all=through_all)
    elif training or threshold is None or float(threshold) == 0.0:
        values = batch_topk(gate, k)
    else:
        values = torch.where(gate >= threshold, F.relu(gate), 0.0)
    return values, torch.arange(gate.shape[-1], device=gate.device).expand(len(gate), -1)


def compact(values: Float[Tensor, "r n"], units: Int[Tensor, "r n"]) -> tuple[Tensor, Tensor]:
    """The same codes with as few columns as the busiest row needs (at least one)."""
    busiest = max(1, int((values != 0).sum(-1).max())) if len(values) else 1
    order = values.abs().topk(busiest, dim=-1).indices
    return values.gather(-1, order), units.gather(-1, order)
