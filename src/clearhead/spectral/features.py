"""The features that one head compares, recovered from its weights and its inputs on a text.

    mode k of Ω = W_Q W_Kᵀ:   query-side feature ∝ Σ u_k,   key-side feature ∝ Σ v_k       (whiten.py)
    pair k, with ica=True:    independent components of the inputs on all those modes      (ica.py)

Σ is the centred covariance of n(resid_pre), the layer's normalised residual stream without the norm's gain, over the
positions of the text that are both queries and keys. Left out, and counted, are positions that hold a sink instead of
content: the first of a block, special tokens, and residual vectors longer than 10 times the block's median. Everything
is in float64 but the model's own forward. Stability is the cosine between what two halves of the text give, alternate
blocks.

Not here: what lies near a feature (nearest.py), whether a head uses it (signals.py).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from clearhead.data.text import separator_of
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.weights import attention_norm
from clearhead.runs import progress
from clearhead.spectral.attention_modes import head_modes
from clearhead.spectral.factored import Factored
from clearhead.spectral.ica import Pairs, separate_pairs
from clearhead.spectral.theory import unwhiten
from clearhead.spectral.whiten import (
    Covariance,
    InputMoments,
    Shrinkage,
    TokenSpace,
    column_cosines,
    compare_with_cone,
    estimate_covariance,
    leave_cone,
)

MASSIVE = 10.0
"""Residual vectors longer than this many times the median of their block are sinks."""
CONE = 0.5
"""A feature this close to the mean input or to the top principal components may be what all inputs share."""


class Positions(NamedTuple):
    """How many positions of the text were used, and why the others were not; each counts under its first reason."""

    used: int
    first: int
    special: int
    massive: int


@dataclass(frozen=True, eq=False)
class Side:
    """The query side or the key side of k modes or pairs; column or entry k belongs to number k."""

    reads: Float[Tensor, "d k"]
    """Unit directions that the head projects on."""
    features: Float[Tensor, "d k"]
    """Unit directions that would be seen there: Σ · reads."""
    outside_cone: Float[Tensor, "d k"]
    """The features without their part along the mean input and its top 3 principal components; unit, or 0."""
    turned: Float[Tensor, " k"]
    """Cosine between the two: 1 where the inputs are isotropic around the direction."""
    stability: Float[Tensor, " k"]
    """Cosine between the features of two halves of the text."""
    cone_mean: Float[Tensor, " k"]
    """Cosine with the mean input."""
    cone_component: Float[Tensor, " k"]
    """Norm of the projection on the span of the top 3 principal components."""
    energy: Float[Tensor, " k"]
    """Second moment of inputs along the direction read, relative to the average direction."""
    unused: Float[Tensor, " k"]
    """Share of the direction read outside the reach of tokens."""

    @property
    def in_cone(self) -> Bool[Tensor, " k"]:
        """Features that may be no more than what all inputs share."""
        return (self.cone_mean.abs() > CONE) | (self.cone_component > CONE)


@dataclass(frozen=True, eq=False)
class HeadFeatures:
    """What `recover_features` finds for one head."""

    layer: int
    head: int
    sigma: Float[Tensor, " k"]
    """Singular values times the score scale."""
    degenerate: Bool[Tensor, " k"]
    """Modes whose singular value is too close to a neighbour's for its vectors to mean anything."""
    query: Side
    key: Side
    pairs: Pairs | None
    """Separated pairs, with ica=True; `pair_query` and `pair_key` describe their sides."""
    pair_query: Side | None
    pair_key: Side | None
    unused_share: float
    """Share of ‖Ω‖² that acts where no token is."""
    covariance: Covariance
    positions: Positions
    rank: int
    """Modes that the head has; there are no more features on a side than that."""


@dataclass(frozen=True, eq=False)
class Sample:
    """The inputs at the used positions of some blocks: their moments, and where they lie along the modes."""

    moments: InputMoments
    query_rows: Float[Tensor, "n k"]
    key_rows: Float[Tensor, "n k"]

    def __add__(self, other: "Sample") -> "Sample":
        """Both together."""
        return Sample(
            self.moments + other.moments,
            torch.cat([self.query_rows, other.query_rows]),
            torch.cat([self.key_rows, other.key_rows]),
        )


