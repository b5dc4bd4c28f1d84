"""Firings: the places where a head's attention is decided, with what each of its modes contributes there.

A head fires at a query when one key receives more than `threshold` of its attention (SAD, 2410.00340: 0.5, so that at
most one key can) and more than 2.5 times what an even spread would give it (ACC++, 2602.13483: without this every query
that sees two keys fires). For every firing the head vectors A (query) and D (key, relative to the mean of the visible
keys) are kept; c̃ = A ⊙ D are its relative contributions, and statistics and controls are functions of A and D.

Firings on the first token are sinks: attention parks there when a head has nothing to do. They are counted apart. Heads
that fire more often than `keep` are sampled, uniformly and reproducibly; the counts stay exact. On the way the model's
own attention is rebuilt from the modes and compared, so that a family whose scores clearhead misreads is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.config import Basis
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.geometry import form_queries_keys
from clearhead.model.run import Run
from clearhead.spectral.attention_modes import HeadModes
from clearhead.spectral.sparsity import relative_key, visible, visible_count, visible_mean

THRESHOLD = 0.5
ABOVE_EVEN = 2.5
KEEP = 128
KEEP_SINKS = 8
PATTERN_BYTES = 1 << 28
"""Attention patterns held at once: all layers of a batch of prompts are read in one forward."""
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Prompts:
    """Texts whose attention is decomposed. Raises `ClearheadError` for none, and for a text of a single token."""

    names: Sequence[str]
    tokens: Sequence[Int[Tensor, " t"]]
    source: str

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ClearheadError("no text was given; give a prompt, a task or a text")
        for name, row in zip(self.names, self.tokens, strict=True):
            if len(row) < 2:
                raise ClearheadError(
                    f"the text {name!r} has {len(row)} token; a query needs at least two keys to choose from: give "
                    "longer texts"
                )

    @property
    def n_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.tokens))

    def batches(self, model: Model) -> Iterator[tuple[Int[Tensor, " b"], Int[Tensor, "b t"]]]:
        """Numbers and tokens of texts of equal length, as many at once as memory allows; nothing is padded."""
        lengths: dict[int, list[int]] = {}
        for number, row in enumerate(self.tokens):
            lengths.setdefault(len(row), []).append(number)
        for length, numbers in sorted(lengths.items()):
            each = 4 * model.n_layers * model.n_heads * length**2
            size = max(1, min(PATTERN_BYTES // each, BATCH_TOKENS // length))
            for start in range(0, len(numbers), size):
                some = numbers[start : start + size]
                yield torch.tensor(some), torch.stack([self.tokens[number] for number in some])


class Sites(NamedTuple):
    """What one forward showed of a layer's attention."""

    q: Float[Tensor, "b h t dh"]
    k: Float[Tensor, "b g t dh"]
    pattern: Float[Tensor, "b h t t"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of a query and a key of one layer, in columns of one length n, as head vectors: no basis chosen yet."""

    head: Int[Tensor, " n"]
    prompt: Int[Tensor, " n"]
    query: Int[Tensor, " n"]
    key: Int[Tensor, " n"]
    sink: Bool[Tensor, " n"]
    attention: Float[Tensor, " n"]
    score: Float[Tensor, " n"]
    x: Float[Tensor, "n dh"]
    """The query."""
    d: Float[Tensor, "n dh"]
    """The key, less the mean of the other visible keys."""
    priority: Float[Tensor, " n"]
    """Random numbers that decide which pairs are kept; independent of everything else."""

    def __len__(self) -> int:
        return len(self.head)

    def where(self, kept: Tensor) -> Self:
        """The pairs at a mask or at indices."""
        return type(self)(**{field.name: getattr(self, field.name)[kept] for field in fields(self)})

    def moved(self, x: Float[Tensor, "n dh"], d: Float[Tensor, "n dh"]) -> "Pairs":
        """The same places with what another model has there; attention and score stay those of the first."""
        columns = {field.name: getattr(self, field.name) for field in fields(Pairs)}
        return Pairs(**columns | {"x": x, "d": d})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All pairs of several batches."""
        return cls(**{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)})

    def sampled(self, keep: int, keep_sinks: int) -> Self:
        """At most `keep` pairs per head, and `keep_sinks` on sinks, by priority."""
        group = self.head * 2 + self.sink
        order = torch.argsort(self.priority)
        order = order[torch.argsort(group[order], stable=True)]
        group = group[order]
        # place within its group: how far from where the group's run begins
        place = torch.arange(len(group)) - torch.searchsorted(group, group)
        return self.where(order[place < torch.where(group % 2 == 1, keep_sinks, keep)].sort().values)


