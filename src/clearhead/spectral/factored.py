"""A low-rank product A·Bᵀ kept as its factors, and its singular value decomposition without ever multiplying it out.

    A = Q₁R₁,  B = Q₂R₂,  R₁R₂ᵀ = u S vᵀ   ⇒   A·Bᵀ = (Q₁u) S (Q₂v)ᵀ        O(d r² + r³) instead of O(d³)

Every decomposition is checked against what it decomposes, because LAPACK's divide-and-conquer driver has been seen to
return wrong vectors without an error; one that fails the check is repeated with another driver. Singular values that
lie too close to be told apart are flagged: there only the space they span means something, not the single vectors.
Signs are canonical (the largest entry of each left vector is positive), so that decompositions of one product agree.

Not here: which weights are multiplied (attention_modes.py).
"""

from dataclasses import dataclass, replace

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.errors import ClearheadError, NonFiniteError

TOLERANCE = 1e-4
"""Largest error of a decomposition, relative to the largest singular value, that counts as converged."""
GAP = 1e-3
"""Neighbouring singular values closer than this share of their own size are flagged: a perturbation of that size turns
their vectors into each other (Davis and Kahan: angle ≈ perturbation / gap)."""


@dataclass(frozen=True, eq=False)
class FactoredSVD:
    """U·diag(S)·Vᵀ of a product, with how far it can be trusted."""

    U: Float[Tensor, "*b m r"]
    S: Float[Tensor, "*b r"]
    """Descending."""
    V: Float[Tensor, "*b n r"]
    error: Float[Tensor, "*b"]
    """Largest error, that of the factors' orthogonality included, relative to the largest singular value."""
    driver: str
    """The LAPACK driver that the worst matrix of the batch needed."""
    rank: Int[Tensor, "*b"]
    """How many singular values stand above rounding."""
    degenerate: Bool[Tensor, "*b r"]
    """Modes whose singular value is within `GAP` of a neighbour's, or zero: their single vectors mean nothing."""

    @classmethod
    def of(cls, U: Tensor, S: Tensor, V: Tensor, error: Tensor, driver: str) -> "FactoredSVD":
        """The decomposition with its rank and its degenerate modes."""
        rank = (rounding_floor(S) < S).sum(-1)
        close = (S[..., :-1] - S[..., 1:]) < GAP * S[..., :-1]
        pad = torch.zeros_like(S[..., :1], dtype=torch.bool)
        zero = torch.arange(S.shape[-1], device=S.device) >= rank[..., None]
        return cls(U, S, V, error, driver, rank, torch.cat([close, pad], -1) | torch.cat([pad, close], -1) | zero)

    def to(self, dtype: torch.dtype, device: torch.device | str) -> "FactoredSVD":
        """The same in another number format and place; which modes are zero or too close was decided before."""
        moved = {name: getattr(self, name).to(device) for name in ("error", "rank", "degenerate")}
        return replace(
            self, U=self.U.to(device, dtype), S=self.S.to(device, dtype), V=self.V.to(device, dtype), **moved
        )


def rounding_floor(S: Float[Tensor, "*b r"]) -> Float[Tensor, "*b 1"]:
    """Singular values up to this are zero: the largest times the width times the format's ε."""
    return S[..., :1] * S.shape[-1] * torch.finfo(S.dtype).eps


