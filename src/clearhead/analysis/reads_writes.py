"""The value path of a Lorsa head in words: what gives it a large value, and what its write vector moves.

    reads    embedding.T   w_v · (n(E_T) − mean over tokens of n(E)), n the norm before attention: how much larger v is
                           at a token whose embedding alone stands there than at the average token
             feature, lorsa  w_v · (what the unit writes), through the norms: v per unit of the unit's activation
    writes   feature, lorsa  (what the unit reads) · w_o, through the norms: pre-activation (for a Lorsa head its v)
                           per unit of the head's activation
             feature (SAE of the same attn_out)   cosine of its decoder row and w_o

All direct paths alone, norms at their mean scale (neighbours.py). A finding is kept only if its cosine, between the two
vectors as they meet, exceeds what the best of as many random directions would reach (spectral/nearest.py,
`chance_cosine`); of tokens only those that make v positive are kept, since the largest pre-activations win, but both
signs for heads that keep theirs (`signed-topk`). Logits that are raised and lowered are in table `units`.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from clearhead.analysis.neighbours import DirectPath, LayerSite, Neighbour, Neighbourhood, names_of
from clearhead.analysis.relations import Related
from clearhead.analysis.token_texts import Strings
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.model.access import Model
from clearhead.model.weights import attention_norm
from clearhead.spectral.nearest import chance_cosine

TOP = 8
"""Findings of one kind kept per head, at most."""
PRODUCTS_AT_ONCE = 2**25


class Largest(NamedTuple):
    """The largest products of some rows with some others, those that chance would not bring; arrays [findings]."""

    row: NDArray[np.int64]
    other: NDArray[np.int64]
    value: NDArray[np.float64]


@torch.no_grad()
def largest_products(
    rows: Float[Tensor, "n d"], others: Float[Tensor, "m d"], *, positive: bool = False, top: int = TOP
) -> Largest:
    """Per row the `top` others of the largest |product| (or product) whose cosine beats chance; none of no others."""
    if not len(others):
        return Largest(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    lengths = others.norm(dim=-1).to(rows)
    chance = chance_cosine(len(others), rows.shape[1])
    parts: list[tuple[NDArray[np.int64], ...]] = []
    step = max(1, PRODUCTS_AT_ONCE // max(len(others), 1))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        products = part @ others.T.to(rows)
        best = (products if positive else products.abs()).topk(min(top, len(others)), dim=-1)
        value = products.gather(1, best.indices)
        size = part.norm(dim=-1, keepdim=True) * lengths[best.indices]
        kept = (best.values > chance * size) & (best.values > 0)
        row, _ = kept.nonzero(as_tuple=True)
        parts.append(
            ((row + start).cpu().numpy(), best.indices[kept].cpu().numpy(), value[kept].double().cpu().numpy())
        )
    return Largest(*(np.concatenate(part) for part in zip(*parts, strict=True)))


@torch.no_grad()
def normed_embeddings(model: Model, layer: int) -> Float[Tensor, "v d"]:
    """Every token's embedding as attention `layer` would see it alone: normed, without gain and bias, mean taken off.

    No rows for a model that projects its embeddings before they enter the stream.
    """
    rows = model.places.embedding.get_parameter("weight").detach().float()
    if rows.shape[1] != model.d_model:
        return rows.new_zeros(0, model.d_model)
    norm = attention_norm(model, layer)
    rows = rows if norm is None else norm.normalise(rows)
    return rows - rows.mean(0)


@torch.no_grad()
def read_embeddings(lorsa: Lorsa, model: Model, layer: int, strings: Strings) -> Related:
    """Relation `reads` for tokens."""
    norm = attention_norm(model, layer)
    read = lorsa.W_V.detach().float()
    if norm is not None:
        read = norm.centre(read if norm.gain is None else read * norm.gain.detach().float())
    positive = lorsa.config.activation != "signed-topk"
    found = largest_products(read, normed_embeddings(model, layer).to(read.device), positive=positive)
    names = np.array([f"embedding.{token}" for token in found.other.tolist()], dtype=np.str_)
    return Related("reads", found.row, names, strings(found.other), found.value)


@torch.no_grad()
def meet_neighbours(lorsa: Lorsa, neighbourhood: Neighbourhood, path: DirectPath) -> list[Related]:
    """Relations `reads` and `writes` for the units of other dictionaries."""
    layer = neighbourhood.layer
    found = []
    read, write = lorsa.W_V.detach().float(), lorsa.W_O.detach().float()
    own_in, own_out = LayerSite("attn_in", layer), LayerSite("attn_out", layer)
    for neighbour in neighbourhood.writers:
        decoder = neighbour.decoder.float()
        if neighbour.writes == own_in:  # an SAE of what attention receives: no norm lies between
            products = largest_products(read, decoder)
        else:
            products = largest_products(path.reading(read, own_in), path.writing(decoder, neighbour.writes))
        found.append(_related("reads", products, neighbour, neighbour.writes))
    for neighbour in neighbourhood.readers:
        encoder = path.reading(neighbour.encoder.float(), neighbour.reads)
        products = largest_products(path.writing(write, own_out), encoder)
        found.append(_related("writes", products, neighbour, neighbour.reads))
    for neighbour in neighbourhood.twins:
        products = largest_products(F.normalize(write, dim=-1), F.normalize(neighbour.decoder.float(), dim=-1))
        found.append(_related("writes", products, neighbour, neighbour.writes))
    return found


def _related(relation: str, found: Largest, neighbour: Neighbour, side: LayerSite) -> Related:
    names = np.array(names_of(neighbour, side, found.other.tolist()), dtype=np.str_)
    labels = pa.array([neighbour.label] * len(found.row), pa.string())
    return Related(relation, found.row, names, labels, found.value)
