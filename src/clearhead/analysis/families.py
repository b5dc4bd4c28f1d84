"""Families: heads of a layer that read the same source tokens at the same queries, shown as one card.

An original head that copies any token has a value path of high rank, and a Lorsa takes it apart into many rank-1 heads
with nearly the same pattern. What they share is where they read, so, with D_n,i(j) = |A_ij v_j| / Σ_j |A_ij v_j| where
head n is active at query i,

    overlap(n, m)  = mean over the queries i at which both are active of Σ_j min(D_n,i(j), D_m,i(j))
    together(n, m) = queries at which both are active / those of the one that is active less often

measured on a sample of the text. From the most active head down, each head joins the first member (leader) of the
family with the largest overlap, provided that

    overlap ≥ OVERLAP,  together ≥ TOGETHER,  at least CASES common queries, no fewer than independence would bring

and else leads a family of its own; families of one are not listed. So every member overlaps with its leader, and
nothing is chained. The result depends on the sample alone, not on order or batches. Cost: k² · t per query compared,
k heads active; memory: the pairs that ever were active together, not all pairs.

    read_rank, write_rank   (Σ λ)² / Σ λ²  over the eigenvalues λ of the Gram matrix of the members' unit w_v (w_o):
                            the number of directions they span, r for r orthogonal ones, 1 for one
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from clearhead.analysis.entries import Entries
from clearhead.analysis.looking import Looks, name_offset
from clearhead.analysis.token_texts import Strings
from clearhead.dictionaries.lorsa import Lorsa

OVERLAP = 0.7
"""Overlap from which two heads read the same tokens."""
TOGETHER = 0.2
"""Share of the rarer head's queries at which the other is active too, from which they belong together."""
CASES = 5
"""Common queries that an overlap must rest on."""
REACHES = (2, 4, 8, 16)
"""Distances that name a family which stays within them."""
TELLING = 0.6
"""Share of the keys that matter from which a distance or a token names a family."""


class Family(NamedTuple):
    """Heads that read the same tokens; the leader, which is the most active one, first."""

    heads: tuple[int, ...]
    overlap: float
    """Mean overlap of the other members with the leader."""
    read_rank: float
    write_rank: float


