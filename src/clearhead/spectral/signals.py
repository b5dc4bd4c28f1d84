"""Who wrote the signals that make a head look at one key: attribution of a firing to (component, token, mode).

A firing is (layer, head, query i, key j). With the head's modes (attention_modes.py) its score is Σ_m A_m B_m, A from
the query's token and B from the key's. With the scale of every norm on the way frozen at its value in this forward, A
is linear in the stream at i, and so a sum over the components that wrote there (writes.py), exactly; B likewise at j:

    A_m = Σ_c A_cm,   A_cm = x_c · M_m,   M = scale · W_Q′ · (QK norm, frozen) · R(i) · G_q

One component, `offset`, holds what the head adds itself: biases of projection, norm and QK norm. Linearity is lost in
the norm before attention and in a QK norm: both are held at their factor. Everything else (RoPE, grouped keys, biases,
gains) is linear already, and soft-cap and softmax come after the sum.

Attribution of the attention weight p is by integrated gradients over the writes of one side, the other side held: the
path scales that side's vector from 0 to its value,

    query side   s_k(α) = α Σ_m A_m B_km for all visible keys k;     baseline: a query that reads nothing
    key side     s_j(α) = α Σ_m A_m B_jm, other keys as they are;    baseline: a key that reads nothing
    attribution of (c, m) = A_cm · Σ_k g_k B_km   or   B_cm · g_j A_m,      g = ∫ ∂p/∂s dα, trapezoid, `STEPS` intervals

so that it is kept as two factors, a component × mode matrix and one number per mode, and sums to p − p(baseline).
`strip` then removes triples in the order of their attribution until the head no longer fires: ACC++'s procedure
(2602.13483), with its threshold τ = min(1, 2.5/(i + 1)) and its 64 steps. Mask, ALiBi and sinks are constants of it.
That the weight ends below τ is therefore no finding; what else changes is (interventions.py).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model.geometry import AttentionGeometry
from clearhead.model.norms import HeadNorm
from clearhead.model.rope import rotate
from clearhead.spectral.writes import Component, Stream

STEPS = 64
"""Intervals of the trapezoid rule (ACC++)."""
CHUNK = 1 << 22
"""Numbers held at once while triples are removed."""

Side = Literal["query", "key"]
SIDES: tuple[Side, Side] = ("query", "key")


class Firing(NamedTuple):
    """One entry of an attention pattern."""

    layer: int
    head: int
    query: int
    key: int

    def position(self, side: Side) -> int:
        """The token that this side reads."""
        return self.query if side == "query" else self.key

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `layer.head.query.key`. Raises `ClearheadError` for anything else."""
        words = text.split(".")
        if len(words) != 4 or not all(word.isdecimal() for word in words):
            raise ClearheadError(f"{text!r} is no firing: give layer.head.query.key, as in 9.6.15.3")
        return cls(*map(int, words))


def threshold(keys: int) -> float:
    """The dynamic threshold of ACC++: a key fires with at least 2.5 times an even share of what the query has to give.

    keys: how many the query sees, itself included; its index + 1 where there is no window.
    """
    return min(1.0, 2.5 / keys)


