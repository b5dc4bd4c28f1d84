"""What is measured on a toy: do singular vectors point along the features, are those orthogonal, is the logit right.

With unit features w, modes (u_k, σ_k, v_k) of Ω, and pairs of a query feature q and key feature p, by falling target T:

    by rank      |u_k · w_q|, |v_k · w_p|            mode k against pair k
    contained    length of w_q inside the span of u_1 … u_p, of w_p inside that of v_1 … v_p: the smaller one
    matched      |cosines| after the assignment of modes to pairs with the largest Σ |u · w_q| |v · w_p| (Hungarian)
    ratio        σ |w_q| |w_p| / T                   of the matched mode, W not normalised: 1 where the logit is right
    overlap      largest |w · w'| of the pair's two features with any other feature in use
    error        largest |W Ω_Δ Wᵀ − g_Δ T| over all features and distances (Merr)
    together     how many neighbouring modes lie within 20 · error of each other, this one included: they rotate into
                 each other (Davis and Kahan), and only `contained` says something. 1: stands apart

Ω is also measured as tokens see it (`effective`): where W has lost a dimension, Ω keeps its start there, no logit shows
it, and the raw decomposition is spoiled. S and N_recon are those of the contributions to relative logits of target keys
on fixed sequences, beside the same logits split in a randomly rotated basis (A → A R, B → B R keeps every logit).

Not here: words for these numbers (toy_verdict.py).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from clearhead.config.spectral_toy import ToySetting
from clearhead.ops.rotation import Rotation, rotate
from clearhead.spectral.factored import Factored, FactoredSVD
from clearhead.spectral.sparsity import n_recon, rolls_tovee
from clearhead.spectral.toy import Toy, draw

APART = 20
"""Gap between singular values, in units of the error, from which single vectors are compared."""
IN_USE = 0.1
"""Share of the longest feature from which a feature counts, and of W's largest singular value from which a direction
counts as one that tokens reach."""
SEQUENCES = 256
PROBE_SEED = 1_000_003


class Probe(NamedTuple):
    """Fixed sequences, each with one pair present in full, and the key with the largest target in each."""

    f: Float[Tensor, "s t n"]
    key: Int[Tensor, " s"]
    rotation: Float[Tensor, "r r"]


class Overlaps(NamedTuple):
    """For each pair, the other feature that lies closest to one of its two."""

    overlap: Float[Tensor, " p"]
    partner: Int[Tensor, " p"]
    opposite: Bool[Tensor, " p"]
    """Whether the two point away from each other."""
    overlap_rms: float
    """Root of the mean square over all attended features and all others in use."""


class Spread(NamedTuple):
    """S (mean over firings) and N_recon (median) in the head's own basis and in a rotated one."""

    sparsity: float
    rotated_sparsity: float
    n_recon: float
    rotated_n_recon: float


@dataclass(frozen=True, eq=False)
class Measures:
    """One toy at one moment; entry k of a vector is pair k, the strongest target first. float64."""

    sigma: Float[Tensor, " r"]
    targets: Float[Tensor, " p"]
    rank_query: Float[Tensor, " kept"]
    """One entry per mode that a pair can have: the smaller of their counts."""
    rank_key: Float[Tensor, " kept"]
    mode: Int[Tensor, " p"]
    """The matched mode; −1 for a pair that found none, whose cosines are those of the mode it shares best."""
    query: Float[Tensor, " p"]
    key: Float[Tensor, " p"]
    contained: Float[Tensor, " p"]
    effective_query: Float[Tensor, " p"]
    effective_key: Float[Tensor, " p"]
    together: Int[Tensor, " p"]
    ratio: Float[Tensor, " p"]
    overlap: Float[Tensor, " p"]
    partner: Int[Tensor, " p"]
    opposite: Bool[Tensor, " p"]
    overlap_rms: float
    error: float
    others_dim: float
    """tr(G)² / tr(G²) of the features that are not attended to: how many dimensions they spread over."""
    all_dim: float
    live: int
    """Dimensions that tokens reach."""
    spread: Spread

    @property
    def aligned(self) -> Float[Tensor, " p"]:
        """The smaller matched cosine of each pair."""
        return torch.minimum(self.query, self.key)


