"""How much of its group's query-key product a Lorsa head uses, and whether its pattern is its own.

Rank. The score of a pattern is a sum over coordinates c (planes of the rotation and components that do not turn; where
nothing turns or norms, the singular directions of the group's product):  s_ij = sum_c s_c,ij.  A head n is kept to the
coordinates C by leaving the others' scores out:

    z^C_i = sum_j softmax_j( sum_{c in C} s_c,ij ) v_n,j      kept(C) = 1 - sum_i (z_i - z^C_i)² / sum_i (z_i - mean z)²

over tokens i at which the head is active. Coordinates enter in the order of how much they matter to this head: the root
mean square over its tokens of their integrated gradient, g_c,i = mean over a in (0, 1) of d z_i / d gate_c where all
scores are a times what they are; sum_c g_c,i is z_i less the z_i of uniform attention. The rank is the smallest number
from which on `keep` of the variance stays. It is what a gate of zeros and ones could leave out after training; a head
retrained under its gate could do with fewer.

Own patterns. Of two patterns of one group, overlap_i = sum_j min(A_ij, A'_ij) at query i. A head's pattern is its own
when the mean overlap with every other pattern of its group, over the tokens at which the head is active, stays below
`OWN`. With one pattern per group no head has its own.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.dictionaries.init import turn_to_singular_directions
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.ops.bootstrap import share_bounds
from clearhead.ops.lorsa import visible

STEPS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Midpoints of the path of the integrated gradient."""
KEEP = 0.95
"""Share of the variance of z that a head's rank keeps."""
OWN = 0.8
"""Mean overlap below which a pattern counts as another one."""
FEWEST = 8
"""Active tokens below which a head gets no rank."""
NUMBERS_AT_ONCE = 1 << 25
"""Scores by coordinate that are held at a time."""
Batches = Callable[[], Iterable[Float[Tensor, "b t d"]]]
"""Gives the same inputs of the attention module at every call."""


class Ranks(NamedTuple):
    """Post-hoc ranks of all heads."""

    rank: Int[Tensor, " n"]
    """Coordinates needed; -1 for a head that was active at too few tokens, or always by the same amount."""
    kept: Float[Tensor, "n c1"]
    """Share of the variance of z that the 0, 1, 2, … most important coordinates keep; NaN where there is no rank."""
    order: Int[Tensor, "n c"]
    """Coordinates, most important first."""
    cases: Int[Tensor, " n"]
    """Active tokens looked at."""


class OwnShare(NamedTuple):
    """Share of heads whose pattern is their own, with its 95 % bootstrap interval over heads."""

    share: float
    low: float
    high: float
    n_heads: int
    """Heads that were active at enough tokens."""
    overlap: Float[Tensor, " n"]
    """By head, the largest mean overlap with another pattern of its group; NaN where it was active too rarely."""


