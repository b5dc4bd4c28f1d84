"""The frozen model of one prompt: attention patterns and norm scales held, so that the stream is carried linearly.

With the pattern P_h, the scale s of the norm before attention and that of a norm behind it (s′) at their values in this
forward, layer L moves the stream x [t, d] by a linear map and a constant:

    A_L(x)_q = s′_q Σ_h Σ_k P_h[q, k] s_k x_k W_V W_O
    x ← x + A_L(x) + attention constant + MLP write + MLP constant

W_V (that of h's group of keys) has the norm's gain and centring folded in, W_O those of a norm behind the layer.
MLPs carry nothing: what they write is a source, like the embedding. Constants are b_V through the pattern, b_O, the
biases of norms, and what the model's own rounding adds, so that sources and constants reproduce the stream exactly.

Depth 2L is the stream that layer L's attention receives, 2L + 1 the one that its MLP receives, 2 · n_layers the one of
the final norm. In parallel blocks both read the same stream and depth 2L + 1 repeats 2L. Layers in `replaced` carry
nothing either: who replaces an attention layer writes its whole output as sources.

Plain matrix products on explicit tensors, no autograd; all rows share one pattern. Not here: what the sources are, and
who reads the stream.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model.norms import Norm
from clearhead.model.self_test import TOLERANCE
from clearhead.spectral.writes import LayerParts, Stream

CHUNK = 1 << 22
"""Numbers of the stream that one step carries at once."""
CUTS = 4
"""Into how many ranges of positions rows are sorted, so that no row is carried over positions where it is zero."""

Places = Sequence[int] | Int[Tensor, " e"]


@dataclass(frozen=True, eq=False)
class Carrier:
    """The linear map of one layer's attention."""

    pattern: Float[Tensor, "g r q k"]
    """The pattern with the frozen scales of both norms in it, r heads for each of the g groups of values."""
    W_V: Float[Tensor, "d g_dv"]
    W_O: Float[Tensor, "h_dv d"]

    @classmethod
    def read(cls, stream: Stream, layer: int) -> "Carrier":
        """From a prompt's forward. Raises `ClearheadError` where values are not linear in the layer's input."""
        parts = stream.parts.layers[layer]
        weights, dtype = parts.folded.to(stream.parts.dtype, stream.parts.model.device), stream.parts.dtype
        if weights.v_norm is not None:
            raise ClearheadError(
                f"layer {layer} of {stream.parts.model.name} normalises its values, which is not linear; nothing can "
                "be carried through it"
            )
        pattern = stream.site("pattern", layer)
        if parts.norm is not None:
            pattern = pattern * parts.norm.frozen_scale(stream.site("resid_pre", layer))[:, 0]
        W_O = weights.W_O.detach().flatten(0, 1) * stream.parts.multiplier
        if parts.behind_attention is not None:
            norm = parts.behind_attention
            pattern = pattern * norm.frozen_scale(stream.site("attn_out", layer))
            W_O = _gained(norm, norm.centre(W_O))
        return cls(
            pattern.detach().unflatten(0, (len(weights.W_V), -1)),
            weights.W_V.detach().movedim(0, 1).flatten(1).to(dtype),
            W_O.to(dtype),
        )

    def values(self, x: Float[Tensor, "n t d"]) -> Float[Tensor, "n t g dv"]:
        """What the pattern mixes: x · W_V, the scale of the norm left to the pattern."""
        return (x @ self.W_V).unflatten(-1, (len(self.pattern), -1))

    def readings(self, gradient: Float[Tensor, "n t d"]) -> Float[Tensor, "n t g r dv"]:
        """The gradient of what heads mixed together: gradient · W_Oᵀ."""
        return (gradient @ self.W_O.T).unflatten(-1, (*self.pattern.shape[:2], -1))

    def mix(self, values: Float[Tensor, "n t g dv"], start: int = 0) -> Float[Tensor, "n t g r dv"]:
        """Pattern · values, per head; `values` begin at position `start`."""
        groups, ratio = self.pattern.shape[:2]
        pattern = self.pattern[..., start:, start:].flatten(1, 2)
        mixed = pattern @ values.permute(2, 1, 0, 3).flatten(2)
        return mixed.view(groups, ratio, values.shape[1], len(values), -1).permute(3, 2, 0, 1, 4)

    def push(self, x: Float[Tensor, "n t d"], start: int = 0) -> Float[Tensor, "n t d"]:
        """A_L(x), for streams that begin at position `start`."""
        return self.mix(self.values(x), start).flatten(2) @ self.W_O

    def pull(self, gradient: Float[Tensor, "n t d"]) -> Float[Tensor, "n t d"]:
        """The transpose of `push`, for gradients that end after their last position."""
        stop = gradient.shape[1]
        pattern = self.pattern[..., :stop, :stop].flatten(1, 2).mT
        readings = self.readings(gradient).permute(2, 3, 1, 0, 4).flatten(1, 2).flatten(2)
        mixed = (pattern @ readings).unflatten(-1, (len(gradient), -1)).permute(2, 1, 0, 3)
        return mixed.flatten(2) @ self.W_V.T


