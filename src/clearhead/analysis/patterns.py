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
from torch import Tensor, nn
from torch.func import functional_call

from clearhead.dictionaries.lorsa import Codes, Lorsa, LorsaConfig
from clearhead.errors import ClearheadError
from clearhead.ops.lorsa import visible

PER_GROUP = ("W_Q", "W_K", "b_Q", "b_K", "q_gain", "k_gain")
"""Parameters that hold one entry for each query-key group."""


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
    rows = x.new_zeros(len(block), x.shape[1])
    order = block.argsort(stable=True)
    for here in order.split(torch.bincount(block, minlength=len(x)).tolist()):
        if len(here):
            rows[here] = _split(lorsa, x[block[here[0]]], query[here], head[here])
    return rows


def _split(
    lorsa: Lorsa, x: Float[Tensor, "t d"], query: Int[Tensor, " m"], head: Int[Tensor, " m"]
) -> Float[Tensor, "m t"]:
    """The rows of one block, from the groups and heads that are asked for alone."""
    each = lorsa.config.patterns_per_group
    which = head // lorsa.config.pattern_size
    groups, local = torch.unique(which // each, return_inverse=True)
    q, k = (side[0] for side in _queries_keys(lorsa, x[None], groups))
    place = (local * each + which % each) * len(x) + query
    needed = torch.zeros(len(q), len(x), dtype=torch.bool, device=x.device)
    needed.view(-1)[place] = True
    # the queries of one pattern stand side by side, padded to the most any pattern needs
    rank = needed.cumsum(1) - 1
    width = int(rank[:, -1].max()) + 1
    position = torch.zeros(len(q), width, dtype=torch.int64, device=x.device)
    row, at = needed.nonzero(as_tuple=True)
    position[row, rank[row, at]] = at
    chosen = q.gather(1, position[..., None].expand(-1, -1, q.shape[-1]))
    own = (groups[:, None] * each + torch.arange(each, device=x.device)).flatten()
    pattern = _pattern_rows(lorsa, chosen, k, position, own)
    heads, value = torch.unique(head, return_inverse=True)
    values = torch.addmm(lorsa.b_V[heads][:, None], lorsa.W_V[heads], x.T)
    return pattern.flatten(0, 1)[place // len(x) * width + rank.view(-1)[place]].mul_(values[value])


class _QueriesKeys(nn.Module):
    """`Lorsa.queries_keys` as a forward, so that it can be called with the parameters of some groups alone."""

    def __init__(self, lorsa: Lorsa):
        super().__init__()
        self.lorsa = lorsa

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.lorsa.queries_keys(x)


def _queries_keys(
    lorsa: Lorsa, x: Float[Tensor, "b t d"], groups: Int[Tensor, " g"]
) -> tuple[Float[Tensor, "b p t dh"], Float[Tensor, "b p t dh"]]:
    """Queries and keys of the patterns of some groups, in their order; the others are not computed."""
    config = lorsa.config
    if len(groups) == config.n_groups:
        return lorsa.queries_keys(x)
    parameters = dict(lorsa.named_parameters())
    part = {name: parameters[name][groups] for name in PER_GROUP if name in parameters}
    if config.patterns_per_group > 1:
        part["qk_gate"] = lorsa.qk_gate.unflatten(0, (config.n_groups, -1))[groups].flatten(0, 1)
    return functional_call(_QueriesKeys(lorsa), {f"lorsa.{name}": value for name, value in part.items()}, (x,))


def _pattern_rows(
    lorsa: Lorsa,
    q: Float[Tensor, "p w dh"],
    k: Float[Tensor, "p t dh"],
    position: Int[Tensor, "p w"],
    which: Int[Tensor, " p"],
) -> Float[Tensor, "p w t"]:
    """The rows of the patterns `which` at these query positions."""
    config, t = lorsa.config, k.shape[1]
    scores = (q * config.scale) @ k.transpose(1, 2)
    if config.softcap is not None:
        scores = torch.tanh(scores / config.softcap) * config.softcap
    seen = visible(t, t, config.window, k.device)
    scores.masked_fill_(~seen[position], -torch.inf)
    if not config.sinks:
        return scores.softmax(-1)
    column = lorsa.sink.to(scores.dtype)[which][:, None, None].expand(-1, scores.shape[1], 1)
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