@torch.no_grad()
def head_ranks(
    lorsa: Lorsa,
    batches: Batches,
    *,
    keep: float = KEEP,
    heads: Sequence[int] | None = None,
    tokens_per_head: int = 64,
    first: int = 1,
) -> Ranks:
    """The rank of each head (of `heads`), from its first `tokens_per_head` active tokens from position `first` on.

    Two passes over `batches`: one for the order of the coordinates, one for what each number of them keeps. Memory
    follows one pattern's active queries, never tokens times heads times coordinates. Raises `ClearheadError` for a
    share that is none.
    """
    if not 0 < keep <= 1:
        raise ClearheadError(f"keep = {keep} is no share of a variance; give a number above 0, at most 1, such as 0.95")
    lorsa = _in_singular_directions(lorsa)
    n, count = lorsa.n_heads, max(lorsa.config.coordinates) + 1
    matters, cases = lorsa.W_V.new_zeros(n, count), torch.zeros(n, dtype=torch.int64, device=lorsa.W_V.device)
    for rows in _active_rows(lorsa, batches, heads, tokens_per_head, first):
        total, part = rows.scores.sum(-1), rows.scores.new_zeros(len(rows.head), count)
        for a in STEPS:
            weight = _softmax(rows, a * total)
            slope = weight * _cap_slope(rows, a * total)
            # d z / d s_j = A_j (v_j - z), and the gate of coordinate c moves s_j by its score
            pull = slope * (rows.values - (weight * rows.values).sum(-1, keepdim=True))
            part += torch.einsum("rj,rjc->rc", pull, rows.scores)
        matters.index_add_(0, rows.head, (part / len(STEPS)).square())
        cases += torch.bincount(rows.head, minlength=n)
    order = matters.argsort(dim=-1, descending=True, stable=True)
    error, moments = (torch.zeros(n, width, dtype=torch.float64, device=cases.device) for width in (count + 1, 2))
    for rows in _active_rows(lorsa, batches, heads, tokens_per_head, first):
        ranked = rows.scores.gather(-1, order[rows.head][:, None].expand_as(rows.scores))
        z = (_softmax(rows, rows.scores.sum(-1)) * rows.values).sum(-1)
        total = torch.zeros_like(rows.values)
        for used in range(count + 1):
            if used:
                total = total + ranked[..., used - 1]
            miss = (_softmax(rows, total) * rows.values).sum(-1) - z
            error[:, used].index_add_(0, rows.head, miss.double().square())
        moments.index_add_(0, rows.head, torch.stack([z, z.square()], -1).double())
    spread = moments[:, 1] - moments[:, 0].square() / cases.clamp_min(1)
    known = (cases >= FEWEST) & (spread > 1e-9 * moments[:, 1])
    kept = torch.where(known[:, None], 1 - error / torch.where(known, spread, 1.0)[:, None], torch.nan)
    enough = kept >= keep
    enough[:, count] = True
    rank = count + 1 - enough.flip(-1).cumprod(-1).sum(-1)
    return Ranks(torch.where(known, rank, -1), kept.float(), order, cases)


