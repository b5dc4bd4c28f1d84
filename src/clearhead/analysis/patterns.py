"""z pattern: the exact split of a Lorsa head's activation over the tokens it reads from.

    pre_n,i = Σ_j A_g(n),ij v_n,j        z pattern of (block, query i, head n) = the row of terms A_ij v_j over j

(arXiv 2504.20938, section 4). The rows of many (block, query, head) triples come out of one sorted pass: distinct
(block, pattern, query) rows of attention are computed once, as one batched product of the gathered queries with their
pattern's keys, then gathered for the heads that share them and multiplied by gathered values. The cost follows the
number of triples, not the number of heads. It explains where an activation comes from, not why the pattern looks
there (that is query-key attribution, elsewhere).
"""

import time
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.dictionaries.lorsa import Codes, Lorsa, LorsaConfig
from clearhead.errors import ClearheadError
from clearhead.ops.lorsa import visible

SCORES_AT_ONCE = 2**26
"""Attention scores computed at a time, at most: 256 MiB in float32."""


class Triples(NamedTuple):
    """Which activations to split; three integer tensors [m]."""

    block: Int[Tensor, " m"]
    """Place in the batch."""
    query: Int[Tensor, " m"]
    """Position of the activating token."""
    head: Int[Tensor, " m"]


class SparseRows(NamedTuple):
    """z patterns without their small terms: term e belongs to row `row[e]`, ordered by row and key."""

    row: Int[Tensor, " e"]
    key: Int[Tensor, " e"]
    weight: Float[Tensor, " e"]
    rest: Float[Tensor, " m"]
    """Per row, the sum of the terms left out."""
    total: Float[Tensor, " m"]
    """Per row, the sum of all terms: the pre-activation."""


def active_triples(codes: Codes) -> Triples:
    """The (block, query, head) of every non-zero activation, in order."""
    block, query, _ = (active := codes.values != 0).nonzero(as_tuple=True)
    return Triples(block, query, codes.heads[active])