class PairOverlaps:
    """Overlaps of all pairs of heads that were active at a common query, streaming over blocks."""

    def __init__(self, n_units: int):
        self.n_units, self.n_queries = n_units, 0
        self.active = np.zeros(n_units, dtype=np.int64)
        self._pair = np.zeros(0, dtype=np.int64)
        self._count = np.zeros(0, dtype=np.int64)
        self._total = np.zeros(0, dtype=np.float64)
        self._new: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []

    def update(
        self,
        entries: Entries,
        query: NDArray[np.int64],
        patterns: Float[Tensor, "p q k"],
        values: Float[Tensor, "k n"],
        pattern_size: int,
        first: int,
    ) -> None:
        """Take one block into account: its entries with their query positions, its patterns and its values.

        Queries before `first` are left out of the count; the entries must leave them out too.
        """
        self.n_queries += patterns.shape[1] - first
        self.active += np.bincount(entries.unit, minlength=self.n_units)
        found: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        order = np.lexsort((entries.unit, query))
        unit, query = entries.unit[order], query[order]
        starts = np.flatnonzero(np.r_[True, query[1:] != query[:-1]]) if len(query) else np.zeros(0, np.int64)
        by_head = values.T
        for low, high in zip(starts, np.r_[starts[1:], len(query)], strict=True):
            heads, i = torch.from_numpy(unit[low:high]).to(values.device), int(query[low])
            moved = (patterns[heads // pattern_size, i, : i + 1] * by_head[heads, : i + 1]).abs()
            reads = moved / moved.sum(-1, keepdim=True).clamp_min(torch.finfo(moved.dtype).tiny)
            a, b = _pairs(int(high - low))
            shared = _shared(reads)[a, b]
            found.append((unit[low:high][a] * self.n_units + unit[low:high][b], shared))
        if found:
            pair, shared = (np.concatenate(part) for part in zip(*found, strict=True))
            self._new.append(_summed(pair, np.ones(len(pair), dtype=np.int64), shared))
        if sum(len(part[0]) for part in self._new) > 4 * max(len(self._pair), 2**20):
            self._merge()

    def pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """(head, head, common queries, mean overlap) of every pair that was active together, the lower head first."""
        self._merge()
        one, other = np.divmod(self._pair, self.n_units)
        return one, other, self._count, self._total / np.maximum(self._count, 1)

    def _merge(self) -> None:
        parts = [(self._pair, self._count, self._total), *self._new]
        pair, count, total = (np.concatenate(part) for part in zip(*parts, strict=True))
        self._pair, self._count, self._total = _summed(pair, count, total)
        self._new = []


def find_families(overlaps: PairOverlaps, lorsa: Lorsa) -> list[Family]:
    """The families of two heads or more, largest first."""
    one, other, count, overlap = overlaps.pairs()
    active = overlaps.active
    expected = active[one] * active[other] / max(overlaps.n_queries, 1)
    rarer = np.minimum(active[one], active[other])
    near = (overlap >= OVERLAP) & (count >= CASES) & (count >= TOGETHER * rarer) & (count >= expected)
    neighbours: dict[int, dict[int, float]] = {}
    for a, b, size in zip(one[near].tolist(), other[near].tolist(), overlap[near].tolist(), strict=True):
        neighbours.setdefault(a, {})[b] = size
        neighbours.setdefault(b, {})[a] = size
    members: dict[int, list[int]] = {}
    for head in np.lexsort((np.arange(len(active)), -active)).tolist():
        near_leaders = {leader: size for leader, size in neighbours.get(head, {}).items() if leader in members}
        leader = max(near_leaders, key=lambda at: (near_leaders[at], -at), default=head)
        members.setdefault(leader, []).append(head)
    families = [
        Family(
            tuple(heads),
            float(np.mean([neighbours[leader][head] for head in heads[1:]])),
            effective_rank(lorsa.W_V[torch.tensor(heads)]),
            effective_rank(lorsa.W_O[torch.tensor(heads)]),
        )
        for leader, heads in members.items()
        if len(heads) > 1
    ]
    return sorted(families, key=lambda family: (-len(family.heads), family.heads))


@torch.no_grad()
def effective_rank(rows: Float[Tensor, "m d"]) -> float:
    """Participation ratio of the directions that the rows span, each row scaled to length 1; rows of zeros count not.

    (tr G)² / |G|_F² of their Gram matrix G; 0 when all rows are zero.
    """
    unit = F.normalize(rows.detach().double(), dim=-1)
    gram = unit @ unit.T
    size = float(gram.square().sum())
    return float(gram.trace()) ** 2 / size if size else 0.0


def family_rows(
    families: Sequence[Family],
    layer: int,
    names: Sequence[str],
    looks: Looks,
    strings: Strings,
) -> dict[str, Any]:
    """Columns of table `families`; strings: the texts of an array of token ids."""
    return {
        "family": [f"family.{layer}.{number}" for number in range(len(families))],
        "layer": [layer] * len(families),
        "units": [[names[head] for head in family.heads] for family in families],
        "overlap": [family.overlap for family in families],
        "read_rank": [family.read_rank for family in families],
        "write_rank": [family.write_rank for family in families],
        "label": label_families(families, looks, strings),
    }


def label_families(families: Sequence[Family], looks: Looks, strings: Strings) -> list[str]:
    """What most keys that matter of the members' strongest examples have in common; empty where nothing does.

    In this order: the first token of the text, one distance, one token, the least of some distances that hold them.
    """
    owner = looks.unit[looks.example]
    order = np.argsort(owner, kind="stable")
    owner, place, offset, key = (part[order] for part in (owner, looks.place, looks.offset, looks.key))
    labels = []
    for family in families:
        spans = [slice(*np.searchsorted(owner, [head, head + 1])) for head in family.heads]
        at = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        labels.append(_label(place[at], offset[at], key[at], strings))
    return labels


def _label(
    place: NDArray[np.int64],
    offset: NDArray[np.int64],
    key: NDArray[np.int64],
    strings: Strings,
) -> str:
    if not len(place):
        return ""
    if np.mean(place == 0) >= TELLING:
        return "the first token"
    for values, name in ((offset, name_offset), (key, lambda token: f"at {strings(np.array([token]))[0].as_py()!r}")):
        what, count = np.unique(values, return_counts=True)
        if count.max() >= TELLING * len(values):
            return name(int(what[count.argmax()]))
    reach = next((far for far in REACHES if np.mean(offset <= far) >= TELLING), None)
    return "" if reach is None else f"up to {reach} tokens back"


@cache
def _pairs(size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every pair of `size` things once; queries with equally many active heads share them."""
    return np.triu_indices(size, 1)


def _shared(reads: Float[Tensor, "m k"]) -> NDArray[np.float64]:
    """Σ_j min of every pair of rows."""
    return torch.minimum(reads[:, None], reads[None]).sum(-1).double().cpu().numpy()


def _summed(
    pair: NDArray[np.int64], count: NDArray[np.int64], total: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Each pair once, its counts and totals added up."""
    if not len(pair):
        return pair, count, total
    order = np.argsort(pair, kind="stable")
    pair, count, total = pair[order], count[order], total[order]
    starts = np.flatnonzero(np.r_[True, pair[1:] != pair[:-1]])
    return pair[starts], np.add.reduceat(count, starts), np.add.reduceat(total, starts)
