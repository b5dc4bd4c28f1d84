"""Why a head looks where it looks: an attention score split over pairs of units, one read by the query, one by the key.

Both sides of a score are linear in the stream when the norm before attention and a QK norm are held at their factors.
In the head's singular modes m (spectral/attention_modes.py), with C_i(p) what unit i is in the stream at position p,

    U_im = C_i(q) · M^q_m      V_jm = C_j(k) · M^k_m      S(q, k) = Σ_ij S_ij,   S_ij = Σ_m U_im V_jm

M^q, M^k being one side's readers (spectral/signals.py) with rotation, scale and gains in them. Readers are pulled
down through the frozen model to the writes of all units (or, for many scores, units are pushed up to them), and S_ij
exists as two factors. What the head itself adds (b_Q, b_K, biases of norms) stands under `bias.L` of its own layer,
which has written nothing into the stream that the layer reads. The sum is exact, to rounding.

Softmax sees differences only. `against` subtracts the score of another key, or of the mean of all visible keys, by
taking that key's V away: what is common to all keys cancels unit by unit. Scores are those before soft-cap, mask, ALiBi
and gates, which are no sums over units.

A Lorsa head attends with the query-key product of its group, gated where the group forms several
patterns. It is explained at the key from which it moves most,
argmax_k |A_qk v_k|, which need not be the key with the largest score.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.circuits.tracing.largest import count_for_share, largest_entries
from clearhead.circuits.tracing.sources import Opened
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.model.geometry import AttentionGeometry
from clearhead.model.norms import fold
from clearhead.model.rope import RopeSpec, rotate
from clearhead.spectral.signals import Firing, Reader, read_stream
from clearhead.units import Unit
from clearhead.units.annotations import AttentionTable

CHUNK = 1 << 24
"""Numbers that a block of units, pushed up together, holds."""
Against = int | Literal["mean"] | None
"""Another key, the mean of all visible keys (the explained one included), or nothing."""


@dataclass(frozen=True, eq=False)
class ScoreSplit:
    """One attention score as a sum over pairs of units: S_ij = Σ_m U_im V_jm."""

    unit: Unit
    """What is explained: an attention edge `edge.L.h.k@q`, or a Lorsa head `lorsa.L.i@q`."""
    query: int
    key: int
    against: Against
    score: float
    """The model's own, what it is compared with subtracted."""
    units: tuple[Unit, ...]
    U: Float[Tensor, "n r"]
    """By unit and mode, what the query reads."""
    V: Float[Tensor, "n r"]
    """What the key gives to read, less what the keys compared with give."""

    @property
    def total(self) -> float:
        """Σ_ij S_ij: the score, to rounding."""
        return float(self.U.sum(0) @ self.V.sum(0))

    @property
    def queries(self) -> Float[Tensor, " n"]:
        """Σ_j S_ij, by query-side unit."""
        return self.U @ self.V.sum(0)

    @property
    def keys(self) -> Float[Tensor, " n"]:
        """Σ_i S_ij, by key-side unit."""
        return self.V @ self.U.sum(0)

    @property
    def modes(self) -> Float[Tensor, " r"]:
        """Each singular mode's part of the score."""
        return self.U.sum(0) * self.V.sum(0)

    def pairs(self, count: int) -> list[tuple[int, int, float]]:
        """The `count` pairs with the largest |S_ij|: places of the two units, S_ij."""
        return largest_entries(self.U, self.V, count)

    def count_pairs(self, share: float = 0.9) -> int:
        """The fewest pairs that hold `share` of Σ |S_ij|."""
        return count_for_share(self.U, self.V, share)

    def triples(self, count: int) -> list[tuple[int, int, int, float]]:
        """The `count` largest products |U_im V_jm|: query-side unit, mode, key-side unit, U_im V_jm."""
        # the largest products of two columns are products of their largest entries
        some = min(count, len(self.units))
        i, j = (side.T.abs().topk(some).indices for side in (self.U, self.V))
        products = self.U.T.gather(1, i)[:, :, None] * self.V.T.gather(1, j)[:, None]
        top = products.abs().flatten().topk(min(count, products.numel())).indices
        mode, rest = top // some**2, top % some**2
        found = (i[mode, rest // some], mode, j[mode, rest % some], products.flatten()[top])
        return [entry for entry in zip(*(column.tolist() for column in found), strict=True) if entry[3] != 0]

    def table(self, count: int = 50) -> AttentionTable:
        """The largest `count` pairs, marginals and triples, for a graph."""
        name = [unit.id for unit in self.units]
        return AttentionTable(
            self.unit.id,
            self.score,
            self.total,
            None if self.against == "mean" else self.against,
            pairs=tuple((name[i], name[j], weight) for i, j, weight in self.pairs(count)),
            queries=_largest(name, self.queries, count),
            keys=_largest(name, self.keys, count),
            triples=tuple((name[i], mode, name[j], weight) for i, mode, j, weight in self.triples(count)),
        )


class Side(NamedTuple):
    """A reader at one position, and with what factor it takes part."""

    reader: Reader
    position: int
    factor: float


class Question(NamedTuple):
    """Which score is to be explained, and how both of its sides read the stream."""

    unit: Unit
    key: int
    against: Against
    score: float
    query_side: Side
    key_sides: list[Side]
    """The key, and those that it is compared with."""

    @property
    def rank(self) -> int:
        """Modes of the head."""
        return len(self.query_side.reader.offset)


def explain_edge(opened: Opened, firing: Firing, against: Against = None) -> ScoreSplit:
    """The score of one head at one query and key, over pairs of units; raises as `ask_edge` and `explain` do."""
    return explain(opened, [ask_edge(opened, firing, against)])[0]


def explain_lorsa(opened: Opened, unit: Unit, against: Against = None, key: int | None = None) -> ScoreSplit:
    """The score of a Lorsa head, over pairs of units; raises as `ask_lorsa` and `explain` do."""
    return explain(opened, [ask_lorsa(opened, unit, against, key)])[0]


@torch.no_grad()
def ask_edge(opened: Opened, firing: Firing, against: Against = None) -> Question:
    """Why a head looks from one query at one key.

    Raises `ClearheadError` for a head or pair that does not exist, and for a key to compare with that the query does
    not see or that is the explained one.
    """
    layer, head, query, key = firing
    geometry = _geometry(opened, firing)
    places = _weighed(query, key, geometry.window, against)
    A, B = opened.parts.modes(layer).project(opened.stream.site("q", layer), opened.stream.site("k", layer))
    scores = B[head] @ A[head, query]
    keys = [
        Side(read_stream(opened.stream, Firing(layer, head, query, k), "key"), k, factor)
        for k, factor in places.items()
    ]
    side = Side(read_stream(opened.stream, firing, "query"), query, 1.0)
    unit = Unit("edge", layer, head, position=query, part=key)
    return Question(unit, key, against, sum(factor * float(scores[k]) for k, factor in places.items()), side, keys)


@torch.no_grad()
def ask_lorsa(opened: Opened, unit: Unit, against: Against = None, key: int | None = None) -> Question:
    """Why a Lorsa head looks at the key from which it moves most, or at `key`.

    Raises `ClearheadError` for anything but an active Lorsa head of this prompt, and as `ask_edge` does.
    """
    if unit.kind != "lorsa" or unit not in opened.sources.place:
        raise ClearheadError(f"{unit} is no Lorsa head that is active in this prompt; give one of the graph's")
    assert unit.layer is not None and unit.index is not None and unit.position is not None
    layer, query = unit.layer, unit.position
    lorsa, x = opened.dictionaries.attention[layer], opened.attention[layer].x
    which = unit.index // lorsa.config.pattern_size
    group = which // lorsa.config.patterns_per_group
    if key is None:
        pattern = lorsa.patterns(x[None], torch.tensor([which], device=x.device))[0, 0, query]
        key = int((pattern * lorsa.values(x[None])[0, :, unit.index]).abs().argmax())
    places = _weighed(query, key, lorsa.config.window, against)
    q, k = (side[0, which] for side in lorsa.queries_keys(x[None]))
    scores = k @ q[query] * lorsa.config.scale
    G_q, G_k = _group_modes(lorsa, group)
    side = Side(_read_pattern(opened, layer, which, query, "query", G_q * lorsa.config.scale), query, 1.0)
    keys = [Side(_read_pattern(opened, layer, which, k, "key", G_k), k, factor) for k, factor in places.items()]
    return Question(unit, key, against, sum(factor * float(scores[k]) for k, factor in places.items()), side, keys)


@torch.no_grad()
def explain(opened: Opened, questions: Sequence[Question]) -> list[ScoreSplit]:
    """Splits scores over pairs of units: readers pulled down, or units pushed up.

    Whichever are fewer; both give the same numbers. Raises `ClearheadError` where pairs do not add up to the model's
    score.
    """
    readers = sum(2 * question.rank for question in questions)
    factors = _push_units if len(opened.sources) < readers else _pull_readers
    found = []
    for question, U, V in factors(opened, questions):
        own = opened.sources.place[Unit("bias", question.unit.layer)]
        U[own] += question.query_side.reader.offset
        V[own] += torch.stack([side.reader.offset * side.factor for side in question.key_sides]).sum(0)
        query = question.query_side.position
        split = ScoreSplit(
            question.unit, query, question.key, question.against, question.score, opened.sources.units, U, V
        )
        _check(opened, split)
        found.append(split)
    return found


def _pull_readers(opened: Opened, questions: Sequence[Question]) -> Iterator[tuple[Question, Tensor, Tensor]]:
    """Backward: the readers of each question through the frozen model, to the writes of all units."""
    for question in questions:
        sides = [question.query_side, *question.key_sides]
        reads = torch.cat([side.reader.map.T * side.factor for side in sides])
        rows = torch.arange(question.rank, device=reads.device)
        row = torch.cat([rows, *(rows + question.rank for _ in question.key_sides)])
        position = torch.tensor([side.position for side in sides], device=reads.device)
        position = position.repeat_interleave(question.rank)
        depth = torch.full_like(position, _depth(question))
        found = opened.sources.edges(opened.frozen.pull(reads, depth, position, row)).T
        yield question, found[:, : question.rank].contiguous(), found[:, question.rank :].contiguous()


def _push_units(opened: Opened, questions: Sequence[Question]) -> Iterator[tuple[Question, Tensor, Tensor]]:
    """Forward: the components of all units, block by block, to the depths that are read."""
    sources, frozen = opened.sources, opened.frozen
    zeros = [sources.write.new_zeros(2, len(sources), question.rank) for question in questions]
    last = max(map(_depth, questions))
    for units in torch.arange(len(sources)).split(max(1, CHUNK // frozen.state(0).numel())):
        first, block = int(units[0]), slice(int(units[0]), int(units[-1]) + 1)
        mine = (sources.unit >= first) & (sources.unit < block.stop) & (sources.depth <= last)
        if not bool(mine.any()):
            continue
        entries = sources.write[mine], sources.depth[mine], sources.position[mine], sources.unit[mine] - first
        for depth, components in frozen.push(*entries):
            rows = slice(first, first + len(components))
            for question, (U, V) in zip(questions, zeros, strict=True):
                if _depth(question) == depth:
                    U[rows] = components[:, question.query_side.position] @ question.query_side.reader.map
                    for side in question.key_sides:
                        V[rows] += components[:, side.position] @ (side.reader.map * side.factor)
            if depth == last:
                break
    for question, (U, V) in zip(questions, zeros, strict=True):
        yield question, U, V


def _depth(question: Question) -> int:
    """Where its layer's attention reads."""
    assert question.unit.layer is not None
    return 2 * question.unit.layer


def _geometry(opened: Opened, firing: Firing) -> AttentionGeometry:
    layer, head, query, _ = firing
    layers = opened.parts.layers
    if not (0 <= layer < len(layers) and 0 <= head < layers[layer].geometry.n_heads and 0 <= query < len(opened)):
        raise ClearheadError(
            f"there is no {firing}: the model has {len(layers)} layers of {opened.parts.model.n_heads} heads, the "
            f"prompt {len(opened)} tokens"
        )
    return layers[layer].geometry


def _weighed(query: int, key: int, window: int | None, against: Against) -> dict[int, float]:
    """By key, how much its score counts."""
    first = 0 if window is None else max(0, query + 1 - window)
    for place in (key, *([against] if isinstance(against, int) else [])):
        if not first <= place <= query:
            raise ClearheadError(f"query {query} sees keys {first} to {query}, not {place}")
    if against == key:
        raise ClearheadError(f"key {key} is compared with itself; give another key, or 'mean'")
    if against is None:
        return {key: 1.0}
    if isinstance(against, int):
        return {key: 1.0, against: -1.0}
    share = 1.0 / (query + 1 - first)
    return {k: (k == key) - share for k in range(first, query + 1)}


TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest error of the sum, relative to the sum of the sizes of its modes; families that normalise or rotate in float32
whatever their weights are set the first."""


def _check(opened: Opened, split: ScoreSplit) -> None:
    size = float((split.U.sum(0).abs() * split.V.sum(0).abs()).sum())
    if not abs(split.total - split.score) <= TOLERANCES[opened.parts.model.dtype] * max(size, 1e-30):
        raise ClearheadError(
            f"the pairs of {split.unit} add up to {split.total:.6g}, and the score is {split.score:.6g}: this family "
            "does something with queries or keys that is not seen here"
        )


def _largest(names: list[str], weights: Tensor, count: int) -> tuple[tuple[str, float], ...]:
    order = weights.abs().argsort(descending=True)[:count]
    return tuple((names[place], float(weights[place])) for place in order.tolist() if weights[place] != 0)


def _group_modes(lorsa: Lorsa, group: int) -> tuple[Float[Tensor, "dh r"], Float[Tensor, "dh r"]]:
    """Maps with G_q · G_kᵀ = 1 that turn queries and keys into the singular modes of the group's W_Qᵀ W_K.

    What a product of lower rank does not reach is carried by further columns.
    """
    R_q, R_k = (torch.linalg.qr(W[group].T.double()).R for W in (lorsa.W_Q, lorsa.W_K))
    u, S, vh = torch.linalg.svd(R_q @ R_k.T)
    inverse = torch.where(1e-10 * S[0] >= S, torch.inf, S).rsqrt()
    G_q, G_k = R_k.T @ vh.T * inverse, R_q.T @ u * inverse
    rest = torch.eye(len(G_q), dtype=G_q.dtype, device=G_q.device) - G_q @ G_k.T
    if float(rest.abs().max()) > 1e-8:
        G_q, G_k = torch.cat([G_q, rest], 1), torch.cat([G_k, torch.eye(len(rest)).to(rest)], 1)
    return G_q.to(lorsa.W_Q.dtype), G_k.to(lorsa.W_Q.dtype)


def _read_pattern(
    opened: Opened, layer: int, which: int, position: int, side: Literal["query", "key"], G: Float[Tensor, "dh r"]
) -> Reader:
    """How one side of a Lorsa's pattern `which` reads the stream at a position, norms frozen."""
    lorsa, norm = opened.dictionaries.attention[layer], opened.parts.layers[layer].norm
    group = which // lorsa.config.patterns_per_group
    W, b = (lorsa.W_Q, lorsa.b_Q) if side == "query" else (lorsa.W_K, lorsa.b_K)
    weight, bias = W[group].T.to(opened.parts.dtype), b[group].to(opened.parts.dtype)
    state = opened.frozen.state(2 * layer)[position]
    if norm is not None:
        weight, shift = fold(norm, weight, bias)
        weight, bias = weight * norm.frozen_scale(state), bias if shift is None else shift
    rows = torch.cat([weight, bias[None]])
    if lorsa.config.qk_norm:
        if lorsa.config.qk_norm == "layer":
            rows = rows - rows.mean(1, keepdim=True)
        vector = state @ rows[:-1] + rows[-1]
        gain = lorsa.q_gain if side == "query" else lorsa.k_gain
        rows = rows * torch.rsqrt(vector.square().mean() + lorsa.config.qk_norm_eps) * gain[group]
    if side == "query":
        rows = rows * lorsa.gates()[which].detach()
    rows = _rotated(rows, lorsa.rope, position) @ G
    return Reader(rows[:-1], rows[-1])


def _rotated(rows: Float[Tensor, "d1 dh"], rope: RopeSpec | None, position: int) -> Float[Tensor, "d1 dh"]:
    if rope is None:
        return rows
    at: Int[Tensor, " 1"] = torch.tensor([position], device=rows.device)
    cos, sin = rope.tables(at, rows.dtype)
    return rotate(rows, cos, sin, rope)
