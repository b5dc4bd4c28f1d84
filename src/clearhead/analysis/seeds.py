"""Which heads of a Lorsa come back when it is trained again from another seed.

Two heads are alike when they are active at the same tokens by the same amount and write the same:

    alike(n, n') = max(0, corr(z_n, z'_n')) · max(0, cos(w_o[n], w'_o[n']))

with the correlation over all tokens, inactive ones included. Activations are compared rather than w_v and patterns,
because those may differ where the data never goes, and queries and keys of equal patterns differ by any rotation. With
signed activations a head and its negative (w_v and w_o both turned round) are one: alike = max(0, corr · cos).

Heads are matched one to one so that Σ alike is largest (Hungarian assignment); a head's stability is what it reaches
with its partner. Chance is the same with the other Lorsa's write vectors exchanged between its heads, matched anew: the
best of thousands is never 0. Runs that share initial queries and keys (`--init data`, `original`) agree also through
those. The interval of one head resamples stretches of text, its partner held; that of a share resamples heads.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_matrix

from clearhead.analysis.entries import Entries
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.ops.bootstrap import bounds, draw_counts

Sparse = Any
"""A `scipy.sparse.csr_matrix`, whose methods scipy does not annotate."""
STABLE = 0.5
"""From here on a head counts as found again: for example 0.7 in activation and 0.7 in what it writes."""
STRETCHES = 32
"""Parts of the text that intervals resample."""
ROUNDING = 1e-12
"""A variance that is no larger than this share of the mean square is none."""


class Match(NamedTuple):
    """Partners of n heads in another Lorsa."""

    partner: NDArray[np.int64]
    """-1 for a head without one, where the other Lorsa has fewer."""
    alike: NDArray[np.float64]


class Stability(NamedTuple):
    """How far n heads come back in other Lorsas; NaN for heads that were never active."""

    value: NDArray[np.float64]
    """Mean over the other Lorsas."""
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    chance: NDArray[np.float64]
    """The same against Lorsas whose write vectors are exchanged."""


def activations(entries: Entries, n_units: int, n_blocks: int, context: int) -> Sparse:
    """Activations [blocks · context, units] of entries, blocks numbered from 0."""
    shape = (n_blocks * context, n_units)
    return csr_matrix((entries.value.astype(np.float64), (entries.token, entries.unit)), shape=shape)


def likeness(
    lorsa: Lorsa, other: Lorsa, z: Sparse, z_other: Sparse, n_tokens: int, *, shuffle: int | None = None
) -> Float[np.ndarray, "n m"]:
    """alike(n, n') for all pairs; z and z_other are `activations` on the same n_tokens tokens.

    shuffle: seed by which the other's write vectors are exchanged. Raises `ClearheadError` for Lorsas that do not
    stand for the same layer of the same model with the same kind of activation.
    """
    _check(lorsa, other)
    together = _dense(z.T @ z_other) / n_tokens
    means, spreads = zip(*(_moments(one, n_tokens) for one in (z, z_other)), strict=True)
    together -= np.outer(*means)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = np.where(np.outer(*spreads) > 0, together / np.outer(*spreads), 0.0)
    mine, theirs = _directions(lorsa), _directions(other)
    if shuffle is not None:
        theirs = theirs[np.random.default_rng(shuffle).permutation(len(theirs))]
    cosine = mine @ theirs.T
    if lorsa.config.activation == "signed-topk":
        return np.maximum(correlation * cosine, 0)
    return np.maximum(correlation, 0) * np.maximum(cosine, 0)


def match(alike: Float[np.ndarray, "n m"]) -> Match:
    """The one-to-one assignment with the largest Σ alike."""
    rows, columns = linear_sum_assignment(alike, maximize=True)
    partner = np.full(len(alike), -1, dtype=np.int64)
    partner[rows] = columns
    value = np.zeros(len(alike))
    value[rows] = alike[rows, columns]
    return Match(partner, value)


def stability(
    lorsa: Lorsa,
    z: Sparse,
    others: list[tuple[Lorsa, Sparse]],
    *,
    n_blocks: int,
    context: int,
    first: int = 1,
    seed: int = 0,
) -> Stability:
    """How far each head comes back in the others, on blocks whose first positions are left out."""
    if not others:
        raise ClearheadError("stability over seeds needs at least one other Lorsa")
    n_tokens = n_blocks * (context - first)
    drawn = draw_counts(min(STRETCHES, n_blocks), seed)
    value, chance = np.zeros(z.shape[1]), np.zeros(z.shape[1])
    resampled = np.zeros((len(drawn), z.shape[1]))
    for other, theirs in others:
        found = match(likeness(lorsa, other, z, theirs, n_tokens))
        value += found.alike / len(others)
        chance += match(likeness(lorsa, other, z, theirs, n_tokens, shuffle=seed)).alike / len(others)
        resampled += _resampled(lorsa, other, z, theirs, found, drawn, n_blocks, first) / len(others)
    low, high = bounds(resampled)
    active = np.diff(z.tocsc().indptr) > 0
    return Stability(*(np.where(active, values, np.nan) for values in (value, low, high, chance)))


def stretch_of(block: NDArray[np.int64], n_blocks: int) -> NDArray[np.int64]:
    """The part of the text that each block belongs to."""
    return block * min(STRETCHES, n_blocks) // n_blocks


def _resampled(
    lorsa: Lorsa,
    other: Lorsa,
    z: Sparse,
    theirs: Sparse,
    found: Match,
    drawn: Float[np.ndarray, "r g"],
    n_blocks: int,
    first: int,
) -> Float[np.ndarray, "r n"]:
    """Every head's likeness to its partner on resampled stretches of text."""
    paired = found.partner >= 0
    aligned = csr_matrix(theirs.tocsc()[:, np.where(paired, found.partner, 0)])
    cosine = (_directions(lorsa) * _directions(other)[found.partner]).sum(1)
    context = z.shape[0] // n_blocks
    stretch = np.repeat(stretch_of(np.arange(n_blocks), n_blocks), context)
    collect = csr_matrix((np.ones(len(stretch)), (stretch, np.arange(len(stretch)))))
    size = drawn @ (np.bincount(stretch) / context * (context - first))
    parts = (z, aligned, z.multiply(z), aligned.multiply(aligned), z.multiply(aligned))
    x, y, xx, yy, xy = (drawn @ _dense(collect @ part) / size[:, None] for part in parts)
    spread = np.sqrt(_variance(x, xx) * _variance(y, yy))
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = np.where(spread > 0, (xy - x * y) / spread, 0.0)
    if lorsa.config.activation == "signed-topk":
        return np.maximum(correlation * cosine, 0) * paired
    return np.maximum(correlation, 0) * np.maximum(cosine, 0) * paired


def _dense(matrix: Sparse) -> NDArray[np.float64]:
    return np.asarray(matrix.todense())


def _moments(z: Sparse, n_tokens: int) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Mean and standard deviation per unit."""
    mean = np.asarray(z.sum(0))[0] / n_tokens
    square = np.asarray(z.multiply(z).sum(0))[0] / n_tokens
    return mean, np.sqrt(_variance(mean, square))


def _variance(mean: NDArray[np.float64], square: NDArray[np.float64]) -> NDArray[np.float64]:
    """0 where it is rounding: a unit that is always active by the same amount correlates with nothing."""
    variance = square - mean**2
    return np.where(variance > ROUNDING * square, variance, 0.0)


def _directions(lorsa: Lorsa) -> Float[np.ndarray, "n d"]:
    write = lorsa.W_O.detach().cpu().double().numpy()
    norm = np.linalg.norm(write, axis=1, keepdims=True)
    return write / np.where(norm > 0, norm, 1)


def _check(lorsa: Lorsa, other: Lorsa) -> None:
    for name in ("model", "layer"):
        mine, theirs = lorsa.provenance.get(name), other.provenance.get(name)
        if mine != theirs:
            raise ClearheadError(
                f"heads are matched between Lorsas of one layer: this one was trained on {name} {mine}, the other on "
                f"{theirs}"
            )
    signed = [one.config.activation == "signed-topk" for one in (lorsa, other)]
    if signed[0] != signed[1]:
        raise ClearheadError("a Lorsa with signed activations is not matched with one whose activations are positive")
