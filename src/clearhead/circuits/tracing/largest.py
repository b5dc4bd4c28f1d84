"""The largest entries of a product U · Vᵀ, and how many of them hold a share of its mass, without forming it whole.

Rows of the product are computed in blocks of at most `CHUNK` numbers. Both answers are exact. The largest entries are
looked for among rows and columns long enough to hold one: |U_i · V_j| ≤ |U_i| |V_j|. The count is by a histogram of |S|
first, its bins read off the bits of the numbers, then by sorting the entries of the one bin where the share is reached.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import ClearheadError

CHUNK = 1 << 22
"""Numbers of the product held at once."""
BINS = 4096
BINS_PER_OCTAVE = 64
"""The histogram spans 64 factors of 2 below the largest entry; what is smaller shares the lowest bin."""
PROBE = 512
"""Longest rows and columns whose product bounds from below what is among the largest."""


def largest_entries(U: Float[Tensor, "n r"], V: Float[Tensor, "k r"], count: int) -> list[tuple[int, int, float]]:
    """Row, column and value of the `count` largest |U · Vᵀ|, zeros left out."""
    long, wide = U.norm(dim=1), V.norm(dim=1)
    probe = (U[long.topk(min(PROBE, len(U))).indices] @ V[wide.topk(min(PROBE, len(V))).indices].T).abs().flatten()
    # rounded products may exceed the bound by as much, so it is taken a little lower
    least = probe.topk(count).values[-1] * (1 - 1e-4) if 0 < count <= len(probe) else probe.new_zeros(())
    rows, columns = (long * wide.max() >= least).nonzero()[:, 0], (wide * long.max() >= least).nonzero()[:, 0]
    kept = U.new_empty(0), rows.new_empty(0), rows.new_empty(0)
    for some, block in _blocks(U[rows], V[columns]):
        i, j = (block.abs() >= least).nonzero(as_tuple=True)
        values = torch.cat([kept[0], block[i, j]])
        first, second = torch.cat([kept[1], rows[some][i]]), torch.cat([kept[2], columns[j]])
        top = values.abs().topk(min(count, len(values))).indices
        kept = values[top], first[top], second[top]
    found = zip(kept[1].tolist(), kept[2].tolist(), kept[0].tolist(), strict=True)
    return [(i, j, value) for i, j, value in found if value != 0]


def count_for_share(U: Float[Tensor, "n r"], V: Float[Tensor, "k r"], share: float) -> int:
    """The fewest entries of U · Vᵀ that hold `share` of Σ |U · Vᵀ|; 0 where all are 0.

    Raises `ClearheadError` for a share outside of 0 to 1.
    """
    U, V = U[_occupied(U)], V[_occupied(V)]
    found = largest_entries(U, V, 1) if len(U) and len(V) else []
    if not found:
        return count_carriers(U.new_zeros(0), share)
    largest = abs(found[0][2])
    number = torch.zeros(BINS, dtype=torch.int64, device=U.device)
    mass = torch.zeros(BINS, dtype=torch.float64, device=U.device)
    for _, block in _blocks(U, V):
        size = block.abs().flatten()
        where = _bin(size, largest)
        number += torch.bincount(where, minlength=BINS)
        mass += torch.bincount(where, size.double(), minlength=BINS)
    reached = mass.cumsum(0)
    total = float(reached[-1])
    last = int((reached < share * total * (1 - 1e-12)).sum().clamp_max(BINS - 1))
    before = int(number[:last].sum())
    inside = torch.cat([size[_bin(size, largest) == last] for _, b in _blocks(U, V) for size in (b.abs().flatten(),)])
    missing = share * total - float(mass[:last].sum())
    return before + count_carriers(inside, min(1.0, max(0.0, missing / float(inside.sum(dtype=torch.float64)))))


def count_carriers(weights: Float[Tensor, "*n"], share: float = 0.9) -> int:
    """The fewest entries that hold `share` of Σ |weights|: heads of an edge, (query, key) pairs of an edge.

    Raises `ClearheadError` for a share outside of 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ClearheadError(f"share must lie in [0, 1], as in 0.9 for 90 % of the weight; got {share}")
    size = weights.abs().flatten().double().sort(descending=True).values
    if not len(size) or size[0] == 0 or share == 0:
        return 0
    return int((size.cumsum(0) < share * size.sum() * (1 - 1e-12)).sum()) + 1


def _bin(size: Tensor, largest: float) -> Tensor:
    """0 for the largest entries; equal sizes share a bin. The bits of positive numbers are in the numbers' order."""
    whole, mantissa = (torch.int64, 52) if size.dtype == torch.float64 else (torch.int32, 23)
    shift = mantissa - BINS_PER_OCTAVE.bit_length() + 1
    bits = size.view(whole) >> shift
    top = torch.tensor([largest], dtype=size.dtype, device=size.device).view(whole) >> shift
    return (top - bits).clamp(0, BINS - 1)


def _occupied(x: Tensor) -> Tensor:
    return x.abs().amax(1).nonzero()[:, 0]


def _blocks(U: Tensor, V: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for some in torch.arange(len(U), device=U.device).split(max(1, CHUNK // max(1, len(V)))):
        if len(some) and len(V):
            yield some, U[some] @ V.T
