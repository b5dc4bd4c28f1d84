"""Toys compared: one setting varied at a time, and the anisotropy of features varied in closed form.

The settings that can be varied are the attention weight λ, the number of features N, of keys m, and the head's width H.
Features beyond the head's width and attention weights that are too small are part of the ranges on purpose.

Anisotropy: unit features with a common direction mixed in at strength a (`planted.cone_features`), and the head of
theorem 1 for each of them as the planted one. Raw singular vectors lose the common part, because whitening removes it;
Σ u recovers it, with Σ estimated from a sample of tokens. ‖E_X‖₂ is the interference that the paper varies. It uses
trained features; these are frozen random ones, which start lower: at a = 0 and N = 2 d they align to 0.71, and joint
training is what brings that to 1.
"""

import dataclasses
from typing import Any, NamedTuple

import torch

from clearhead.config.spectral_toy import Sweep, ToySetting
from clearhead.errors import UnknownNameError
from clearhead.spectral.interference import measure_interference
from clearhead.spectral.planted import cone_features
from clearhead.spectral.theory import alignment, alignment_floor, unwhiten, whitened
from clearhead.spectral.toy_dynamics import train_watched
from clearhead.spectral.toy_verdict import Outcome, outcome
from clearhead.spectral.whiten import column_cosines

WEIGHTS = (0, 0.01, 0.03, 0.1, 0.3, 1, 10)
FEATURES = (1, 1.5, 2, 3)
KEYS = (2, 4, 8, 16, 32)
CONES = (0, 0.25, 0.5, 0.75, 1, 1.5, 2)
TOKENS, DENSITY = 4000, 0.05


class Anisotropy(NamedTuple):
    """Features of one geometry, and how well the planted ones are recovered: means of |cosine| over all features."""

    features: int
    cone: float
    interference: float
    raw: float
    """Between u₁ and the feature."""
    centred: float
    """Between u₁ and the feature without the features' mean."""
    recovered: float
    """Between Σ u₁ and the feature, Σ from a sample of tokens."""
    floor: float
    """What the spectrum of Σ promises every feature (Kantorovich)."""


class SweepPoint(NamedTuple):
    """A toy trained with one value of what is varied; of pairs, the worst."""

    value: float
    outcome: Outcome
    cosine: float
    overlap: float
    ratio: float
    error: float
    others_dim: float
    cpu_seconds: float


def run_sweep(setting: ToySetting, sweep: Sweep, seed: int) -> list[SweepPoint]:
    """Train a toy for each of the `variations`, all from one seed."""
    points = []
    for varied in variations(setting, sweep):
        trained = train_watched(varied, seed, records=1)
        m = trained.end
        points.append(
            SweepPoint(
                value=getattr(varied, sweep.replace("-", "_")),
                outcome=outcome(varied, m),
                cosine=float(m.aligned.min()),
                overlap=float(m.overlap.max()),
                ratio=float(m.ratio.min()),
                error=m.error,
                others_dim=m.others_dim,
                cpu_seconds=trained.cpu_seconds,
            )
        )
    return points


def variations(setting: ToySetting, sweep: Sweep) -> list[ToySetting]:
    """The settings of a sweep, in rising order of what is varied; none for `none`.

    Raises `UnknownNameError` for a setting that has no range here.
    """
    s = setting
    pairs, even = s.pairs, 2 if s.rope != "off" else 1
    ranges: dict[str, list[dict[str, Any]]] = {
        "none": [],
        "attention-weight": [{"attention_weight": factor * s.attention_weight} for factor in WEIGHTS],
        "features": [{"features": round(factor * s.features)} for factor in FEATURES],
        "keys": [{"keys": keys} for keys in KEYS],
        "head-width": [
            {"head_width": width}
            for width in sorted({-(-h // even) * even for h in (max(1, pairs // 2), pairs, 2 * pairs, 4 * pairs)})
            if width < s.head_width
        ]
        + [{"head_width": s.head_width}],
    }
    if sweep not in ranges:
        raise UnknownNameError("sweep", sweep, ranges)
    return [dataclasses.replace(setting, **changed) for changed in ranges[sweep]]


def anisotropy(width: int = 50, counts: tuple[int, ...] = (100, 400), seed: int = 0) -> list[Anisotropy]:
    """Closed-form recovery for each number of features and each strength in `CONES` of their common direction."""
    rows = []
    for n in counts:
        generator = torch.Generator().manual_seed(seed + 1)
        f = torch.rand(TOKENS, n, generator=generator, dtype=torch.float64)
        f *= torch.rand(TOKENS, n, generator=generator) < DENSITY
        for cone in CONES:
            X = cone_features(width, n, cone, torch.Generator().manual_seed(seed))
            U = whitened(X)
            sample = torch.cov((f @ X.mT).mT)
            rows.append(
                Anisotropy(
                    features=n,
                    cone=cone,
                    interference=measure_interference(X.mT).found.gram,
                    raw=float(alignment(X).mean()),
                    centred=float(column_cosines(U, X - X.mean(1, keepdim=True)).abs().mean()),
                    recovered=float(column_cosines(unwhiten(sample, U), X).abs().mean()),
                    floor=alignment_floor(X @ X.mT),
                )
            )
    return rows
