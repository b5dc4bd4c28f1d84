"""A world whose feature pairs are known: features in a cone, tokens made of them, and the head that fits the pairs.

    x_i = unit(unit(z_i) + a c)         z_i Gaussian, c one common unit direction, a the strength of the cone
    token = Σ_i f_i x_i                 f_i uniform on [0, 1] with probability `density`, else 0
    Ω* = Σ_X⁻¹ X T Xᵀ Σ_X⁻¹             T pairs feature i with feature i + pairs, from 1 down to 0.3 (theory.py)

`measure_recovery` asks how well three readings of Ω* find the paired features, on this world; examples/planted_pairs.py
prints them for several worlds.
Not here: heads that learn such pairs (toy.py).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from clearhead.errors import ClearheadError
from clearhead.spectral.factored import Factored
from clearhead.spectral.ica import separate_pairs
from clearhead.spectral.theory import least_squares, unwhiten
from clearhead.spectral.whiten import InputMoments, estimate_covariance


class Planted(NamedTuple):
    """Features, tokens made of them, and the head that fits the pairs."""

    features: Float[Tensor, "d n"]
    omega: Float[Tensor, "d d"]
    tokens: Float[Tensor, "m d"]
    pairs: int
    """Query features are the columns 0..pairs-1, their keys the next as many."""


class Recovery(NamedTuple):
    """Mean |cos| of the planted features of both sides with the nearest direction found."""

    raw: float
    """Singular vectors as they are."""
    unwhitened: float
    """Σ u and Σ v."""
    separated: float
    """Unwhitened independent components."""
    converged: bool
    concentration: float


def cone_features(d: int, n: int, cone: float, generator: Generator) -> Float[Tensor, "d n"]:
    """Unit columns around a common direction; `cone` 0 is isotropic."""
    z = torch.randn(d, n, dtype=torch.float64, generator=generator)
    common = torch.randn(d, 1, dtype=torch.float64, generator=generator)
    x = z / z.norm(dim=0) + cone * common / common.norm()
    return x / x.norm(dim=0)


def plant_pairs(
    d: int = 50,
    n: int = 100,
    pairs: int = 20,
    *,
    cone: float = 1.0,
    samples: int = 20_000,
    density: float = 0.1,
    seed: int = 0,
) -> Planted:
    """The world: by default 20 pairs of 100 features in 50 dimensions.

    Raises `ClearheadError` for more pairs than features allow.
    """
    if not 1 <= 2 * pairs <= n:
        raise ClearheadError(f"{pairs} pairs need {2 * pairs} features, there are {n}")
    generator = torch.Generator().manual_seed(seed)
    X = cone_features(d, n, cone, generator)
    target = torch.zeros(n, n, dtype=torch.float64)
    target[torch.arange(pairs), torch.arange(pairs, 2 * pairs)] = torch.linspace(1, 0.3, pairs, dtype=torch.float64)
    f = torch.rand(samples, n, dtype=torch.float64, generator=generator)
    f *= torch.rand(samples, n, generator=generator) < density
    return Planted(X, least_squares(X, X, target), f @ X.mT, pairs)


def measure_recovery(world: Planted, modes: int | None = None, seed: int = 0) -> Recovery:
    """How well the top `modes` modes (default: as many as pairs) give the planted features back."""
    count = world.pairs if modes is None else modes
    d = len(world.omega)
    svd = Factored(world.omega, torch.eye(d, dtype=torch.float64)).svd()
    U, S, V = svd.U[:, :count], svd.S[:count], svd.V[:, :count]
    sigma = estimate_covariance(InputMoments.of(world.tokens)).matrix
    pairs = separate_pairs(world.tokens @ U, world.tokens @ V, U, S, V, sigma, seed)
    sides = (world.features[:, : world.pairs], world.features[:, world.pairs : 2 * world.pairs])

    def score(*found: Tensor) -> float:
        best = [(x.mT @ (y / y.norm(dim=0))).abs().amax(1).mean() for x, y in zip(sides, found, strict=True)]
        return float(sum(best) / len(best))

    return Recovery(
        raw=score(U, V),
        unwhitened=score(unwhiten(sigma, U), unwhiten(sigma, V)),
        separated=score(pairs.query, pairs.key),
        converged=pairs.converged,
        concentration=pairs.concentration,
    )