@torch.no_grad()
def recover_features(
    model: Model,
    layer: int,
    head: int,
    tokens: Int[Tensor, "b t"],
    n_modes: int = 8,
    *,
    ica: bool = False,
    shrinkage: Shrinkage = "ledoit-wolf",
    seed: int = 0,
    batch_blocks: int = 8,
) -> HeadFeatures:
    """The features of the head's top `n_modes` modes (all it has, where that is fewer), from blocks of tokens.

    Raises `ClearheadError` for a head that does not exist or whose product is zero, for fewer than two blocks and for
    too little text; what `head_modes` raises for layers without a query-key product.
    """
    refuse_missing_head(model, layer, head)
    modes = head_modes(model, layer, torch.float64)
    if n_modes < 1:
        raise ClearheadError(f"modes: expected at least 1, got {n_modes}")
    if len(tokens) < 2:
        raise ClearheadError("features need at least two blocks of text, whose halves are compared; give more tokens")
    rank = int(modes.svd.rank[head])
    if rank == 0:
        raise ClearheadError(f"head {layer}.{head} has a query-key product of zero, so it has no modes")
    U, S, V = modes.svd.U[head].cpu(), modes.svd.S[head].cpu(), modes.svd.V[head].cpu()
    count = min(n_modes, rank)
    sigma = S[:count] * abs(modes.geometry.scale * modes.geometry.q_scale)
    halves, positions = _read(model, layer, tokens, U[:, :count], V[:, :count], batch_blocks)
    whole = halves[0] + halves[1]
    covariance = estimate_covariance(whole.moments, shrinkage)
    parts = [estimate_covariance(half.moments, shrinkage) for half in halves]
    space = TokenSpace.of(whole.moments)

    def describe(reads: Tensor, features: Tensor, first: Tensor, second: Tensor) -> Side:
        cone = compare_with_cone(features, whole.moments, covariance)
        return Side(
            reads=reads,
            features=features,
            outside_cone=leave_cone(features, whole.moments, covariance),
            turned=column_cosines(reads, features),
            stability=column_cosines(first, second),
            cone_mean=cone.mean,
            cone_component=cone.component,
            energy=space.energy(reads),
            unused=space.unused(reads),
        )

    def of_modes(reads: Tensor) -> Side:
        first, second = (unwhiten(part.matrix, reads) for part in parts)
        return describe(reads, unwhiten(covariance.matrix, reads), first, second)

    def separated(sample: Sample, sigma_inputs: Covariance) -> Pairs:
        return separate_pairs(
            sample.query_rows, sample.key_rows, U[:, :count], sigma, V[:, :count], sigma_inputs.matrix, seed
        )

    pairs = pair_query = pair_key = None
    if ica:
        pairs = separated(whole, covariance)
        first, second = (separated(half, part) for half, part in zip(halves, parts, strict=True))
        pair_query = describe(
            pairs.query_reads, pairs.query, _matched(pairs.query, first.query), _matched(pairs.query, second.query)
        )
        pair_key = describe(pairs.key_reads, pairs.key, _matched(pairs.key, first.key), _matched(pairs.key, second.key))
    return HeadFeatures(
        layer=layer,
        head=head,
        sigma=sigma,
        degenerate=modes.svd.degenerate[head, :count].cpu(),
        query=of_modes(U[:, :count]),
        key=of_modes(V[:, :count]),
        pairs=pairs,
        pair_query=pair_query,
        pair_key=pair_key,
        unused_share=float(space.unused_share(Factored(U * S, V))),
        covariance=covariance,
        positions=positions,
        rank=rank,
    )


def refuse_missing_head(model: Model, layer: int, head: int) -> None:
    """Raises `ClearheadError` where the layer has no such head."""
    count = model.geometry(layer).n_heads
    if not 0 <= head < count:
        raise ClearheadError(f"there is no head {head}: layer {layer} has {count} heads, counted from 0")


def _read(
    model: Model, layer: int, tokens: Int[Tensor, "b t"], U: Tensor, V: Tensor, batch_blocks: int
) -> tuple[list[Sample], Positions]:
    """Blocks of even and of odd number, and which positions were used."""
    norm, site, special = attention_norm(model, layer), f"resid_pre.{layer}", _special_tokens(model)
    nothing = InputMoments.of(torch.zeros(0, model.d_model))
    halves = [Sample(nothing, *(torch.zeros(0, U.shape[1], dtype=torch.float64) for _ in "qk")) for _ in range(2)]
    counts = torch.zeros(4, dtype=torch.long)
    with progress("features", tokens.numel()) as advance:
        for numbers in torch.arange(len(tokens)).split(batch_blocks):
            resid = model.run(tokens[numbers], read=[site])[site].float()
            used, found = _usable(tokens[numbers], resid.cpu(), special)
            counts += found
            x = (resid if norm is None else norm.normalise(resid)).cpu().double()
            for half in range(2):
                mine = numbers % 2 == half
                rows = x[mine][used[mine]]
                halves[half] += Sample(InputMoments.of(rows), rows @ U, rows @ V)
            advance(resid.shape[0] * resid.shape[1])
    return halves, Positions(*counts.tolist())


def _usable(
    tokens: Int[Tensor, "b t"], resid: Float[Tensor, "b t d"], special: Int[Tensor, " s"]
) -> tuple[Bool[Tensor, "b t"], Int[Tensor, "4"]]:
    """Which positions hold content, and how many are used, first, special and massive."""
    first = torch.zeros_like(tokens, dtype=torch.bool).cpu()
    first[:, 0] = True
    named = torch.isin(tokens.cpu(), special) & ~first
    length = resid.norm(dim=-1)
    massive = (length > MASSIVE * length.median(1, keepdim=True).values) & ~first & ~named
    used = ~(first | named | massive)
    return used, torch.stack([kind.sum() for kind in (used, first, named, massive)])


def _special_tokens(model: Model) -> Int[Tensor, " s"]:
    """Ids that stand for no text: the tokenizer's special tokens and what is put between documents."""
    if model.tokenizer is None:
        return torch.zeros(0, dtype=torch.long)
    separator = separator_of(model.tokenizer)
    ids = {*model.tokenizer.all_special_ids, *([] if separator is None else [separator])}
    return torch.tensor(sorted(ids), dtype=torch.long)


def _matched(whole: Float[Tensor, "d k"], half: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
    """The features of a half in the order and with the signs of the whole's, paired by |cos|."""
    cosines = whole.mT @ half
    order = torch.from_numpy(linear_sum_assignment(-cosines.abs().numpy())[1])
    flipped = cosines.gather(1, order[:, None])[:, 0] < 0
    return torch.where(flipped, -half[:, order], half[:, order])
