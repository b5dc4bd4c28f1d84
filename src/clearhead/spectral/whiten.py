"""Covariance of a head's inputs, streamed in float64, and what it says about singular vectors.

    feature on the query side ∝ Σ u,  on the key side ∝ Σ v          (theory.unwhiten; SVF 2602.13524, theorem 1)

Σ is the *centred* covariance of what the head reads: the uncentred second moment of such vectors is mostly their mean,
and turns every direction towards it. Beside each direction stand the numbers that say whether to believe it:

    stability    cosine between Σ₁u and Σ₂u, with Σ₁ and Σ₂ from two halves of the sample
    cone         cosine with the mean of the inputs and with their top principal components
    energy       uᵀ M u / (tr M / d), M the uncentred second moment: 1 for a direction as used as the average one
    unused       share of u outside the directions that tokens reach; there Ω is whatever it was initialised to

`effective` projects Ω on the directions that tokens reach, P Ω P, kept as factors: no score changes, the modes do.
Statistics of a part of the sample add up exactly, whatever the parts (`InputMoments.__add__`).

Not here: where the inputs come from (features.py), several pairs that are not orthogonal (ica.py).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.config import Shrinkage
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.spectral.factored import Factored

RIDGE = 0.01
"""What `ridge` adds to every variance, as a share of the mean variance."""
REACHED = 1e-4
"""A direction is reached by tokens if its energy exceeds this: it holds more than this share of the average energy."""
TOP_COMPONENTS = 3
"""Principal components that a direction is compared with."""


@dataclass(frozen=True, eq=False)
class InputMoments:
    """Sums over rows x, about their own mean (c = x - mean): enough for covariance and its Ledoit–Wolf shrinkage."""

    n: int
    mean: Float[Tensor, " d"]
    scatter: Float[Tensor, "d d"]
    """Σ c cᵀ."""
    cubic: Float[Tensor, " d"]
    """Σ |c|² c."""
    quartic: Float[Tensor, ""]
    """Σ |c|⁴."""

    @classmethod
    def of(cls, rows: Float[Tensor, "n d"]) -> "InputMoments":
        """The sums over `rows`, in float64, where the rows are (on the CPU where their device has no float64).

        Raises `NonFiniteError` for rows with NaN or infinity.
        """
        if not bool(rows.isfinite().all()):
            raise NonFiniteError("a row of the head's inputs holds NaN or infinity; load the model with dtype float32")
        rows = (rows.cpu() if rows.device.type == "mps" else rows).double()
        mean = rows.mean(0) if len(rows) else rows.new_zeros(rows.shape[1])
        centred = rows - mean
        square = centred.square().sum(1)
        return cls(len(rows), mean, centred.mT @ centred, square @ centred, square.square().sum())

    def __add__(self, other: "InputMoments") -> "InputMoments":
        """The sums over both samples; no difference of large numbers is taken."""
        n = self.n + other.n
        if n == 0:
            return self
        mean = self.mean + (other.mean - self.mean) * (other.n / n)
        a, b = self._about(mean), other._about(mean)
        return InputMoments(n, mean, a.scatter + b.scatter, a.cubic + b.cubic, a.quartic + b.quartic)

    def _about(self, centre: Tensor) -> "InputMoments":
        """The same sums with c = x - centre."""
        s, total = centre - self.mean, self.scatter.trace()
        far = s @ s
        return InputMoments(
            self.n,
            centre,
            self.scatter + self.n * torch.outer(s, s),
            self.cubic - total * s - 2 * self.scatter @ s - self.n * far * s,
            self.quartic + 4 * s @ self.scatter @ s + self.n * far**2 - 4 * s @ self.cubic + 2 * far * total,
        )

    def second_moment(self) -> Float[Tensor, "d d"]:
        """E[x xᵀ], not centred."""
        return self.scatter / self.n + torch.outer(self.mean, self.mean)


@dataclass(frozen=True, eq=False)
class Covariance:
    """The centred covariance of a sample, shrunk, with what says how well it is known."""

    matrix: Float[Tensor, "d d"]
    variances: Float[Tensor, " d"]
    """Eigenvalues of `matrix`, descending."""
    components: Float[Tensor, "d d"]
    """Its eigenvectors as columns, in that order."""
    samples: int
    shrinkage: Shrinkage
    amount: float
    """Weight of the identity: λ in (1 - λ) S + λ (tr S / d) I for ledoit-wolf, ρ in S + ρ (tr S / d) I for ridge."""

    @property
    def per_dimension(self) -> float:
        """Samples per dimension, n / d; at least 20 is recommended, and tokens of one text are not independent."""
        return self.samples / len(self.matrix)

    @property
    def rank(self) -> int:
        """Variances above rounding."""
        return int((self.variances > self._rounding).sum())

    @property
    def condition(self) -> float:
        """Largest variance over the smallest one above rounding."""
        return float(self.variances[0] / self.variances[self.rank - 1])

    @property
    def _rounding(self) -> Tensor:
        return self.variances[0] * len(self.variances) * torch.finfo(torch.float64).eps


def estimate_covariance(moments: InputMoments, shrinkage: Shrinkage = "ledoit-wolf") -> Covariance:
    """The covariance of the sample, shrunk towards a multiple of the identity (`Covariance.amount` says how much).

    ledoit-wolf: the weight that minimises the expected error for independent rows (Ledoit and Wolf 2004); ridge: a
    fixed `RIDGE`; none: S itself, with its empty directions left empty.
    Raises `ClearheadError` for fewer than two rows, rows that do not vary, or another name.
    """
    n, d = moments.n, len(moments.mean)
    if n < 2 or float(moments.scatter.trace()) <= 0:
        raise ClearheadError(f"{n} positions that do not vary have no covariance; give more text")
    S = moments.scatter / n
    level = S.trace() / d
    match shrinkage:
        case "ledoit-wolf":
            spread = (S.square().sum() - d * level**2).clamp_min(0)
            noise = (moments.quartic - n * S.square().sum()).clamp_min(0) / n**2
            amount = float((noise / spread).clamp(max=1)) if float(spread) > 0 else 0.0
            S = (1 - amount) * S
        case "ridge":
            amount = RIDGE
        case "none":
            amount = 0.0
        case _:
            raise ClearheadError(f"shrinkage: expected ledoit-wolf, ridge or none, got {shrinkage!r}")
    matrix = S + amount * level * torch.eye(d, dtype=S.dtype, device=S.device)
    variances, components = torch.linalg.eigh(matrix)
    return Covariance(matrix, variances.flip(0), components.flip(1), n, shrinkage, amount)


def column_cosines(a: Float[Tensor, "d k"], b: Float[Tensor, "d k"]) -> Float[Tensor, " k"]:
    """Cosine of each column of `a` with the same column of `b`; 0 where one is 0."""
    size = a.norm(dim=0) * b.norm(dim=0)
    return torch.where(size > 0, (a * b).sum(0) / torch.where(size > 0, size, 1), torch.zeros_like(size))


class Cone(NamedTuple):
    """How far directions point along what all inputs have in common."""

    mean: Float[Tensor, " k"]
    """Cosine with the mean input."""
    component: Float[Tensor, " k"]
    """Norm of the projection on the span of the top principal components."""


def compare_with_cone(directions: Float[Tensor, "d k"], moments: InputMoments, covariance: Covariance) -> Cone:
    """Cosines of each direction with the mean of the inputs and with the span of their top principal components."""
    unit = directions / directions.norm(dim=0).clamp_min(torch.finfo(directions.dtype).tiny)
    top = covariance.components[:, :TOP_COMPONENTS]
    return Cone(column_cosines(directions, moments.mean[:, None].expand_as(directions)), (top.mT @ unit).norm(dim=0))


def leave_cone(directions: Float[Tensor, "d k"], moments: InputMoments, covariance: Covariance) -> Float[Tensor, "d k"]:
    """The directions without their part in the span of the mean input and its top principal components; unit columns.

    A direction that lies wholly in that span becomes 0.
    """
    shared = torch.linalg.qr(torch.cat([covariance.components[:, :TOP_COMPONENTS], moments.mean[:, None]], 1))[0]
    left = directions - shared @ (shared.mT @ directions)
    size = left.norm(dim=0)
    inside = size <= 1e-9 * directions.norm(dim=0)
    return torch.where(inside, 0.0, left / torch.where(inside, 1.0, size))


@dataclass(frozen=True, eq=False)
class TokenSpace:
    """The directions that tokens reach, and how much they use each."""

    second_moment: Float[Tensor, "d d"]
    basis: Float[Tensor, "d m"]
    """Orthonormal; the eigenvectors of the second moment with energy above `REACHED`."""

    @classmethod
    def of(cls, moments: InputMoments) -> "TokenSpace":
        """Of a sample. Raises `ClearheadError` where it is empty or all zero."""
        if moments.n == 0:
            raise ClearheadError("no positions were given, so no direction has token energy; give more text")
        M = moments.second_moment()
        energies, axes = torch.linalg.eigh(M)
        level = M.trace() / len(M)
        if float(level) <= 0:
            raise ClearheadError("all inputs are zero, so no direction has token energy")
        return cls(M, axes[:, energies > REACHED * level])

    def energy(self, directions: Float[Tensor, "d k"]) -> Float[Tensor, " k"]:
        """uᵀ M u / (tr M / d) of each direction of length 1."""
        level = self.second_moment.trace() / len(self.second_moment)
        return (directions * (self.second_moment @ directions)).sum(0) / level

    def unused(self, directions: Float[Tensor, "d k"]) -> Float[Tensor, " k"]:
        """Share of each direction's squared length outside the reach of tokens."""
        inside = (self.basis.mT @ directions).square().sum(0)
        return (1 - inside / directions.square().sum(0)).clamp(0, 1)

    def effective(self, omega: Factored) -> Factored:
        """P Ω P as factors: the same scores on every token of the sample, without what no token reaches."""
        P = self.basis
        return Factored(P @ (P.mT @ omega.A), P @ (P.mT @ omega.B))

    def unused_share(self, omega: Factored) -> Float[Tensor, "*b"]:
        """1 - ‖P Ω P‖² / ‖Ω‖²: how much of a head's product acts where no token is; 0 for a product of zero."""
        whole = omega.norm().square()
        return torch.where(whole > 0, 1 - self.effective(omega).norm().square() / whole, 0.0).clamp(0, 1)
