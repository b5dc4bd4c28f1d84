"""Independent components of rows: symmetric FastICA with tanh, the one implementation of the project.

    rows - mean = S A        S [n, c] coefficients as independent as possible, A [c, c] unit directions as rows
    S = (rows - mean) Fᵀ

Whiten, then iterate W <- E[tanh(W x) xᵀ] - diag(E[1 - tanh²(W x)]) W and orthonormalise all rows at once (Hyvärinen
1999). Signs make the skew of each coefficient positive, so that the rare large values are positive ones.

It finds at most as many components as there are columns, and cannot part Gaussian coefficients: any rotation of two of
them is as independent as another. `converged` says whether the iteration came to rest; nothing here says that what it
found are the sources.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from clearhead.errors import ClearheadError

SMALLEST_VARIANCE = 1e-6
"""Variances are raised to this share of the largest before whitening, so that empty columns stay finite."""


class Components(NamedTuple):
    """Filters and directions of the components, and how the iteration ended."""

    filters: Float[Tensor, "c c"]
    directions: Float[Tensor, "c c"]
    iterations: int
    converged: bool


def independent_components(
    rows: Float[Tensor, "n c"], generator: Generator, *, iterations: int, tolerance: float = 0.0
) -> Components:
    """Components of `rows`, in their number format, from a random start drawn with `generator`.

    Stops after `iterations`, or once no row of W turns by more than `tolerance` (1 - |cos| between two iterations); 0
    runs all of them. Raises `ClearheadError` for fewer than two rows and for rows that are all the same.
    """
    n, c = rows.shape
    if n < 2:
        raise ClearheadError(f"components need at least two rows, got {n}")
    centred = rows - rows.mean(0)
    variances, axes = torch.linalg.eigh(centred.mT @ centred / n)
    rounding = 10 * torch.finfo(rows.dtype).eps * float(rows.abs().max())
    if not float(variances[-1]) > rounding**2:
        raise ClearheadError(f"all {n} rows are the same, so they have no components; give rows that differ")
    deviation = variances.clamp_min(float(variances.max()) * SMALLEST_VARIANCE).sqrt()
    white = centred @ axes / deviation
    turn = torch.linalg.qr(torch.randn(c, c, generator=generator).to(rows))[0]
    done, converged = 0, False
    while done < iterations and not converged:
        before = turn
        squashed = torch.tanh(white @ turn.mT)
        turn = squashed.mT @ white / n - (1 - squashed.square()).mean(0)[:, None] * turn
        left, _, right = torch.linalg.svd(turn)
        turn = left @ right
        done += 1
        converged = tolerance > 0 and float((1 - (turn * before).sum(-1).abs()).max()) <= tolerance
    skew = (white @ turn.mT).pow(3).mean(0)
    turn = torch.where(skew[:, None] < 0, -turn, turn)
    mixing = turn * deviation @ axes.mT
    size = mixing.norm(dim=-1, keepdim=True)
    return Components((turn / deviation @ axes.mT) * size, mixing / size, done, converged)
