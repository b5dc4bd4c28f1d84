"""What singular vectors of a head can say about features: the closed forms behind the spectral lens.

Features are the columns x_i of X (query side) and y_j of Y (key side); Σ_X = X Xᵀ, Σ_Y = Y Yᵀ. A head with product Ω
fits target logits T when x_iᵀ Ω y_j ≈ T_ij for all i, j.

Stated by the paper (SVF, arXiv 2602.13524), known to us from notes about it and not from its proofs:

    theorem 1     T = e_q e_kᵀ, any geometry:   u₁ ∝ Σ_X⁻¹ x_q,   v₁ ∝ Σ_Y⁻¹ y_k
    corollary 1   Σ ∝ I (a tight frame):        u₁ ∝ x_q,          v₁ ∝ y_k
    theorem 2     alignment holds approximately while the interference ‖E_X‖₂ is bounded; the constant is unknown to us
    theorem 3     with Ω fixed, the best features are orthogonal to the attended ones

Derived here, and tested against brute force:

    least squares     min_Ω ‖Xᵀ Ω Y − T‖_F   ⇒   Ω* = Σ_X⁻¹ X T Yᵀ Σ_Y⁻¹,  which gives theorem 1 with
                      σ₁ = |Σ_X⁻¹ x_q| |Σ_Y⁻¹ y_k|
    unwhitening       x ∝ Σ u. The direction matters: Σ⁻¹ whitens once more, it does not undo what the head did
    floor             cos(u₁, x) ≥ 2√κ / (1 + κ), κ = λ_max / λ_min of Σ (Kantorovich), in the place of theorem 2
    theorem 3         in a form that can be tested: x_iᵀ Ω y_j = T_ij with Ω = σ u vᵀ forces w_i·u = 0 for all i ≠ q and
                      w_j·v = 0 for all j ≠ k
    softmax           a head trained by cross-entropy over keys is blind to what all keys share: its keys are fitted by
                      their covariance, its queries by their second moment (`softmax_query_direction`)

Everything is computed in float64. Not here: features of real models, whose Σ is estimated from activations (whiten.py),
and the interference norm of dictionaries (interference.py).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import ClearheadError


class Mode(NamedTuple):
    """One singular triple: Ω = sigma · u vᵀ."""

    u: Float[Tensor, " d"]
    sigma: float
    v: Float[Tensor, " d"]


class Moments(NamedTuple):
    """Of one feature's value: its variance, and the square of its mean."""

    variance: float
    squared_mean: float


def least_squares(X: Float[Tensor, "d n"], Y: Float[Tensor, "e m"], T: Float[Tensor, "n m"]) -> Float[Tensor, "d e"]:
    """Ω* of least norm among those that minimise ‖Xᵀ Ω Y − T‖_F.

    Where the features do not span the space, Ω* is zero on the rest, which no token reaches.
    """
    return torch.linalg.pinv(X.double().mT) @ T.double() @ torch.linalg.pinv(Y.double())


def whitened(X: Float[Tensor, "d n"]) -> Float[Tensor, "d n"]:
    """Σ⁻¹ x_i in column i: the direction by which a head reads feature i (theorem 1); not normalised."""
    return torch.linalg.pinv(X.double().mT)


def single_pair(X: Float[Tensor, "d n"], Y: Float[Tensor, "e m"], query: int, key: int, target: float = 1.0) -> Mode:
    """The only mode of Ω* when the target logit is `target` for features x_query and y_key, else 0 (theorem 1)."""
    left, right = whitened(X)[:, query], whitened(Y)[:, key]
    return Mode(left / left.norm(), target * float(left.norm() * right.norm()), right / right.norm())


def alignment(X: Float[Tensor, "d n"]) -> Float[Tensor, " n"]:
    """cos(u₁, x_i) = xᵀ Σ⁻¹ x / (|x| |Σ⁻¹ x|) if feature i were the planted one: what raw singular vectors recover."""
    X, read = X.double(), whitened(X)
    return (X * read).sum(0) / (X.norm(dim=0) * read.norm(dim=0))


def alignment_floor(covariance: Float[Tensor, "d d"]) -> float:
    """The smallest cos(u₁, x) that any feature can have under this Σ: 2√κ / (1 + κ).

    For Σ = α I + E with ‖E‖₂ = ε < α this is at least √(1 − (ε/α)²). It is 1 for a tight frame, and 0 where Σ is
    singular, which promises nothing.
    """
    spectrum = torch.linalg.eigvalsh(covariance.double())
    low, high = spectrum[0].clamp_min(0), spectrum[-1]
    if float(high) <= 0:
        raise ClearheadError("the covariance is zero or not positive: give X·Xᵀ of features that are not all zero")
    return float(2 * (low * high).sqrt() / (low + high))


def unwhiten(covariance: Float[Tensor, "d d"], directions: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
    """Features recovered from singular vectors: Σ u, each column of unit length.

    Σ is X Xᵀ where the features are known, and the *centred* covariance of the head's inputs where they are not: the
    uncentred second moment of non-negative features is mostly their mean, and pulls query directions towards it.
    Exact for one pair. Several pairs that are not orthogonal come back as a mixture (see ica.py).
    """
    recovered = covariance.double() @ directions.double()
    return recovered / recovered.norm(dim=0).clamp_min(torch.finfo(torch.float64).tiny)


def bernoulli_uniform(density: float) -> Moments:
    """Moments of a feature that is uniform on [0, 1] with probability `density`, else 0."""
    return Moments(variance=density / 3 - density**2 / 4, squared_mean=density**2 / 4)


def softmax_query_direction(X: Float[Tensor, "d n"], query: int, moments: Moments) -> Float[Tensor, " d"]:
    """u₁ of a head trained by cross-entropy on independent non-negative features, of unit length.

        u₁ ∝ (a Σ + b h hᵀ)⁻¹ (a x + b h) ∝ Σ⁻¹ x + [g (1 − c) / (1 + g q)] Σ⁻¹ h          (Sherman and Morrison)

    with a and b the `moments`, h = Σ_i x_i, g = b/a, q = hᵀ Σ⁻¹ h, c = hᵀ Σ⁻¹ x. The correction vanishes when there are
    as many features as dimensions (c = 1). Keys need none: v₁ ∝ Σ⁻¹ y, since softmax ignores what all keys share.
    To second order in the logits; derived here.
    """
    X, read = X.double(), whitened(X)
    h, along = X.sum(1), read.sum(1)
    g = moments.squared_mean / moments.variance
    direction = read[:, query] + g * (1 - h @ read[:, query]) / (1 + g * (h @ along)) * along
    return direction / direction.norm()


def orthogonality_gap(W: Float[Tensor, "d n"], mode: Mode, query: int, key: int) -> float:
    """How far features W are from what theorem 3 demands of them under a frozen Ω = σ u vᵀ.

    The largest of |w_i·u| / |w_i| over i ≠ query and |w_j·v| / |w_j| over j ≠ key: 0 where Wᵀ Ω W is zero but for the
    planted pair. Proof: with w_query·u and w_key·v not zero, T_ij = 0 in column `key` leaves w_i·u = 0, and in row
    `query` w_j·v = 0. So a head whose modes are the attended features pushes every other feature out of both.
    """
    unit = W.double() / W.double().norm(dim=0)
    left, right = (mode.u.double() @ unit).abs(), (mode.v.double() @ unit).abs()
    others_left = torch.cat([left[:query], left[query + 1 :]])
    others_right = torch.cat([right[:key], right[key + 1 :]])
    return float(torch.maximum(others_left.max(), others_right.max()))