@dataclass(frozen=True, eq=False)
class Firings(Pairs):
    """Pairs in the modes of their heads."""

    A: Float[Tensor, "n r"]
    """What each mode reads in the query."""
    D: Float[Tensor, "n r"]
    """What it reads in the key, less the mean over the other visible keys."""
    S: Float[Tensor, "n r"]
    """Singular values of the modes: the head's, or those of the pair's RoPE offset."""
    bias: Float[Tensor, "n r"]
    """The part of A that the query's bias makes, the same for all queries."""

    @property
    def contributions(self) -> Float[Tensor, "n r"]:
        """c̃: how much of the relative score each mode contributes."""
        return self.A * self.D

    def of_head(self, head: int) -> Self:
        """The firings of one head that are not on a sink."""
        return self.where((self.head == head) & ~self.sink)


def read_sites(model: Model, layers: Sequence[int], tokens: Int[Tensor, "b t"]) -> dict[int, Sites]:
    """q, k and pattern of several layers from one forward, in float32 at least."""
    run = model.run(tokens, read=[*_query_key_names(model, layers), *(f"pattern.{layer}" for layer in layers)])
    return {layer: Sites(*queries_and_keys(model, layer, run), _wide(run[f"pattern.{layer}"])) for layer in layers}


def read_queries_and_keys(
    model: Model, layers: Sequence[int], tokens: Int[Tensor, "b t"]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Queries and keys alone, which needs no look inside the softmax."""
    run = model.run(tokens, read=_query_key_names(model, layers))
    return {layer: queries_and_keys(model, layer, run) for layer in layers}


def _query_key_names(model: Model, layers: Sequence[int]) -> list[str]:
    suffix = "" if _readable(model) else "_pre"
    return [f"{site}{suffix}.{layer}" for layer in layers for site in ("q", "k")]


def _readable(model: Model) -> bool:
    """Whether queries and keys are sites as scored; Falcon rotates them where nothing can be read."""
    return model.family.interface or {"q", "k"} <= model.family.plain


def queries_and_keys(model: Model, layer: int, run: Run) -> tuple[Tensor, Tensor]:
    """Queries and keys as scored: read, or formed from the outputs of their projections."""
    if _readable(model):
        return _wide(run[f"q.{layer}"]), _wide(run[f"k.{layer}"])
    before = _wide(run[f"q_pre.{layer}"]), _wide(run[f"k_pre.{layer}"])
    return form_queries_keys(model.geometry(layer), model.weights(layer), *before)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def find_firings(
    modes: HeadModes,
    sites: Sites,
    prompts: Int[Tensor, " b"],
    generator: torch.Generator,
    threshold: float = THRESHOLD,
) -> Pairs:
    """Where one layer fires in a batch; queries that see one or two keys never fire."""
    attention, key = sites.pattern.max(-1)
    positions = torch.arange(attention.shape[-1], device=attention.device)
    even = 1 / visible_count(positions, modes.geometry.window)
    row, head, query = (attention > (ABOVE_EVEN * even).clamp(threshold, 1)).nonzero(as_tuple=True)
    key, attention = key[row, head, query], attention[row, head, query]
    x, d, score = head_vectors(modes, sites.q, sites.k, row, head, query, key)
    return Pairs(
        head=head.cpu(),
        prompt=prompts[row.cpu()],
        query=query.cpu(),
        key=key.cpu(),
        sink=(key == 0).cpu(),
        attention=attention.cpu(),
        score=score.cpu(),
        x=x.cpu(),
        d=d.cpu(),
        priority=torch.rand(len(row), generator=generator),
    )


def head_vectors(
    modes: HeadModes,
    q: Float[Tensor, "b h t dh"],
    k: Float[Tensor, "b g t dh"],
    row: Int[Tensor, " n"],
    head: Int[Tensor, " n"],
    query: Int[Tensor, " n"],
    key: Int[Tensor, " n"],
) -> tuple[Float[Tensor, "n dh"], Float[Tensor, "n dh"], Float[Tensor, " n"]]:
    """Query, relative key and score of given pairs; x·d · scale is the relative score. Queries need two keys."""
    geometry = modes.geometry
    of_key = head // (geometry.n_heads // geometry.n_kv_heads)
    x, y = q[row, head, query], k[row, of_key, key]
    mean = visible_mean(k, geometry.window)[row, of_key, query]
    return x, relative_key(y, mean, visible_count(query, geometry.window)), (x * y).sum(-1) * geometry.scale


def express(modes: HeadModes, pairs: Pairs, basis: Basis) -> Firings:
    """Pairs in the modes of their heads; A·D sums to the relative score in either basis.

    In the basis `offset` of a layer that has offsets, each pair is seen in the modes of its own RoPE offset, with its
    vectors turned back by their positions (those of other keys in `d` as well). Elsewhere one basis serves all pairs.
    """
    turned = basis == "offset" and modes.has_offsets
    x, d = (modes.unrotate(pairs.x, pairs.query), modes.unrotate(pairs.d, pairs.key)) if turned else (pairs.x, pairs.d)
    A, D, S, bias = (x.new_zeros(len(x), modes.G_q.shape[-1]) for _ in range(4))
    offsets = pairs.key - pairs.query if turned else torch.zeros_like(pairs.key)
    for offset in offsets.unique().tolist():
        at_offset = (offsets == offset).nonzero()[:, 0]
        heads, place = pairs.head[at_offset].unique(return_inverse=True)
        # a head is decomposed only at the offsets at which it fires
        maps = modes.maps_at(offset, heads) if turned else (modes.G_q[heads], modes.G_k[heads], modes.svd.S[heads])
        G_q, G_k, sigma = (part.to(x) for part in maps)
        beta = torch.einsum("hd,hdr->hr", modes.b_q[heads].to(x), G_q)
        for number in range(len(heads)):
            here = at_offset[place == number]
            A[here], D[here] = x[here] @ G_q[number], d[here] @ G_k[number]
            S[here], bias[here] = sigma[number], beta[number]
    columns = {field.name: getattr(pairs, field.name) for field in fields(Pairs)}
    return Firings(**columns, A=A, D=D, S=S, bias=bias)


def verify_pattern(modes: HeadModes, sites: Sites, dtype: torch.dtype) -> float:
    """Rebuilds the model's attention from the modes; returns the largest difference of log-odds within a query.

    Compared where attention exceeds 0.001, up to one constant per query (sinks and soft maxima shift all keys alike).
    Raises `ClearheadError` where they differ by more than the rounding of the model's number format.
    """
    A, B = modes.project(sites.q, sites.k)
    scores = A @ B.mT
    geometry = modes.geometry
    if geometry.softcap is not None:
        scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
    if geometry.alibi is not None:
        slopes = torch.tensor(geometry.alibi, dtype=scores.dtype, device=scores.device)
        scores = scores + slopes[:, None, None] * torch.arange(scores.shape[-1], device=scores.device)
    seen = visible(scores.shape[-1], geometry.window, scores.device) & (sites.pattern > 1e-3)
    difference = scores - sites.pattern.clamp_min(1e-30).log()
    high = difference.masked_fill(~seen, -torch.inf).amax(-1)
    low = difference.masked_fill(~seen, torch.inf).amin(-1)
    worst = float(torch.where(seen.any(-1), high - low, 0).max())
    size = float(scores.masked_fill(~seen, 0).abs().max())
    allowed = torch.finfo(dtype).eps * (1000 + 64 * size) if dtype.itemsize < 4 else 1e-3 * (1 + size / 100)
    if not worst <= allowed:
        raise ClearheadError(
            f"attention of layer {modes.layer} rebuilt from its modes differs from the model's own by {worst:.1e} in "
            f"log-odds (rounding allows {allowed:.0e}); this family does something with queries or keys that clearhead "
            "misses"
        )
    return worst
