"""What lies nearest to a direction: elements of a dictionary, token embeddings, token unembeddings; by signed cosine.

Directions are those of head modes and recovered features: they live in n(resid_pre), the residual stream normalised
without gain and bias. So they are compared with

    embeddings      rows of the embedding matrix, centred where the layer's norm centres: what a token alone puts there
    unembeddings    columns of W_U with the final norm's gain folded in: which logits the direction raises or lowers
    elements        rows of any dictionary of vectors in the residual stream (write vectors, decoder rows), as they are

From both vocabularies their mean is taken off first: all embeddings share a direction that says nothing about one of
them, and a constant added to all logits changes no probability. The nearest k are those of the largest |cos|, since the
sign of a mode is one for both sides together; the sign of the cosine is kept. Rows are read in chunks: beside the
matrix itself, memory does not grow with the vocabulary.
"""

from typing import NamedTuple

import scipy.stats
import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.norms import unembedding
from clearhead.model.weights import attention_norm

ROWS_AT_ONCE = 8192


class Nearest(NamedTuple):
    """The nearest rows of each direction, nearest first."""

    cosines: Float[Tensor, "k top"]
    ids: Int[Tensor, "k top"]


class NearestTokens(NamedTuple):
    """The tokens whose embeddings and whose unembeddings are nearest."""

    embedding: Nearest
    unembedding: Nearest


def chance_cosine(n: int, d: int, level: float = 0.5) -> float:
    """A quantile (the median) of the largest |cos| of a random direction with n random rows in d dimensions.

    From cos² ~ Beta(1/2, (d - 1)/2). A nearest token no closer than this is no finding: 49,152 tokens in 576 dimensions
    give 0.18 to any direction.
    """
    if d == 1:
        return 1.0
    return float(scipy.stats.beta.ppf(level ** (1 / n), 0.5, (d - 1) / 2) ** 0.5)


@torch.no_grad()
def nearest_rows(
    directions: Float[Tensor, "d k"], rows: Float[Tensor, "n d"], top: int, mean: Float[Tensor, " d"] | None = None
) -> Nearest:
    """The `top` rows of largest |cos| with each direction, after taking `mean` off the rows; zero rows have cosine 0.

    Raises `ClearheadError` for another width and for more neighbours than rows.
    """
    if rows.shape[1] != directions.shape[0]:
        raise ClearheadError(
            f"directions have width {directions.shape[0]}, the elements {rows.shape[1]}; they belong to another model"
        )
    if not 1 <= top <= len(rows):
        raise ClearheadError(f"neighbours: expected 1 to {len(rows)}, got {top}")
    unit = directions.to(rows.device, torch.float32)
    unit = unit / unit.norm(dim=0).clamp_min(torch.finfo(torch.float32).tiny)
    best = torch.zeros(unit.shape[1], 0, device=rows.device)
    ids = torch.zeros(unit.shape[1], 0, dtype=torch.long, device=rows.device)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE].float()
        part = part if mean is None else part - mean.to(part)
        cosines = (part @ unit / part.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)).T
        numbers = torch.arange(start, start + len(part), device=rows.device).expand(len(cosines), -1)
        best, ids = torch.cat([best, cosines], 1), torch.cat([ids, numbers], 1)
        chosen = best.abs().topk(min(top, best.shape[1])).indices
        best, ids = best.gather(1, chosen), ids.gather(1, chosen)
    return Nearest(best.clamp(-1, 1).cpu(), ids.cpu())


@torch.no_grad()
def nearest_tokens(model: Model, layer: int, directions: Float[Tensor, "d k"], top: int) -> NearestTokens:
    """The tokens nearest to directions in n(resid_pre) of `layer`, by embedding and by unembedding.

    Raises `ClearheadError` where embeddings have another width than the residual stream.
    """
    embeddings = model.places.embedding.get_parameter("weight")
    if embeddings.shape[1] != model.d_model:
        raise ClearheadError(
            f"the embeddings of {model.name} have width {embeddings.shape[1]} and are projected to {model.d_model}; "
            "they cannot be compared with its residual stream"
        )
    norm = attention_norm(model, layer)
    if norm is not None and norm.kind == "layer":
        embeddings = norm.centre(embeddings)
    readers = unembedding(model)[0].T
    return NearestTokens(
        nearest_rows(directions, embeddings, top, _mean(embeddings)),
        nearest_rows(directions, readers, top, _mean(readers)),
    )


def _mean(rows: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """The mean row, in float32 at least, summed in chunks."""
    total = sum((part.float().sum(0) for part in rows.split(ROWS_AT_ONCE)), torch.zeros(rows.shape[1]).to(rows.device))
    return total / len(rows)
