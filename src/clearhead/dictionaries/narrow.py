"""Queries and keys narrower than the model's: the control that asks how wide a QK has to be.

    with a rotation      the coordinates (planes, components that do not turn) that move the scores most are kept
    without one          the product of queries and keys, biases included, is cut to its largest singular directions

A plane's score is  s_ij = scale q_i R(i - j) k_j  on its two components. A softmax ignores what all keys of a query
have in common, so what a coordinate moves is the variance of its part of the score over the keys a query sees, summed
over the queries of a sample and over the heads. All heads keep the same coordinates, as one rotation serves them all;
what is taken per component of width decides, so that planes and single components compete fairly.

The variant without a rotation keeps the best product of that rank in the Frobenius norm of [W b], whatever the
activations are. Layers with a query-key norm are refused: their norm runs over the components that would be left out.
Source of the question: arXiv 2504.20938, its ablation of the QK rank.
"""

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.dictionaries.lorsa import coordinates
from clearhead.errors import ClearheadError
from clearhead.model.geometry import AttentionGeometry
from clearhead.model.rope import RopeSpec, rotate
from clearhead.model.weights import AttentionWeights


@torch.no_grad()
def narrow(
    weights: AttentionWeights, geometry: AttentionGeometry, width: int, x: Float[Tensor, "b t d"]
) -> tuple[AttentionWeights, AttentionGeometry]:
    """The same layer with queries and keys of `width` components, float32 on the CPU; `x`: a sample of its inputs.

    Raises `ClearheadError` for a width that the layer's own does not exceed, one that planes of two do not fill, and
    layers with a query-key norm.
    """
    if not 0 < width < geometry.d_head:
        raise ClearheadError(
            f"queries and keys of this layer are {geometry.d_head} wide; a narrower QK has 1 to {geometry.d_head - 1}"
        )
    if geometry.qk_norm is not None:
        raise ClearheadError("this layer norms queries and keys over their whole width, which a narrower QK has not")
    w = weights.to(torch.float32, "cpu").per_head()
    if geometry.rope is None:
        return _truncated(w, width), dataclasses.replace(geometry, d_head=width)
    kept, rope = _kept(w, geometry, geometry.rope, width, x)
    parts = {name: getattr(w, name)[..., kept] for name in ("W_Q", "W_K")}
    parts |= {name: None if (bias := getattr(w, name)) is None else bias[..., kept] for name in ("b_Q", "b_K")}
    return dataclasses.replace(w, **parts), dataclasses.replace(geometry, d_head=width, rope=rope)


def _truncated(w: AttentionWeights, width: int) -> AttentionWeights:
    queries, keys = singular_factors(*(_with_bias(*side) for side in ((w.W_Q, w.b_Q), (w.W_K, w.b_K))))
    queries, keys = queries[:, :width], keys[:, :width]
    parts = {"W_Q": queries[..., :-1].mT, "W_K": keys[..., :-1].mT, "b_Q": queries[..., -1], "b_K": keys[..., -1]}
    return dataclasses.replace(w, **parts)


def _with_bias(W: Float[Tensor, "h d dh"], b: Float[Tensor, "h dh"] | None) -> Float[Tensor, "h dh d1"]:
    bias = W.new_zeros(len(W), W.shape[-1]) if b is None else b
    return torch.cat([W.mT, bias[..., None]], -1)


def singular_factors(
    A: Float[Tensor, "g dh e"], B: Float[Tensor, "g dh e"]
) -> tuple[Float[Tensor, "g dh e"], Float[Tensor, "g dh e"]]:
    """Factors of the same products AᵀB whose rows are its singular directions, largest first, both sides equally long.

    Rows beyond the rank of a product are zero.
    """
    rows, dtype = A.shape[1], A.dtype
    Q_a, R_a = torch.linalg.qr(A.mT.double())
    Q_b, R_b = torch.linalg.qr(B.mT.double())
    U, S, Vh = torch.linalg.svd(R_a @ R_b.mT)
    root = S.sqrt()[..., None]
    A, B = root * (Q_a @ U).mT, root * (Q_b @ Vh.mT).mT
    missing = rows - A.shape[1]
    return tuple(torch.nn.functional.pad(side, (0, 0, 0, missing)).to(dtype) for side in (A, B))  # pyright: ignore[reportReturnType]


def _kept(
    w: AttentionWeights, geometry: AttentionGeometry, rope: RopeSpec, width: int, x: Float[Tensor, "b t d"]
) -> tuple[Int[Tensor, " width"], RopeSpec | None]:
    """The components that are kept, in the order of the narrower layout, and its rotation."""
    where = torch.tensor(coordinates(geometry.d_head, rope.rotary_dim, rope.interleaved))
    half = rope.rotary_dim // 2
    share = score_variance(w, geometry, x).sum(0)
    sizes = torch.bincount(where)
    chosen: list[int] = []
    for coordinate in (share / sizes).argsort(descending=True).tolist():
        if sum(int(sizes[c]) for c in chosen) + int(sizes[coordinate]) <= width:
            chosen.append(coordinate)
    if sum(int(sizes[c]) for c in chosen) != width:
        raise ClearheadError(f"planes of two components do not fill a width of {width}; give an even one")
    turning, still = sorted(c for c in chosen if c < half), sorted(c for c in chosen if c >= half)
    pairs = torch.stack([(where == c).nonzero()[:, 0] for c in turning]) if turning else torch.zeros(0, 2).long()
    order = pairs.flatten() if rope.interleaved else pairs.T.flatten()
    kept = torch.cat([order, torch.tensor([c + half for c in still], dtype=torch.int64)])
    if not turning:
        return kept, None
    return kept, dataclasses.replace(rope, inv_freq=rope.inv_freq.cpu()[turning], rotary_dim=2 * len(turning))


def score_variance(w: AttentionWeights, geometry: AttentionGeometry, x: Float[Tensor, "b t d"]) -> Float[Tensor, "h c"]:
    """Per head and coordinate of a rotating layer, the mean over queries of its score's variance over the keys seen.

    Position 0 is left out as a key: where it is a sink, the variance would be about it alone.
    """
    rope, t = geometry.rope, x.shape[1]
    assert rope is not None
    where = torch.tensor(coordinates(geometry.d_head, rope.rotary_dim, rope.interleaved))
    cos, sin = rope.tables(torch.arange(t))
    cos, sin = cos.cpu(), sin.cpu()
    seen = torch.ones(t, t, dtype=torch.bool).tril()
    if geometry.window is not None:
        seen &= ~torch.ones(t, t, dtype=torch.bool).tril(-geometry.window)
    seen[:, 0] = False
    seen = seen[2:].float()
    count = seen.sum(1)
    total = x.new_zeros(len(w.W_Q), int(where.max()) + 1)
    for block in x:
        q, k = (block @ W + (0 if b is None else b[:, None]) for W, b in ((w.W_Q, w.b_Q), (w.W_K, w.b_K)))
        q, k = rotate(q, cos, sin, rope)[:, 2:] * geometry.scale * geometry.q_scale, rotate(k, cos, sin, rope)
        for c in range(total.shape[1]):
            scores = q[..., where == c] @ k[..., where == c].mT
            mean = (scores * seen).sum(-1) / count
            total[:, c] += ((scores.square() * seen).sum(-1) / count - mean.square()).mean(-1)
    return total / len(x)
