"""Modes shared between the heads of a layer: features need not respect the borders between heads.

Two views of the question that SVF (2602.13524) leaves open.

    overlap_ab = mean squared cosine of the principal angles between what heads a and b read (1 the same space, r/d for
                 random spaces of dimension r), for queries and for keys
    clusters   = modes of different heads that read nearly the same pair of directions: both |u·u′| and |v·v′| at least
                 `COSINE`, joined transitively; counted also after rotating every head's modes within its spaces, which
                 keeps overlaps and destroys pairs that the heads have in common

Heads that share keys (GQA) read the same key space, so their key overlap is 1 by construction.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.spectral.attention_modes import HeadModes
from clearhead.spectral.controls import random_rotations

COSINE = 0.5
"""Modes with both cosines above this are taken for one; random directions in 576 dimensions stay below 0.2."""
ROTATIONS = 20


class SharedModes(NamedTuple):
    """Clusters of one layer: each a list of (head, mode), and how many modes clusters hold in rotated bases."""

    clusters: list[list[tuple[int, int]]]
    in_rotated: float
    """Mean number of modes that clusters hold when every head's modes are rotated."""

    @property
    def n_modes(self) -> int:
        """Modes that are in a cluster."""
        return sum(map(len, self.clusters))


def overlaps(modes: HeadModes) -> dict[str, Float[Tensor, "h h"]]:
    """Mean squared cosine of the principal angles between heads, by side (`query`, `key`); 0 for a head of rank 0."""
    found = {}
    for side, vectors in (("query", modes.svd.U), ("key", modes.svd.V)):
        real = (vectors * ~modes.outside[:, None]).cpu()
        flat = real.movedim(1, 0).flatten(1)
        h, r = modes.n_heads, vectors.shape[-1]
        square = (flat.T @ flat).square().view(h, r, h, r).sum((1, 3))
        rank = modes.svd.rank.cpu()
        smaller = torch.minimum(rank[:, None], rank[None]).clamp_min(1)
        found[side] = square / smaller
    return found


def random_overlap(modes: HeadModes) -> Float[Tensor, "h h"]:
    """The same for random spaces of these dimensions: the larger dimension over the width of the stream."""
    rank = modes.svd.rank.cpu().float()
    return torch.maximum(rank[:, None], rank[None]) / modes.svd.U.shape[1]


def find_shared(modes: HeadModes, generator: torch.Generator, cosine: float = COSINE) -> SharedModes:
    """Clusters of modes that different heads of the layer have in common."""
    U, V = (part * ~modes.outside[:, None].cpu() for part in (modes.svd.U.cpu(), modes.svd.V.cpu()))
    clusters = _clusters(U, V, cosine)
    r, counts = U.shape[-1], []
    for _ in range(ROTATIONS):
        turn = random_rotations(modes.n_heads, r, generator).to(U.dtype)
        counts.append(sum(map(len, _clusters(U @ turn, V @ turn, cosine))))
    return SharedModes(clusters, sum(counts) / len(counts))


def _clusters(U: Float[Tensor, "h d r"], V: Float[Tensor, "h d r"], cosine: float) -> list[list[tuple[int, int]]]:
    h, _, r = U.shape
    flat_u, flat_v = (part.movedim(1, 0).flatten(1) for part in (U, V))
    close = torch.minimum((flat_u.T @ flat_u).abs(), (flat_v.T @ flat_v).abs()) >= cosine
    head = torch.arange(h).repeat_interleave(r)
    close &= head[:, None] != head[None]
    parent = list(range(h * r))

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    for a, b in close.triu().nonzero().tolist():
        parent[root(a)] = root(b)
    members: dict[int, list[tuple[int, int]]] = {}
    for place in close.any(-1).nonzero()[:, 0].tolist():
        members.setdefault(root(place), []).append((place // r, place % r))
    return sorted(members.values(), key=lambda cluster: (-len(cluster), cluster))
