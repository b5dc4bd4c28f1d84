"""Feature pairs of one head that its singular vectors mix: independent components inside the head's read space.

Several pairs that are not orthogonal share the span of the top singular vectors, and unwhitening each vector gives a
mixture (planted.py, 20 pairs in a cone: cosine 0.31 raw, 0.77 unwhitened). The span is right, so the mixture can be
undone by what tokens do in it: features are sparse and come on independently. With a = (x - mean)·U the coordinates of
inputs on the top K modes of the query side, and b = (x - mean)·V on the key side,

    a = s_q A_q,  b = s_k A_k        independent components (ops/ica.py), coefficients s of unit variance
    feature ∝ Σ U Fᵀ                 F the filters, s = a Fᵀ: the covariance of the inputs with the coefficient
    a diag(σ) bᵀ = s_q C s_kᵀ        C = A_q diag(σ) A_kᵀ: what each query component adds with each key component

C is as near a permutation as the head is a sum of pairs. Components are paired so that the most of C² is on pairs
(`concentration` says how much), strongest pair first. Both features of a pair point to the side where their rare large
values are, so the sign of the strength means attend or avoid.

There are never more components than modes. A head that holds more features than it has modes (or than are asked for)
gives that many directions nevertheless: each the feature that is strongest along it, mixed with others. Nothing in one
sample proves it; a low concentration, a low stability over halves of the sample (features.py) and `gaussian` (a
coefficient without a shape of its own, which no rotation can tell from another) are its signs.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.ops.ica import Components, independent_components
from clearhead.spectral.theory import unwhiten

ITERATIONS = 200
TOLERANCE = 1e-7
KURTOSIS_ERRORS = 4.0
"""A coefficient counts as Gaussian while its excess kurtosis is within this many standard errors, √(24/n) each."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """K pairs of a query-side and a key-side component, strongest first."""

    query: Float[Tensor, "d k"]
    """Features, unit columns."""
    key: Float[Tensor, "d k"]
    query_reads: Float[Tensor, "d k"]
    """What the inputs are projected on to give the coefficients; unit columns in the span of U."""
    key_reads: Float[Tensor, "d k"]
    strength: Float[Tensor, " k"]
    """Score that the pair adds where both coefficients are one standard deviation above their mean."""
    concentration: float
    """Σ strength² over the sum of all C²: 1 where every component has exactly one partner."""
    converged: bool
    """Whether the iteration came to rest on both sides."""
    gaussian: Bool[Tensor, " k"]
    """Pairs with a coefficient on either side that is Gaussian as far as the sample tells."""


def separate_pairs(
    query_rows: Float[Tensor, "n k"],
    key_rows: Float[Tensor, "n k"],
    U: Float[Tensor, "d k"],
    S: Float[Tensor, " k"],
    V: Float[Tensor, "d k"],
    covariance: Float[Tensor, "d d"],
    seed: int = 0,
) -> Pairs:
    """Independent components of a head's coordinates, as pairs of features; float64, deterministic in `seed`.

    query_rows and key_rows are inputs projected on U and V (their means are taken off here); S is in the units that
    strengths are to have (singular values times the score scale). Raises `ClearheadError` for fewer rows than modes
    times two, and for rows that do not vary.
    """
    n, k = query_rows.shape
    if n < 2 * k:
        raise ClearheadError(f"{n} positions are too few to separate {k} modes; give more text, or fewer modes")
    sides = [_separate(rows.double().cpu(), torch.Generator().manual_seed(seed)) for rows in (query_rows, key_rows)]
    (query, query_gaussian, A_q), (key, key_gaussian, A_k) = sides
    coupling = A_q * S.double().cpu() @ A_k.mT
    left, right = (torch.from_numpy(side) for side in linear_sum_assignment(-coupling.square().numpy()))
    strength = coupling[left, right]
    order = strength.abs().argsort(descending=True)
    left, right, strength = left[order], right[order], strength[order]
    whole = coupling.square().sum()
    query_reads, key_reads = U.double().cpu() @ query.filters[left].mT, V.double().cpu() @ key.filters[right].mT
    return Pairs(
        query=unwhiten(covariance.cpu(), query_reads),
        key=unwhiten(covariance.cpu(), key_reads),
        query_reads=query_reads / query_reads.norm(dim=0),
        key_reads=key_reads / key_reads.norm(dim=0),
        strength=strength,
        concentration=float(strength.square().sum() / whole) if float(whole) > 0 else 0.0,
        converged=query.converged and key.converged,
        gaussian=query_gaussian[left] | key_gaussian[right],
    )


def _separate(rows: Tensor, generator: torch.Generator) -> tuple[Components, Tensor, Tensor]:
    """Components of the rows, which coefficients look Gaussian, and A with rows - mean = (unit-variance s) A."""
    found = independent_components(rows, generator, iterations=ITERATIONS, tolerance=TOLERANCE)
    s = (rows - rows.mean(0)) @ found.filters.mT
    deviation = s.square().mean(0).sqrt()
    excess = (s / deviation).pow(4).mean(0) - 3
    gaussian = excess.abs() < KURTOSIS_ERRORS * (24 / len(rows)) ** 0.5
    return found, gaussian, deviation[:, None] * found.directions