@dataclass(frozen=True, eq=False)
class Factored:
    """The product A·Bᵀ, batched over leading axes; raises `ClearheadError` for factors that do not fit each other."""

    A: Float[Tensor, "*b m r"]
    B: Float[Tensor, "*b n r"]

    def __post_init__(self) -> None:
        if self.A.shape[-1] != self.B.shape[-1] or self.A.shape[:-2] != self.B.shape[:-2]:
            raise ClearheadError(
                f"the factors of A·Bᵀ must agree in all but their rows; got {list(self.A.shape)}, {list(self.B.shape)}"
            )

    @property
    def T(self) -> "Factored":
        """(A·Bᵀ)ᵀ."""
        return Factored(self.B, self.A)

    def dense(self) -> Float[Tensor, "*b m n"]:
        """The product, multiplied out."""
        return self.A @ self.B.mT

    def norm(self) -> Float[Tensor, "*b"]:
        """Frobenius norm, from the r × r Gram matrices."""
        square = ((self.A.mT @ self.A) * (self.B.mT @ self.B)).sum((-2, -1))
        return square.clamp_min(0).sqrt()

    def then(self, other: "Factored") -> "Factored":
        """The product self · other, kept factored with the inner r × r product on the thinner side."""
        if self.B.shape[-2] != other.A.shape[-2]:
            raise ClearheadError(
                f"cannot multiply: {self.B.shape[-2]} columns on the left, {other.A.shape[-2]} rows on the right"
            )
        inner = self.B.mT @ other.A
        if self.A.shape[-1] <= other.B.shape[-1]:
            return Factored(self.A, other.B @ inner.mT)
        return Factored(self.A @ inner, other.B)

    def svd(self) -> FactoredSVD:
        """Singular values and vectors, thin, in the factors' number format; zero and rank-deficient products included.

        Raises `NonFiniteError` for factors that hold NaN or infinity and `ClearheadError` when no driver converges.
        """
        if not bool(self.A.isfinite().all() and self.B.isfinite().all()):
            raise NonFiniteError("a factor holds NaN or infinity and cannot be decomposed; look for damaged weights")
        if min(self.A.shape[-2], self.B.shape[-2]) < self.A.shape[-1]:
            raise ClearheadError(
                f"factors with fewer rows than columns ({list(self.A.shape)}, {list(self.B.shape)}) have no thin "
                "decomposition of this width; multiply them out"
            )
        Q1, R1 = torch.linalg.qr(self.A)
        Q2, R2 = torch.linalg.qr(self.B)
        u, S, v, driver = decompose(R1 @ R2.mT)
        U, V = Q1 @ u, Q2 @ v
        sign = canonical_sign(U)
        U, V = U * sign, V * sign
        return FactoredSVD.of(U, S, V, self.error_of(U, S, V), driver)

    def error_of(self, U: Tensor, S: Tensor, V: Tensor) -> Float[Tensor, "*b"]:
        """How far U·diag(S)·Vᵀ is from the product, relative to the largest singular value, without multiplying out.

        The sum of three bounds: the product seen from U and V against S, what of A and B lies outside their spans, and
        how far U and V are from orthonormal.
        """
        a, b = U.mT @ self.A, V.mT @ self.B
        inside = (a @ b.mT - torch.diag_embed(S)).abs().amax((-2, -1))
        size_a, size_b = torch.linalg.matrix_norm(self.A), torch.linalg.matrix_norm(self.B)
        outside = torch.linalg.matrix_norm(self.A - U @ a) * size_b + torch.linalg.matrix_norm(self.B - V @ b) * size_a
        top = S[..., 0].clamp_min(torch.finfo(S.dtype).tiny)
        return (inside + outside) / top + torch.maximum(_skew(U), _skew(V))


def composition(a: Factored, b: Factored) -> Float[Tensor, "*b"]:
    """‖a·b‖_F / (‖a‖_F ‖b‖_F): how much of what `a` writes `b` reads (Merullo et al. 2024, after Elhage et al. 2021).

    With maps written for row vectors (x ↦ x·W): OV of a head, then QK of a later one, is `composition(ov, qk)`; its key
    side is `composition(ov, qk.T)`. With a random rotation between them the root mean square is 1/√d whatever their
    ranks are (E‖aRb‖² = ‖a‖²‖b‖²/d), not 0. 0 where a factor is 0.
    """
    size = a.norm() * b.norm()
    return torch.where(size > 0, a.then(b).norm() / torch.where(size > 0, size, 1), torch.zeros_like(size))


def decompose(M: Float[Tensor, "*b r r"]) -> tuple[Tensor, Tensor, Tensor, str]:
    """u, S, v and the driver of M = u·diag(S)·vᵀ, with every matrix checked and repeated where it failed.

    Raises `ClearheadError` when neither driver reproduces a matrix within `TOLERANCE`.
    """
    u, S, vh = torch.linalg.svd(M)
    v, driver = vh.mT, "gesdd"
    bad = _failed(M, u, S, v)
    if bool(bad.any()):
        u, S, v = u.clone(), S.clone(), v.clone()
        for index in bad.nonzero().tolist():
            place = tuple(index)
            left, values, right = _gesvd(M[place])
            u[place], S[place], v[place] = left, values, right
        driver = "gesvd"
        if bool(_failed(M, u, S, v).any()):
            raise ClearheadError("a singular value decomposition did not converge with either LAPACK driver")
    return u, S, v, driver


def _failed(M: Tensor, u: Tensor, S: Tensor, v: Tensor) -> Bool[Tensor, "*b"]:
    error = torch.maximum(residual(M, u, S, v), torch.maximum(_skew(u), _skew(v)) * S[..., 0])
    return ~(error <= TOLERANCE * S[..., 0])  # written so that NaN counts as failed


def residual(M: Tensor, u: Tensor, S: Tensor, v: Tensor) -> Float[Tensor, "*b"]:
    """Largest entry of |u·diag(S)·vᵀ − M|."""
    return ((u * S[..., None, :]) @ v.mT - M).abs().amax((-2, -1))


def _gesvd(M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = scipy.linalg.svd(M.double().cpu().numpy(), lapack_driver="gesvd")
    return _like(M, left), _like(M, values), _like(M, right.T)


def _like(M: Tensor, array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(M)


def canonical_sign(U: Float[Tensor, "*b m r"]) -> Float[Tensor, "*b 1 r"]:
    """±1 per column: what makes its largest entry positive. On both vectors of a pair it changes no product."""
    return torch.where(U.gather(-2, U.abs().argmax(-2, keepdim=True)) < 0, -1.0, 1.0).to(U.dtype)


def _skew(U: Tensor) -> Tensor:
    """How far the columns are from orthonormal."""
    eye = torch.eye(U.shape[-1], dtype=U.dtype, device=U.device)
    return (U.mT @ U - eye).abs().amax((-2, -1))