def measure(toy: Toy, probe: Probe) -> Measures:
    """All measures of a toy as it stands."""
    with torch.no_grad():
        W = toy.W.double()
        p = len(toy.targets)
        size = W.norm(dim=1)
        unit = W / size.clamp_min(torch.finfo(torch.float64).tiny)[:, None]
        queries, keys = unit[:p], unit[p : 2 * p]
        omega = toy.omega()
        svd = omega.svd()
        mode, query, key = match(svd, queries, keys)
        error = logit_error(toy, W)
        group = groups(svd.S, APART * error)
        live = token_directions(W)
        effective = Factored(live @ (live.mT @ omega.A), live @ (live.mT @ omega.B)).svd()
        _, effective_query, effective_key = match(effective, queries, keys)
        kept = min(p, len(svd.S))
        matched_sigma = torch.where(mode < 0, 0, svd.S[mode.clamp_min(0)])
        return Measures(
            sigma=svd.S,
            targets=toy.targets.double(),
            rank_query=(queries[:kept] * svd.U.mT[:kept]).sum(1).abs(),
            rank_key=(keys[:kept] * svd.V.mT[:kept]).sum(1).abs(),
            mode=mode,
            query=query,
            key=key,
            contained=torch.minimum((queries @ svd.U[:, :p]).norm(dim=1), (keys @ svd.V[:, :p]).norm(dim=1)),
            effective_query=effective_query,
            effective_key=effective_key,
            together=(group == group[mode.clamp_min(0), None]).sum(1),
            ratio=matched_sigma * size[:p] * size[p : 2 * p] / toy.targets.double(),
            **overlaps(unit, size, p)._asdict(),
            error=error,
            others_dim=effective_dim(W[2 * p :]),
            all_dim=effective_dim(W),
            live=live.shape[1],
            spread=spread_of(toy, svd, probe),
        )


def match(
    svd: FactoredSVD, queries: Float[Tensor, "p d"], keys: Float[Tensor, "p d"]
) -> tuple[Int[Tensor, " p"], Float[Tensor, " p"], Float[Tensor, " p"]]:
    """Mode of each pair by the best assignment, and its |cosines| on both sides; −1 for pairs that are left over."""
    on_query, on_key = (queries @ svd.U).abs(), (keys @ svd.V).abs()
    joint = on_query * on_key
    pair, mode = linear_sum_assignment(joint.numpy(), maximize=True)
    chosen = torch.full((len(queries),), -1)
    chosen[torch.as_tensor(pair)] = torch.as_tensor(mode)
    best = torch.where(chosen < 0, joint.argmax(1), chosen)[:, None]
    return chosen, on_query.gather(1, best)[:, 0], on_key.gather(1, best)[:, 0]


def groups(S: Float[Tensor, " r"], least: float) -> Int[Tensor, " r"]:
    """A number for each mode, shared by neighbours whose singular values differ by less than `least`."""
    return torch.cat([torch.zeros(1, dtype=torch.long), (S[:-1] - S[1:] >= least).cumsum(0)])


def logit_error(toy: Toy, W: Float[Tensor, "n d"]) -> float:
    """Largest distance of a feature pair's logit from its target, over all feature pairs and distances."""
    p, largest = len(toy.targets), 0.0
    query, key = W @ toy.W_Q.double(), W @ toy.W_K.double()
    for place in range(1 if toy.turn is None else len(toy.falloff)):
        turned = key if toy.turn is None else _turned(key, toy.turn, place)
        wrong = query @ turned.mT
        pairs = torch.arange(p)
        wrong[pairs, p + pairs] -= toy.targets.double() * float(toy.falloff[place])
        largest = max(largest, float(wrong.abs().max()))
    return largest


