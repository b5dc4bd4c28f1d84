"""Whose output an error is: by original head, and inside or outside of what the heads wrote.

The layer's output is y = sum_m h_m + b over its original heads. With means over tokens taken away,

    output_share[m] = sum_i h_m,i . y_i / sum_i |y_i|^2          sums to 1 over the heads
    error_share[m]  = sum_i h_m,i . e_i / sum_i y_i . e_i        sums to 1 over the heads
    unexplained[m]  = sum_i h_m,i . e_i / sum_i h_m,i . y_i      their ratio times sum y . e / sum |y|^2

`unexplained` says which part of what head m adds to the output is missing from the prediction; its mean, weighted by
`output_share`, is close to the FVU (equal where the prediction is a least-squares one, so that e . y_hat sums to 0).

    inside = sum_i |P_i e_i|^2 / sum_i |e_i|^2        P_i projects on the span of h_1,i .. h_H,i (and b) at this token

An error inside the span is a wrong amount of what the heads wrote; outside lies only what the prediction invented,
since y itself is inside. `inside_other` projects on the span at another token: what directions that have nothing to do
with this token would hold.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

BIAS = 1e-3  # of the output's length: below it, what the heads' outputs do not sum to is rounding


class HeadShares:
    """Streaming sums for the errors of several dictionaries of one layer."""

    def __init__(self, n_heads: int, d_model: int, n_errors: int):
        self.n = 0
        self.sum_h = torch.zeros(n_heads, d_model, dtype=torch.float64)
        self.sum_y = torch.zeros(d_model, dtype=torch.float64)
        self.sum_e = torch.zeros(n_errors, d_model, dtype=torch.float64)
        self.hy = torch.zeros(n_heads, dtype=torch.float64)
        self.he = torch.zeros(n_errors, n_heads, dtype=torch.float64)
        self.inside = torch.zeros(n_errors, dtype=torch.float64)
        self.inside_other = torch.zeros(n_errors, dtype=torch.float64)
        self.squares = torch.zeros(n_errors, dtype=torch.float64)

    def add(
        self,
        heads: Float[Tensor, "n h d"],
        y: Float[Tensor, "n d"],
        errors: Float[Tensor, "e n d"],
        other: Int[Tensor, " n"],
    ) -> None:
        """Take in tokens: heads' outputs, the layer's, the errors; `other` is a token for each, for the control."""
        self.n += len(y)
        self.sum_h += heads.sum(0).double().cpu()
        self.sum_y += y.sum(0).double().cpu()
        self.sum_e += errors.sum(1).double().cpu()
        self.hy += torch.einsum("nhd,nd->h", heads, y).double().cpu()
        self.he += torch.einsum("nhd,end->eh", heads, errors).double().cpu()
        self.squares += errors.square().sum((1, 2)).double().cpu()
        rows = with_bias(heads, y)
        inverse = inverse_gram(rows)
        self.inside += squares_inside(rows, inverse, errors)
        self.inside_other += squares_inside(rows[other], inverse[other], errors)

    def result(self) -> dict[str, Any]:
        """Shares by head, then for every error; None where an error or the output does not vary."""
        hy = self.hy - self.sum_h @ self.sum_y / self.n
        he = self.he - self.sum_e @ self.sum_h.T / self.n
        errors = []
        for own, square, inside, other in zip(he, self.squares, self.inside, self.inside_other, strict=True):
            errors.append(
                {
                    "error_share": _divided(own, own.sum()),
                    "unexplained": _divided(own, hy),
                    "inside": float(inside / square) if square > 0 else None,
                    "inside_other": float(other / square) if square > 0 else None,
                }
            )
        return {"output_share": _divided(hy, hy.sum()), "errors": errors}


def with_bias(heads: Float[Tensor, "n h d"], y: Float[Tensor, "n d"]) -> Float[Tensor, "n m d"]:
    """The heads' outputs and, where the layer has one, its output bias, which every token shares."""
    bias = (y - heads.sum(1)).mean(0)
    if float(bias.norm()) <= BIAS * float(y.norm(dim=-1).mean()):
        return heads
    return torch.cat([heads, bias.expand(len(y), 1, -1)], 1)


def inverse_gram(rows: Float[Tensor, "n m d"]) -> Float[Tensor, "n m m"]:
    """Pseudo-inverses of the rows' inner products at every token, float64 on the CPU."""
    gram = (rows @ rows.mT).double().cpu()
    return torch.linalg.pinv(gram, rtol=1e-6, hermitian=True)


def squares_inside(
    rows: Float[Tensor, "n m d"], inverse: Float[Tensor, "n m m"], errors: Float[Tensor, "e n d"]
) -> Float[Tensor, " e"]:
    """Sum over tokens of the squared length of the errors' projections on the span of the rows."""
    seen = torch.einsum("nmd,end->enm", rows, errors).double().cpu()
    return torch.einsum("enm,nmk,enk->e", seen, inverse, seen)


def _divided(values: Tensor, by: Tensor) -> list[float | None]:
    by = by.expand_as(values)
    return [float(a / b) if b != 0 else None for a, b in zip(values, by, strict=True)]