@torch.no_grad()
def z_patterns(lorsa: Lorsa, x: Float[Tensor, "b t d"], triples: Triples) -> Float[Tensor, "m t"]:
    """Row e holds A_ij v_j over all source positions j for triple e; it sums to the pre-activation.

    x: the attention module's input. Raises `ClearheadError` for a triple outside the batch.
    """
    block, query, head = (index.to(x.device) for index in triples)
    _check(lorsa, x, block, query, head)
    t = x.shape[1]
    rows = x.new_zeros(len(block), t)
    step = max(1, SCORES_AT_ONCE // (lorsa.config.n_patterns * t * t))
    for start in range(0, len(x), step):
        here = ((block >= start) & (block < start + step)).nonzero()[:, 0]
        if len(here):
            chunk = Triples(block[here] - start, query[here], head[here])
            rows[here] = _split(lorsa, x[start : start + step], chunk)
    return rows


def _split(lorsa: Lorsa, x: Float[Tensor, "b t d"], triples: Triples) -> Float[Tensor, "m t"]:
    b, t, _ = x.shape
    p = lorsa.config.n_patterns
    q, k = lorsa.queries_keys(x)
    which = triples.head // lorsa.config.pattern_size
    place = (triples.block * p + which) * t + triples.query
    needed = torch.zeros(b * p * t, dtype=torch.bool, device=x.device)
    needed[place] = True
    # queries of one (block, pattern) stand side by side, padded to the most any pair needs
    rank = needed.view(b * p, t).cumsum(1) - 1
    width = int(rank[:, -1].max()) + 1
    position = torch.zeros(b * p, width, dtype=torch.int64, device=x.device)
    pair, at = needed.view(b * p, t).nonzero(as_tuple=True)
    position[pair, rank[pair, at]] = at
    chosen = q.reshape(b * p, t, -1).gather(1, position[..., None].expand(-1, -1, q.shape[-1]))
    pattern = _pattern_rows(lorsa, chosen, k.reshape(b * p, t, -1), position)
    row = (triples.block * p + which) * width + rank.view(-1)[place]
    rows = pattern.view(b * p * width, t).index_select(0, row)
    return rows.mul_(_values_of(lorsa, x, triples))


def _values_of(lorsa: Lorsa, x: Float[Tensor, "b t d"], triples: Triples) -> Float[Tensor, "m t"]:
    """Values of each triple's head at every position of its block; computed once per head of a block."""
    pairs, place = torch.unique(triples.block * lorsa.n_heads + triples.head, return_inverse=True)
    block, head = pairs // lorsa.n_heads, pairs % lorsa.n_heads
    counts = torch.bincount(block, minlength=len(x)).tolist()
    parts = [
        torch.addmm(lorsa.b_V[heads][:, None], lorsa.W_V[heads], one.T)
        for one, heads in zip(x, head.split(counts), strict=True)
    ]
    return torch.cat(parts).index_select(0, place)


def _pattern_rows(
    lorsa: Lorsa, q: Float[Tensor, "p w dh"], k: Float[Tensor, "p t dh"], position: Int[Tensor, "p w"]
) -> Float[Tensor, "p w t"]:
    """The rows of `lorsa.patterns` at these query positions; p = (block, pattern)."""
    config, t = lorsa.config, k.shape[1]
    scores = (q * config.scale) @ k.transpose(1, 2)
    if config.softcap is not None:
        scores = torch.tanh(scores / config.softcap) * config.softcap
    seen = visible(t, t, config.window, k.device)
    scores.masked_fill_(~seen[position], -torch.inf)
    if not config.sinks:
        return scores.softmax(-1)
    sink = lorsa.sink.to(scores.dtype).repeat(len(q) // config.n_patterns)
    column = sink[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def drop_small(rows: Float[Tensor, "m t"], share: float = 0.01) -> SparseRows:
    """Keep the terms of at least `share` of their row's |sum|; the others are added up in `rest`."""
    total = rows.sum(-1)
    kept = (rows.abs() >= share * total.abs()[:, None]) & (rows != 0)
    row, key = kept.nonzero(as_tuple=True)
    return SparseRows(row, key, rows[kept], rows.masked_fill(kept, 0).sum(-1), total)


def time_z_pattern(
    *,
    d_model: int = 128,
    context: int = 64,
    blocks: int = 48,
    heads: int = 1024,
    groups: int = 16,
    k: int = 32,
    repeats: int = 3,
    threads: int = 1,
    seed: int = 0,
) -> dict[str, float]:
    """Seconds to split every activation of a random Lorsa over its source tokens.

    Timed: from x and encoded activations to all z patterns, attention included; encoding apart. Returns medians
    `seconds`, `encode_seconds`, the number of `activations` split and `worst_sum`, the largest deviation of a row's
    sum from its activation, relative to the largest activation. The number of threads is restored.
    """
    torch.manual_seed(seed)
    config = LorsaConfig(d_model=d_model, n_heads=heads, n_groups=groups, d_qk=64, k=k, scale=64**-0.5)
    lorsa = Lorsa(config).eval()
    with torch.no_grad():
        for weight in (lorsa.W_Q, lorsa.W_K, lorsa.W_V, lorsa.W_O):
            weight.normal_(std=d_model**-0.5)
        lorsa.normalise_decoder()
    x = torch.randn(blocks, context, d_model)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        encoding, splitting, worst, count = [], [], 0.0, 0
        for _ in range(repeats):
            start = time.perf_counter()
            with torch.no_grad():
                codes = lorsa.encode(x)
            encoded = time.perf_counter()
            triples = active_triples(codes)
            rows = z_patterns(lorsa, x, triples)
            done = time.perf_counter()
            encoding.append(encoded - start)
            splitting.append(done - encoded)
            active = codes.values[codes.values != 0]
            worst = float(((rows.sum(-1) - active).abs() / active.abs().max()).max())
            count = len(active)
    finally:
        torch.set_num_threads(before)
    return {
        "seconds": sorted(splitting)[len(splitting) // 2],
        "encode_seconds": sorted(encoding)[len(encoding) // 2],
        "activations": float(count),
        "worst_sum": worst,
    }


def _check(lorsa: Lorsa, x: Tensor, block: Tensor, query: Tensor, head: Tensor) -> None:
    for name, index, size in (("block", block, len(x)), ("query", query, x.shape[1]), ("head", head, lorsa.n_heads)):
        outside = (index < 0) | (index >= size)
        if bool(outside.any()):
            raise ClearheadError(f"a z pattern was asked for {name} {int(index[outside][0])}; there are {size}")