@dataclass(frozen=True, eq=False)
class Row:
    """The scores of one head at one query, over the keys that it sees."""

    A: Float[Tensor, " r"]
    B: Float[Tensor, "k r"]
    rest: Float[Tensor, " k"]
    """What is added after the soft-cap: mask, ALiBi."""
    sink: float | None
    softcap: float | None
    key: int
    """Place of the firing's key."""

    @property
    def scores(self) -> Float[Tensor, " k"]:
        """Σ_m A_m B_km, before soft-cap, mask and ALiBi."""
        return self.B @ self.A

    def weight(self, scores: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
        """The attention that the firing's key gets."""
        return self._pattern(scores)[..., self.key]

    def gradient(self, scores: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
        """∂(weight)/∂(scores)."""
        pattern = self._pattern(scores)
        own = pattern[..., self.key, None]
        slope = -own * pattern
        slope[..., self.key] += own[..., 0]
        return slope if self.softcap is None else slope * (1 - (scores / self.softcap).tanh().square())

    def _pattern(self, scores: Tensor) -> Tensor:
        logits = capped(scores, self.softcap) + self.rest
        if self.sink is not None:
            logits = torch.cat([logits, logits.new_full((*logits.shape[:-1], 1), self.sink)], -1)
        return logits.softmax(-1)[..., : len(self.rest)]


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """c·tanh(s/c)."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def read_row(stream: Stream, firing: Firing) -> Row:
    """The row of a firing. Raises `ClearheadError` for one that does not exist or whose query has no other key."""
    layer, head, query, key = firing
    parts, model = stream.parts, stream.parts.model
    if not (layer < model.n_layers and head < parts.layers[layer].geometry.n_heads and query < len(stream)):
        raise ClearheadError(
            f"there is no firing {firing}: the model has {model.n_layers} layers of {model.n_heads} heads, the prompt "
            f"{len(stream)} tokens"
        )
    geometry = parts.layers[layer].geometry
    first = 0 if geometry.window is None else max(0, query + 1 - geometry.window)
    if not first <= key <= query:
        raise ClearheadError(f"query {query} of layer {layer} sees keys {first} to {query}, not {key}")
    if first == query:
        raise ClearheadError(f"query {query} sees no key but its own, so nothing makes it look there; take a later one")
    modes = parts.modes(layer)
    A, B = modes.project(stream.site("q", layer), stream.site("k", layer))
    A, B = A[head, query], B[head, first : query + 1]
    rest = stream.site("scores", layer)[head, query, first : query + 1] - capped(B @ A, geometry.softcap)
    sink = float(stream.site("sink", layer)[head, query]) if geometry.sinks else None
    return Row(A, B, rest, sink, geometry.softcap, key - first)


class Reader(NamedTuple):
    """How one side of a firing reads the stream at its token: the head vector is x · map + offset."""

    map: Float[Tensor, "d r"]
    offset: Float[Tensor, " r"]


def read_stream(stream: Stream, firing: Firing, side: Side) -> Reader:
    """The reader of one side, with all norms frozen at their values in this forward."""
    layer, head, position = firing.layer, firing.head, firing.position(side)
    parts, modes = stream.parts.layers[layer], stream.parts.modes(layer)
    weights, dtype = parts.folded.to(stream.parts.dtype, stream.parts.model.device), stream.parts.dtype
    if side == "query":
        W, b, norm, G = weights.W_Q, weights.b_Q, weights.q_norm, modes.G_q[head]
    else:
        W, b, norm, G = weights.W_K, weights.b_K, weights.k_norm, modes.G_k[head]
        head = head // (parts.geometry.n_heads // parts.geometry.n_kv_heads)
    state = stream.state(layer, position)
    scale = 1.0 if parts.norm is None else parts.norm.frozen_scale(state)
    constant = W.new_zeros(len(W), 1, W.shape[-1]) if b is None else b[:, None]
    rows = torch.cat([W * scale, constant], 1)
    with torch.no_grad():
        formed = _form(rows, torch.cat([state, state.new_ones(1)]), norm, parts.geometry, position)[head] @ G.to(dtype)
    if side == "query":
        formed = formed * parts.geometry.q_scale
    return Reader(formed[:-1], formed[-1])


def _form(
    rows: Float[Tensor, "h d1 dh"],
    state: Float[Tensor, " d1"],
    norm: HeadNorm | None,
    geometry: AttentionGeometry,
    at: int,
) -> Float[Tensor, "h d1 dh"]:
    """What becomes of each row of a projection (the last one is its bias) between projection and scores."""
    if norm is not None and not norm.rule.after_rope:
        rows = _normalise(rows, state, norm)
    if geometry.rope is not None:
        cos, sin = geometry.rope.tables(torch.tensor([at], device=rows.device), rows.dtype)
        rows = rotate(rows, cos, sin, geometry.rope)
    if norm is not None and norm.rule.after_rope:
        rows = _normalise(rows, state, norm)
    return rows


def _normalise(rows: Tensor, state: Tensor, norm: HeadNorm) -> Tensor:
    """A QK norm as a linear map: its factor is that of the vector state · rows."""
    over = (0, 2) if norm.rule.whole else (2,)
    if norm.rule.kind == "layer":
        rows = rows - rows.mean(over, keepdim=True)
    square = torch.einsum("d,hde->he", state, rows)[:, None].square()
    rows = rows * torch.rsqrt(square.mean(over, keepdim=True) + norm.rule.eps)
    if norm.gain is not None:
        rows = rows * norm.gain[:, None]
    if norm.bias is not None:
        rows = torch.cat([rows[:, :-1], rows[:, -1:] + norm.bias[:, None]], 1)
    return rows


@dataclass(frozen=True, eq=False)
class Attribution:
    """One side of a firing, split over who wrote what its modes read."""

    firing: Firing
    side: Side
    components: list[Component]
    pieces: Float[Tensor, "c r"]
    """A_cm or B_cm: what each component gives to each entry of the head vector; the last component is `offset`."""
    coefficients: Float[Tensor, " r"]
    """Attribution of (c, m) = pieces[c, m] · coefficients[m], in units of attention."""
    reader: Reader
    row: Row
    weight: float
    baseline: float
    """The weight at the start of the path: of a query, or of a key, that reads nothing."""

    def matrix(self) -> Float[Tensor, "c r"]:
        """The attributions themselves."""
        return self.pieces * self.coefficients

    @property
    def gap(self) -> float:
        """Sum of all attributions less what they should add up to: the error of the quadrature."""
        return float((self.pieces.sum(0) * self.coefficients).sum()) - (self.weight - self.baseline)


def attribute(stream: Stream, firing: Firing, side: Side, *, steps: int = STEPS) -> Attribution:
    """Integrated gradients of the weight of `firing` over what was written for one of its sides.

    Raises `ClearheadError` for a firing that does not exist, and where the pieces do not add up to the head vector.
    """
    row = read_row(stream, firing)
    reader = read_stream(stream, firing, side)
    position = firing.position(side)
    pieces = torch.cat([stream.read(firing.layer, position, reader.map), reader.offset[None]])
    own, other = (row.A, row.B) if side == "query" else (row.B[row.key], row.A)
    _check_sum(stream, firing, pieces, own)
    alpha = torch.linspace(0, 1, steps + 1, dtype=row.A.dtype, device=row.A.device)
    path = row.scores.repeat(steps + 1, 1)
    if side == "query":
        path = path * alpha[:, None]
    else:
        path[:, row.key] *= alpha
    gradient = torch.trapezoid(row.gradient(path), alpha, dim=0)
    coefficients = gradient @ row.B if side == "query" else gradient[row.key] * other
    return Attribution(
        firing=firing,
        side=side,
        components=[*stream.components(firing.layer, position), Component("offset")],
        pieces=pieces,
        coefficients=coefficients,
        reader=reader,
        row=row,
        weight=float(row.weight(row.scores)),
        baseline=float(row.weight(path[0])),
    )


TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest error of the sum over components, relative to the largest sum of their sizes. The first is set by families
that normalise or rotate in float32 whatever their weights are."""


def _check_sum(stream: Stream, firing: Firing, pieces: Tensor, own: Tensor) -> None:
    error = float((pieces.sum(0) - own).abs().max() / pieces.abs().sum(0).max())
    if not error <= TOLERANCES[stream.parts.model.dtype]:
        raise ClearheadError(
            f"what components wrote does not add up to what head {firing.layer}.{firing.head} reads (off by "
            f"{error:.1e}); this family does something with queries or keys that tracing does not see"
        )


@dataclass(frozen=True, eq=False)
class Signal:
    """The triples (component, token, mode) that one side of a firing needs in order to fire; only what takes part."""

    firing: Firing
    side: Side
    components: list[Component]
    """Those with at least one triple."""
    pieces: Float[Tensor, "c r"]
    """What they give to every entry of the head vector, the modes of their triples and others."""
    mask: Bool[Tensor, "c r"]
    """Where the triples are."""
    drop: Float[Tensor, "c r"]
    """How much the weight fell when the triple was removed, the ones before it being gone; 0 elsewhere."""
    reader: Reader
    weight: float
    remaining: float
    """The weight without all of them."""
    threshold: float

    @property
    def found(self) -> bool:
        """Whether removing them silences the firing; else all that speak for it together do not."""
        return self.remaining < self.threshold

    @property
    def modes(self) -> list[int]:
        """The modes that take part."""
        return self.mask.any(0).nonzero()[:, 0].tolist()

    @property
    def testable(self) -> bool:
        """Whether it silences the firing, and modes are left to compare it with."""
        return self.found and 0 < len(self.modes) < self.mask.shape[1]


def strip(attribution: Attribution, *, below: float | None = None) -> Signal:
    """Removes triples, the largest attribution first, until the weight falls below τ (`below` in its place).

    Only triples that speak for the firing are removed; nothing is, where it does not fire to begin with.
    """
    row, side, pieces = attribution.row, attribution.side, attribution.pieces
    limit = threshold(len(row.rest)) if below is None else below
    flat = attribution.matrix().flatten()
    order = flat.argsort(descending=True)
    order = order[: int((flat > 0).sum())] if attribution.weight >= limit else order[:0]
    size = max(1, CHUNK // row.B.numel())
    scores, weight = row.scores, attribution.weight
    drop, mask = torch.zeros_like(flat), torch.zeros_like(flat, dtype=torch.bool)
    for start in range(0, len(order), size):
        some = order[start : start + size]
        taken, mode = pieces.flatten()[some], some % len(row.A)
        if side == "query":
            change = taken[:, None] * row.B[:, mode].T
        else:
            change = row.B.new_zeros(len(some), len(row.B))
            change[:, row.key] = taken * row.A[mode]
        after = scores - change.cumsum(0)
        weights = row.weight(after)
        silent = (weights < limit).nonzero()
        last = int(silent[0]) + 1 if len(silent) else len(some)
        drop[some[:last]] = -torch.diff(weights, prepend=weights.new_tensor([weight]))[:last]
        mask[some[:last]] = True
        scores, weight = after[last - 1], float(weights[last - 1])
        if len(silent):
            break
    drop, mask = drop.view_as(pieces), mask.view_as(pieces)
    part = mask.any(1)
    return Signal(
        firing=attribution.firing,
        side=side,
        components=[attribution.components[place] for place in part.nonzero()[:, 0].tolist()],
        pieces=pieces[part],
        mask=mask[part],
        drop=drop[part],
        reader=attribution.reader,
        weight=attribution.weight,
        remaining=weight,
        threshold=limit,
    )