class Constant(NamedTuple):
    """What a layer adds to the stream whatever it receives."""

    layer: int
    depth: int
    """Where it enters."""
    write: Float[Tensor, "t d"]


class Frozen:
    """One prompt's forward, attention patterns and norm scales held.

    Raises `ClearheadError` for layers in `replaced` that do not exist, for a model whose values are normalised, and
    where attention adds what the linear map and its biases do not explain.
    """

    def __init__(self, stream: Stream, replaced: Collection[int] = ()):
        outside = sorted(set(replaced) - set(range(stream.n_layers)))
        if outside:
            raise ClearheadError(f"layers {outside} are replaced, but the model has layers 0 to {stream.n_layers - 1}")
        self.stream = stream
        self.dtype = stream.parts.dtype
        self.replaced = frozenset(replaced)
        self.parallel = stream.parts.model.family.parallel
        self.n_layers = stream.n_layers
        self.carriers: dict[int, Carrier] = {
            layer: Carrier.read(stream, layer) for layer in range(self.n_layers) if layer not in self.replaced
        }
        """The attention layers that carry."""
        self.constants: list[Constant] = [
            constant for layer in range(self.n_layers) for constant in self._constants(layer)
        ]

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return len(self.stream)

    @property
    def top(self) -> int:
        """The depth of the final norm's stream."""
        return 2 * self.n_layers

    def attention_depth(self, layer: int) -> int:
        """Where layer `layer`'s attention writes: 2L + 1; 2L + 2 in parallel blocks. Its MLP writes at 2L + 2."""
        return 2 * layer + (2 if self.parallel else 1)

    def carrier(self, depth: int) -> Carrier | None:
        """What carries the stream from `depth` to `depth` + 1; None where nothing but sources enter."""
        layer, second = divmod(depth, 2)
        return self.carriers.get(layer) if second == self.parallel else None

    def state(self, depth: int) -> Float[Tensor, "t d"]:
        """The model's own stream at a depth."""
        layer, second = divmod(depth, 2)
        if layer == self.n_layers:
            return self.stream.site("resid_post", layer - 1)
        before = self.stream.site("resid_pre", layer)
        return before if second == 0 or self.parallel else before + self._attention(layer)

    def attention_write(self, layer: int, pieces: Float[Tensor, "*n d"], position: Places) -> Float[Tensor, "*n d"]:
        """Pieces of an attention layer's output, one position each, as they enter the stream.

        Through a norm behind the layer with its scale frozen, and the residual multiplier; without the norm's bias,
        which is among the constants.
        """
        norm, whole = self._layer(layer).behind_attention, self.stream.site("attn_out", layer)
        return self._behind(norm, whole, pieces, position)

    def mlp_write(self, layer: int, pieces: Float[Tensor, "*n d"], position: Places) -> Float[Tensor, "*n d"]:
        """Pieces of an MLP's output, one position each, as they enter the stream; see `attention_write`."""
        return self._behind(self._layer(layer).behind_mlp, self.stream.site("mlp_out", layer), pieces, position)

    def _layer(self, layer: int) -> LayerParts:
        return self.stream.parts.layers[layer]

    def _behind(self, norm: Norm | None, whole: Tensor, pieces: Tensor, position: Places | None = None) -> Tensor:
        pieces = pieces.to(self.dtype)
        if norm is not None:
            scale = norm.frozen_scale(whole)
            pieces = _gained(norm, norm.centre(pieces)) * (scale if position is None else scale[_places(position)])
        return pieces * self.stream.parts.multiplier

    def _bias(self, norm: Norm | None) -> Tensor | float:
        bias = None if norm is None else norm.bias
        return 0.0 if bias is None else bias.detach().to(self.dtype) * self.stream.parts.multiplier

    def _attention(self, layer: int) -> Float[Tensor, "t d"]:
        """What attention added to the stream."""
        norm, out = self._layer(layer).behind_attention, self.stream.site("attn_out", layer)
        return self._behind(norm, out, out) + self._bias(norm)

    def _constants(self, layer: int) -> list[Constant]:
        """What is left of the layer's two writes when the linear map and the MLP's output are taken away."""
        before, after = self.state(2 * layer), self.state(2 * layer + 2)
        attention, out = self._attention(layer), self.stream.site("mlp_out", layer)
        mlp = after - before - attention - self._behind(self._layer(layer).behind_mlp, out, out)
        if layer in self.replaced:
            norm, out = self._layer(layer).behind_attention, self.stream.site("attn_out", layer)
            rest = attention - self._behind(norm, out, out)
        else:
            rest = attention - self.carriers[layer].push(before[None])[0]
            self._check(layer, rest - self._attention_bias(layer), float(after.abs().max()))
        if self.parallel:
            return [Constant(layer, 2 * layer + 2, rest + mlp)]
        return [Constant(layer, 2 * layer + 1, rest), Constant(layer, 2 * layer + 2, mlp)]

    def _attention_bias(self, layer: int) -> Float[Tensor, "t d"]:
        """b_V through the pattern, b_O and the bias of a norm behind the layer, from the weights."""
        parts = self._layer(layer)
        weights = parts.folded.to(self.dtype, self.stream.parts.model.device)
        out = self.stream.site("attn_out", layer)
        bias = torch.zeros_like(out)
        if weights.b_V is not None:
            shares = self.stream.site("pattern", layer).sum(-1).unflatten(0, (len(weights.b_V), -1))
            W_O = weights.W_O.detach().unflatten(0, shares.shape[:2])
            bias = bias + torch.einsum("grq,gv,grvd->qd", shares, weights.b_V.detach(), W_O)
        if weights.b_O is not None:
            bias = bias + weights.b_O.detach()
        return self._behind(parts.behind_attention, out, bias) + self._bias(parts.behind_attention)

    def _check(self, layer: int, error: Tensor, largest: float) -> None:
        model = self.stream.parts.model
        worst = float(error.abs().max()) / largest
        # many families normalise in float32 whatever their weights are
        if not worst <= max(TOLERANCE[model.dtype], TOLERANCE[torch.float32]):
            raise ClearheadError(
                f"attention of layer {layer} of {model.name} is not its pattern times its values (off by {worst:.1e} "
                "of the stream's largest entry), so it cannot be held frozen"
            )

    @torch.no_grad()
    def pull(
        self, reads: Float[Tensor, "e d"], depth: Places, position: Places, row: Places | None = None
    ) -> Iterator[tuple[int, Float[Tensor, "m t d"]]]:
        """Gradients of linear readers with respect to the stream at every depth, from the highest read down to 0.

        A reader takes ⟨read, stream at `depth`[`position`]⟩ and its row is zero above that depth. `row` adds several
        reads up to one reader; each is its own without it. Depths of one call may differ.
        Raises `ClearheadError` for a depth or position outside the prompt.
        """
        entries = _Entries(self, reads, depth, position, row)
        last = entries.reach("amax")
        gradient, live = entries.rows(), torch.zeros_like(last, dtype=torch.bool)
        for here in range(int(entries.depth.max()), -1, -1):
            carrier = self.carrier(here)
            if carrier is not None and bool(live.any()):
                carried = gradient.clone()
                for rows, stop in _blocks(last, live, len(self), gradient[0].numel()):
                    carried[rows, :stop] += carrier.pull(gradient[rows, :stop])
                gradient = carried
            gradient, live = entries.enter(here, gradient, live)
            yield here, gradient

    @torch.no_grad()
    def push(
        self, writes: Float[Tensor, "e d"], depth: Places, position: Places, row: Places | None = None
    ) -> Iterator[tuple[int, Float[Tensor, "n t d"]]]:
        """What becomes of writes into the stream, at every depth from the lowest write up to the final norm's.

        A write enters at `depth` and `position`; its row is zero below. `row` adds several writes up to one component.
        Raises `ClearheadError` for a depth or position outside the prompt.
        """
        entries = _Entries(self, writes, depth, position, row)
        first = entries.reach("amin")
        component, live = entries.rows(), torch.zeros_like(first, dtype=torch.bool)
        for here in range(int(entries.depth.min()), self.top + 1):
            component, live = entries.enter(here, component, live)
            yield here, component
            carrier = self.carrier(here)
            if carrier is not None and bool(live.any()):
                carried = component.clone()
                for rows, length in _blocks(len(self) - 1 - first, live, len(self), component[0].numel()):
                    start = len(self) - length
                    carried[rows, start:] += carrier.push(component[rows, start:], start)
                component = carried


