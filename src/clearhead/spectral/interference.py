"""The interference norm ‖E_X‖₂ of a dictionary: how far its features are from not disturbing each other.

The paper (SVF 2602.13524, theorem 2) reports 10 to 55 for dictionaries of GPT-2 and its definition is not known to us.
Two readings, both for N features x_i of unit length in D dimensions, the columns of X:

    gram        E = Xᵀ X - I_N             the inner products of different features:  max(λ_max - 1, 1 - λ_min(Xᵀ X))
    isotropy    E = X Xᵀ - (N/D) I_D       how far the features are from a tight frame: max |λ(X Xᵀ) - N/D|

Both are eigenvalues of X Xᵀ (or Xᵀ X, whichever is smaller; the other has the same and zeros), so no N × N matrix is
formed. A dictionary of random directions has norms of its own, by the edges of the Marchenko–Pastur law

    λ(X Xᵀ) in [(√(N/D) - 1)², (√(N/D) + 1)²]   for N ≥ D

43.3 by the first reading for N = 24,576 and D = 768: only what exceeds it speaks of anisotropy.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import ClearheadError, NonFiniteError

ROWS_AT_ONCE = 4096
"""Features normalised and multiplied at a time."""


class Interference(NamedTuple):
    """‖E_X‖₂ by both readings."""

    gram: float
    isotropy: float


class DictionaryInterference(NamedTuple):
    """The norms of a dictionary, beside those of random directions of its size."""

    n_features: int
    """Features that are not zero; the others have no direction."""
    n_zero: int
    d: int
    found: Interference
    edges: Interference
    """Of an infinitely large random dictionary with this N/D, by the Marchenko–Pastur edges."""
    sampled: Interference
    """Of one random dictionary of this size."""


def measure_interference(features: Float[Tensor, "n d"], seed: int = 0) -> DictionaryInterference:
    """Interference norms of a dictionary with one feature per row, in any number format; lengths do not count.

    Raises `ClearheadError` for a dictionary without a feature that is not zero, `NonFiniteError` for NaN or infinity.
    """
    n, d = features.shape
    if not bool(features.isfinite().all()):
        raise NonFiniteError("the dictionary holds NaN or infinity; restore the file or train again")
    kept = features[features.abs().amax(1) > 0] if n else features
    if not len(kept):
        raise ClearheadError(f"all {n} features of the dictionary are zero, so it has no interference")
    random = torch.randn(len(kept), d, generator=torch.Generator().manual_seed(seed))
    return DictionaryInterference(
        n_features=len(kept),
        n_zero=n - len(kept),
        d=d,
        found=_norms(_spectrum(kept), len(kept), d),
        edges=random_edges(len(kept), d),
        sampled=_norms(_spectrum(random), len(kept), d),
    )


def random_edges(n: int, d: int) -> Interference:
    """What n random unit features in d dimensions have, up to corrections that vanish as both grow."""
    ratio = (n / d) ** 0.5
    low, high = (1 - ratio) ** 2, (1 + ratio) ** 2
    # the larger of the two products has zeros besides: n - d of them in Xᵀ X, d - n in X Xᵀ
    return Interference(
        gram=max(high - 1, 1.0 if n > d else 1 - low), isotropy=max(high - n / d, n / d - (low if n >= d else 0.0))
    )


def _spectrum(features: Float[Tensor, "n d"]) -> Float[Tensor, " e"]:
    """Eigenvalues of the smaller of X Xᵀ and Xᵀ X for unit features, ascending; float64."""
    n, d = features.shape
    if n < d:
        unit = _unit(features)
        return torch.linalg.eigvalsh(unit @ unit.mT)
    product = torch.zeros(d, d, dtype=torch.float64)
    for rows in features.split(ROWS_AT_ONCE):
        unit = _unit(rows)
        product += unit.mT @ unit
    return torch.linalg.eigvalsh(product)


def _unit(rows: Tensor) -> Float[Tensor, "n d"]:
    rows = rows.detach().cpu().double()
    rows = rows / rows.abs().amax(1, keepdim=True)  # so that squares of very small or large entries stay in range
    return rows / rows.norm(dim=1, keepdim=True)


def _norms(spectrum: Tensor, n: int, d: int) -> Interference:
    low, high = float(spectrum[0]), float(spectrum[-1])
    return Interference(
        gram=max(high - 1, 1 - (0.0 if n > d else low)), isotropy=max(high - n / d, n / d - (0.0 if n < d else low))
    )