@torch.no_grad()
def own_share(
    lorsa: Lorsa,
    batches: Batches,
    *,
    heads: Sequence[int] | None = None,
    tokens_per_head: int = 64,
    first: int = 1,
) -> OwnShare:
    """The share of heads (of `heads`) whose pattern is their own, among those active at `FEWEST` tokens or more.

    In the interval heads vary, training seeds do not.
    Raises `ClearheadError` when no head is active often enough.
    """
    c, n = lorsa.config, lorsa.n_heads
    cases = _wanted(lorsa, heads, tokens_per_head)
    total, taken = lorsa.W_V.new_zeros(n, c.patterns_per_group), torch.zeros_like(cases)
    own = torch.arange(n, device=cases.device) // c.pattern_size % c.patterns_per_group
    for x in _single_blocks(batches):
        query, head = _active(lorsa, x, cases, tokens_per_head, first)
        taken += torch.bincount(head, minlength=n)
        group = head // c.group_size
        for g in group.unique().tolist():
            which = torch.arange(g * c.patterns_per_group, (g + 1) * c.patterns_per_group, device=x.device)
            patterns = lorsa.patterns(x, which)[0]
            mine = (group == g).nonzero()[:, 0]
            for part in mine.split(max(1, NUMBERS_AT_ONCE // (len(which) * x.shape[1]))):
                rows = patterns[:, query[part]]
                mine_too = rows.take_along_dim(own[head[part]][None, :, None], 0)
                overlap = torch.minimum(rows, mine_too).sum(-1)
                total.index_add_(0, head[part], overlap.T)
    known = taken >= FEWEST
    if not bool(known.any()):
        raise ClearheadError(f"no head was active at {FEWEST} tokens; give more text")
    others = (total / taken.clamp_min(1)[:, None]).scatter(1, own[:, None], -torch.inf)
    largest = torch.where(known, others.amax(1) if c.patterns_per_group > 1 else 1.0, torch.nan)
    m = int(known.sum())
    share = float((largest[known] < OWN).double().mean())
    return OwnShare(share, *share_bounds(share, m), m, largest)


class _Rows(NamedTuple):
    """Active tokens of the heads of one pattern, opened up: row r is one head at one query."""

    head: Int[Tensor, " r"]
    scores: Float[Tensor, "r j c"]
    """By key and coordinate, scaled, before any soft cap."""
    values: Float[Tensor, "r j"]
    hidden: Tensor
    """[r, j]: keys that the query does not see."""
    softcap: float | None
    sink: Float[Tensor, ""] | None


def _softmax(rows: _Rows, total: Float[Tensor, "r j"]) -> Float[Tensor, "r j"]:
    if rows.softcap is not None:
        total = torch.tanh(total / rows.softcap) * rows.softcap
    total = total.masked_fill(rows.hidden, -torch.inf)
    if rows.sink is None:
        return total.softmax(-1)
    return torch.cat([total, rows.sink.expand(len(total), 1)], -1).softmax(-1)[:, :-1]


def _cap_slope(rows: _Rows, total: Float[Tensor, "r j"]) -> Float[Tensor, "r j"] | float:
    return 1.0 if rows.softcap is None else 1 - torch.tanh(total / rows.softcap).square()


def _in_singular_directions(lorsa: Lorsa) -> Lorsa:
    """Gated patterns keep the coordinates of their gates, which were singular directions when they started."""
    if lorsa.rope is not None or lorsa.config.qk_norm is not None or lorsa.config.patterns_per_group > 1:
        return lorsa
    lorsa = copy.deepcopy(lorsa)
    turn_to_singular_directions(lorsa)
    return lorsa


def _single_blocks(batches: Batches) -> Iterator[Float[Tensor, "1 t d"]]:
    for x in batches():
        yield from x.split(1)


def _active(
    lorsa: Lorsa, x: Float[Tensor, "1 t d"], cases: Int[Tensor, " n"], most: int, first: int
) -> tuple[Int[Tensor, " r"], Int[Tensor, " r"]]:
    """Queries and heads of the activations in one block, sorted by head; of a head that has enough, no more.

    `cases` is brought up to date.
    """
    codes = lorsa.encode(x)
    query, column = (codes.values[0] != 0).nonzero(as_tuple=True)
    head = codes.heads[0][query, column]
    query, head = query[query >= first], head[query >= first]
    order = head.argsort(stable=True)
    query, head = query[order], head[order]
    found = torch.bincount(head, minlength=len(cases))
    place = torch.arange(len(head), device=head.device) - (found.cumsum(0) - found)[head]
    wanted = cases[head] + place < most
    cases += torch.minimum(found, most - cases)
    return query[wanted], head[wanted]


def _wanted(lorsa: Lorsa, heads: Sequence[int] | None, most: int) -> Int[Tensor, " n"]:
    """Cases to begin with: none, and as many as are wanted for heads that nobody asked about."""
    cases = torch.zeros(lorsa.n_heads, dtype=torch.int64, device=lorsa.W_V.device)
    if heads is not None:
        cases += most
        cases[torch.tensor(heads, dtype=torch.int64, device=cases.device)] = 0
    return cases


def _active_rows(lorsa: Lorsa, batches: Batches, heads: Sequence[int] | None, most: int, first: int) -> Iterator[_Rows]:
    c, where = lorsa.config, torch.tensor(lorsa.config.coordinates, device=lorsa.W_V.device)
    cases = _wanted(lorsa, heads, most)
    turns = int(where.max()) + 1
    for x in _single_blocks(batches):
        query, head = _active(lorsa, x, cases, most, first)
        if not len(head):
            if bool((cases >= most).all()):
                return
            continue
        t = x.shape[1]
        q, k = (side[0] for side in lorsa.queries_keys(x))
        values, seen = lorsa.values(x)[0].T, visible(t, t, c.window, x.device)
        pattern = head // c.pattern_size
        for p in pattern.unique().tolist():
            for part in (pattern == p).nonzero()[:, 0].split(max(1, NUMBERS_AT_ONCE // (t * c.d_qk))):
                at, mine = query[part], head[part]
                product = q[p, at][:, None] * k[p][None] * c.scale
                scores = product.new_zeros(len(at), t, turns).index_add_(2, where, product)
                sink = lorsa.sink[p] if c.sinks else None
                yield _Rows(mine, scores, values[mine], ~seen[at], c.softcap, sink)