class _Entries:
    """Vectors that enter the stream at their depth and position, and the row each belongs to."""

    def __init__(self, frozen: Frozen, vectors: Tensor, depth: Places, position: Places, row: Places | None):
        device = frozen.stream.site("resid_pre", 0).device
        self.vectors = vectors.detach().to(device=device, dtype=frozen.dtype)
        self.depth, self.position = _places(depth).to(device), _places(position).to(device)
        count = len(self.vectors)
        self.row = torch.arange(count, device=device) if row is None else _places(row).to(device)
        if not count == len(self.depth) == len(self.position) == len(self.row) or count == 0:
            raise ClearheadError(
                f"one depth, position and row for each of at least one vector: got {count} vectors, {len(self.depth)} "
                f"depths, {len(self.position)} positions, {len(self.row)} rows"
            )
        for name, places, limit in (
            ("depth", self.depth, frozen.top),
            ("position", self.position, len(frozen) - 1),
        ):
            wrong = places[(places < 0) | (places > limit)]
            if len(wrong):
                raise ClearheadError(f"{name} {int(wrong[0])} lies outside of this prompt's frozen model: 0 to {limit}")
        self.shape = (int(self.row.max()) + 1, len(frozen), self.vectors.shape[1])

    def rows(self) -> Tensor:
        """Nothing yet: zeros [rows, t, d]."""
        return self.vectors.new_zeros(self.shape)

    def reach(self, extreme: Literal["amin", "amax"]) -> Int[Tensor, " rows"]:
        """The first or the last position of each row's entries."""
        start = self.position.new_zeros(self.shape[0])
        return start.scatter_reduce(0, self.row, self.position, extreme, include_self=False)

    def enter(self, depth: int, stream: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """The stream with the entries of one depth, and the rows that are not zero any more; new tensors."""
        here = self.depth == depth
        if not bool(here.any()):
            return stream, live
        place = (self.row[here], self.position[here])
        return stream.index_put(place, self.vectors[here], accumulate=True), live.index_fill(0, self.row[here], True)


def _blocks(reach: Tensor, live: Tensor, length: int, size: int) -> Iterator[tuple[Tensor, int]]:
    """Live rows sorted by how many positions they span, with that number; each block's stream within `CHUNK`."""
    edges = sorted({-(-length * cut // CUTS) for cut in range(1, CUTS + 1)})
    below = 0
    for edge in edges:
        rows = (live & (reach >= below) & (reach < edge)).nonzero()[:, 0]
        below = edge
        for some in rows.split(max(1, CHUNK // size)):
            if len(some):
                yield some, edge


def _gained(norm: Norm, x: Tensor) -> Tensor:
    return x if norm.gain is None else x * norm.gain.detach()


def _places(places: Places) -> Int[Tensor, " e"]:
    return torch.as_tensor(places, dtype=torch.int64).flatten()
