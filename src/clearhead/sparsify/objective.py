"""What sparse post-training minimises and what it bounds: the price of open edges, cross-entropy, distillation.

    E_lh = Σ expected / Σ visible         share of edges open in expectation, over the batch's visible pairs
    CE   = mean over predicted tokens of −log p(token | tokens before it)                        (nats)
    KL   = mean over predicted tokens of Σ_v p_teacher log(p_teacher / p_student)                (nats)

(arXiv 2512.05865). Edges can be priced by length: with a slope an edge from i to j counts 1 + slope (i − j) times, in E
and in what E is a share of. The penalties on E:

    mean            mean over layers and heads
    head-budget     mean over heads of max(0, E_lh − budget)
    layer-budget    mean over layers of max(0, mean_h E_lh − budget)

Not here: the multiplier (geco.py), the penalty on open tiles (ops/open_tiles.py).
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.gates import Tally

Penalty = Literal["mean", "head-budget", "layer-budget"]
ROWS = 256
"""Tokens whose logits are in float32 at once."""
IGNORED = -100


def cross_entropy(logits: Float[Tensor, "b t v"], tokens: Int64[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Mean loss (nats) of predicting tokens 1..T−1 of each row, in float32 at least; the last logits are not used."""
    targets = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def distillation(logits: Float[Tensor, "b t v"], teacher: Float[Tensor, "b t v"]) -> Float[Tensor, ""]:
    """Mean KL(teacher ‖ student) per predicted token (nats); the last position of each row predicts none.

    Gradients reach the student's `logits` alone. Raises `ClearheadError` for two shapes.
    """
    if logits.shape != teacher.shape or logits.dim() != 3 or logits.shape[1] < 2:
        raise ClearheadError(
            f"distillation got logits {list(logits.shape)} and a teacher's {list(teacher.shape)}; expected two of "
            "[batch, positions, vocabulary] with at least 2 positions"
        )
    return _Divergence.apply(logits, teacher.detach())  # pyright: ignore[reportReturnType]


class _Divergence(torch.autograd.Function):
    """`distillation`, some rows at a time in both passes: one whole tensor, the gradient, is all that is made."""

    @staticmethod
    def forward(ctx, logits, teacher):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(logits, teacher)
        total = logits.new_zeros((), dtype=torch.float64)
        for student, model in _pieces(logits, teacher):
            log_p, log_q = (_wide(part).log_softmax(-1) for part in (model, student))
            total += F.kl_div(log_q, log_p, reduction="sum", log_target=True).double()
        dtype = logits.dtype if logits.dtype == torch.float64 else torch.float32
        return (total / _predicted(logits)).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, teacher = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        share = upstream / _predicted(logits)
        for student, model, place in _pieces(logits, teacher, gradient):
            place.copy_((_wide(student).softmax(-1) - _wide(model).softmax(-1)) * share)
        return gradient, None


def _pieces(*tensors: Float[Tensor, "b t v"]):
    """The predicting positions of the tensors alike, at most `ROWS` at a time."""
    for rows in zip(*tensors, strict=True):
        yield from zip(*(row[:-1].split(ROWS) for row in rows), strict=True)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _predicted(logits: Float[Tensor, "b t v"]) -> int:
    return logits.shape[0] * (logits.shape[1] - 1)


def edge_shares(tally: Tally, slope: float = 0.0) -> Float[Tensor, "l h"]:
    """Expected share of open edges by layer and head, over all visible pairs of the batch; differentiable.

    `slope`: the price by length that the gates were drawn with, so that with all gates open every share is 1.
    Raises `ClearheadError` where nothing was counted.
    """
    if not tally:
        raise ClearheadError("no edges were counted; run the model inside `with gates.sampled(...) as tally:`")
    shares = []
    for layer in sorted(tally):
        count = tally[layer]
        seen = count.visible.to(count.expected.dtype)
        whole = (seen + slope * seen * (seen - 1) / 2).expand(len(count.expected), -1).sum()
        shares.append(count.expected.sum((0, 2)) / whole)
    return torch.stack(shares)


def edge_penalty(shares: Float[Tensor, "l h"], kind: Penalty, budget: float = 0.0) -> Float[Tensor, ""]:
    """What the shares cost; a budget leaves alone what is not above it. Raises `UnknownNameError` for another kind."""
    if kind == "mean":
        return shares.mean()
    if kind == "head-budget":
        return (shares - budget).relu().mean()
    if kind == "layer-budget":
        return (shares.mean(1) - budget).relu().mean()
    raise UnknownNameError("edge penalty", kind, get_args(Penalty))