def _turned(key: Float[Tensor, "n dh"], turn: Rotation, place: int) -> Float[Tensor, "n dh"]:
    """All features' keys as seen from the key at `place`."""
    here = Rotation(turn.cos[place : place + 1], turn.sin[place : place + 1], turn.interleaved)
    return rotate(key[:, None], here)[:, 0]


def overlaps(unit: Float[Tensor, "n d"], size: Float[Tensor, " n"], p: int) -> Overlaps:
    """How close the attended features, the first 2p, come to the others in use."""
    cosines = unit[: 2 * p] @ unit.mT
    other = (size > IN_USE * size.max()) & ~torch.eye(len(unit), dtype=torch.bool)[: 2 * p]
    cosines = cosines * other
    largest, partner = cosines.abs().max(1)
    # of a pair's two features, p rows apart, the one with the larger overlap speaks for both
    row = torch.arange(p) + p * (largest[p:] > largest[:p])
    rms = (cosines.square().sum() / other.sum().clamp_min(1)).sqrt()
    return Overlaps(largest[row], partner[row], cosines[row, partner[row]] < 0, float(rms))


def effective_dim(W: Float[Tensor, "m d"]) -> float:
    """tr(G)² / tr(G²) of the Gram matrix of the rows: d for a tight frame, 1 for parallel rows, 0 without any."""
    moment = W.mT @ W
    square = float(moment.square().sum())
    return float(moment.trace()) ** 2 / square if square else 0.0


def token_directions(W: Float[Tensor, "n d"], share: float = IN_USE) -> Float[Tensor, "d live"]:
    """Orthonormal basis of the directions along which features reach `share` of the largest singular value of W."""
    _, S, Vh = torch.linalg.svd(W, full_matrices=False)
    return Vh[share * S[0] < S].mT


def make_probe(setting: ToySetting) -> Probe:
    """The fixed sequences of a setting, the same for every seed and step."""
    generator = torch.Generator().manual_seed(PROBE_SEED)
    f = draw(generator, setting, SEQUENCES)
    sequence = torch.arange(SEQUENCES)
    pair = sequence % setting.pairs
    place = torch.randint(1, setting.keys + 1, (SEQUENCES,), generator=generator)
    f[sequence, 0, pair], f[sequence, place, setting.pairs + pair] = 1, 1
    key = Toy(setting, generator).target_logits(f).argmax(1)
    width = setting.head_width
    rotation, _ = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    return Probe(f, key, rotation)


def spread_of(toy: Toy, svd: FactoredSVD, probe: Probe) -> Spread:
    """S and N_recon of the contributions to the probe's target keys, in both bases."""
    own, rotated = (contributions_of(toy, svd, probe, rotation) for rotation in (None, probe.rotation))
    return Spread(
        float(rolls_tovee(own).mean()),
        float(rolls_tovee(rotated).mean()),
        float(n_recon(own).double().median()),
        float(n_recon(rotated).double().median()),
    )


def contributions_of(
    toy: Toy, svd: FactoredSVD, probe: Probe, rotation: Float[Tensor, "r r"] | None = None
) -> Float[Tensor, "s r"]:
    """c_k = A_k (B_jk − mean of the other keys' B) for each sequence's target key j; they sum to its relative logit.

    A = q W_Kᵀ V S^(−1/2) and B = k W_Qᵀ U S^(−1/2), with k turned by its position, as in attention_modes.py.
    """
    tokens = probe.f.double() @ toy.W.double()
    W_Q, W_K = toy.W_Q.double(), toy.W_K.double()
    k = tokens[:, 1:] @ W_K
    k = k if toy.turn is None else rotate(k, toy.turn)
    half = svd.S.clamp_min(svd.S[0] * 1e-12).rsqrt()
    A = tokens[:, 0] @ W_Q @ (W_K.mT @ svd.V * half)
    B = k @ (W_Q.mT @ svd.U * half)
    if rotation is not None:
        A, B = A @ rotation, B @ rotation
    m = B.shape[1]
    return A * (B[torch.arange(len(B)), probe.key] - B.mean(1)) * (m / (m - 1))
