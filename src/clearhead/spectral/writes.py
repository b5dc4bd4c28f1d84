"""The residual stream of one prompt as a sum: what every component wrote at every position.

    resid_pre.L(t) = embedding(t) + Σ_{l<L} [ Σ_h Σ_{s≤t} N_l(pattern_ts · v_s · W_O,h) + N_l(b_O) + M_l(mlp_out(t)) ]

A head is split by its source token s, which the linearity of z·W_O in the values allows. `embedding` is the stream
before the first layer, positions included. N and M are the norms that some families (Gemma, OLMo 2) put behind a
module, with their scale frozen at its value in this forward, so that they are linear too; where there are none they are
the identity. The sum is compared with the model's own stream in every layer, and a family that writes anything else
into it (Gemma 4's inputs per layer, layers without softmax attention, norms on the stream itself) is refused.

One layer's writes at one position exist at a time, h · t · d numbers; no tensor of (layer, component, position,
position) is formed. Memory is that of what the forward reads: scores and patterns, 2 · l · h · t² numbers.

Not here: who reads the stream (signals.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.families import find_module
from clearhead.model.geometry import AttentionGeometry
from clearhead.model.norms import Norm, final_norm, read_norm, unembedding
from clearhead.model.self_test import TOLERANCE
from clearhead.model.weights import AttentionWeights, attention_norm, fold_norm
from clearhead.spectral.attention_modes import HeadModes, head_modes

Kind = Literal["embedding", "head", "bias", "mlp", "offset"]


class Component(NamedTuple):
    """Who wrote: a head at one source token, an output bias b_O, an MLP, the embedding.

    `offset` writes nothing into the stream: it is the constant part that a reading head adds itself, its own biases.
    """

    kind: Kind
    layer: int | None = None
    head: int | None = None
    source: int | None = None


@dataclass(frozen=True, eq=False)
class LayerParts:
    """One layer's weights and norms."""

    geometry: AttentionGeometry
    weights: AttentionWeights
    norm: Norm | None
    """Before attention; None where attention reads the stream itself."""
    mlp_norm: Norm | None
    """Before the MLP; None where the MLP reads the stream itself."""
    behind_attention: Norm | None
    behind_mlp: Norm | None

    @cached_property
    def folded(self) -> AttentionWeights:
        """The weights as they act on the stream normalised without gain and bias."""
        with torch.no_grad():
            return self.weights if self.norm is None else fold_norm(self.weights, self.norm)


class Parts:
    """What tracing reads of a model's weights, once for all prompts.

    Raises `ClearheadError` with the reason for a model with a layer that does not split into heads.
    """

    def __init__(self, model: Model):
        missing = sorted(set(range(model.n_layers)) - set(model.attention_layers))
        if missing:
            raise ClearheadError(
                f"layers {missing} of {model.name} have no softmax attention, so what they write cannot be split into "
                "heads and no signal can be traced through them"
            )
        self.model = model
        self.dtype = torch.promote_types(model.dtype, torch.float32)
        """The format of every sum: the model's, float32 at least."""
        self.multiplier = float(model.hf.config.to_dict().get("residual_multiplier", 1.0))
        """What Granite multiplies a module's output by before it enters the stream."""
        self.layers = [self._layer(layer) for layer in range(model.n_layers)]
        self._modes: dict[int, HeadModes] = {}

    def _layer(self, layer: int) -> LayerParts:
        family, place = self.model.family, self.model.places.layers[layer]
        behind = [
            None if path is None else find_module(place, path)
            for path in (family.post_attention_norm, family.post_mlp_norm)
        ]
        attention, mlp = (None if module is None else read_norm(module, self.model.d_model) for module in behind)
        norm = attention_norm(self.model, layer)
        own = None if family.mlp_norm is None else find_module(place, family.mlp_norm)
        before = None if own is None else read_norm(own, self.model.d_model)
        shared = norm if family.parallel and own is None else before
        return LayerParts(self.model.geometry(layer), self.model.weights(layer), norm, shared, attention, mlp)

    def modes(self, layer: int) -> HeadModes:
        """The singular modes of a layer's heads, decomposed when first asked for."""
        if layer not in self._modes:
            self._modes[layer] = head_modes(self.model, layer, self.dtype)
        return self._modes[layer]

    @cached_property
    def unembedding(self) -> tuple[Float[Tensor, "d v"], Float[Tensor, " v"]]:
        """W_U and b_U with the final norm folded in."""
        with torch.no_grad():
            return unembedding(self.model)

    @cached_property
    def final_norm(self) -> Norm:
        """The norm before the unembedding."""
        return final_norm(self.model)

    def forward_sites(self) -> list[str]:
        """The sites that `Stream` reads."""
        names = ["resid_pre", "resid_post", "q", "k", "v", "scores", "pattern", "attn_out", "mlp_out"]
        sinks = [f"sink.{layer}" for layer, parts in enumerate(self.layers) if parts.geometry.sinks]
        return [*(f"{name}.*" for name in names), *sinks, "logits"]


class Stream:
    """One prompt's forward, opened.

    Raises `ClearheadError` for more than one row of tokens, and where the components do not add up to the stream.
    """

    def __init__(self, parts: Parts, tokens: Int[Tensor, "1 t"]):
        if tokens.dim() != 2 or len(tokens) != 1:
            raise ClearheadError(f"one prompt is traced at a time: expected tokens [1, t], got {list(tokens.shape)}")
        self.parts = parts
        self.tokens = tokens[0].tolist()
        self.run = parts.model.run(tokens, read=parts.forward_sites())
        for layer in range(parts.model.n_layers):
            self._check(layer)

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return self.parts.model.n_layers

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens)

    def site(self, name: str, layer: int) -> Tensor:
        """What the forward read, without the batch axis, in the format of the sums."""
        return self.run[f"{name}.{layer}"][0].to(self.parts.dtype)

    def state(self, layer: int, position: int) -> Float[Tensor, " d"]:
        """The stream that layer `layer` receives; that of the final norm for `n_layers`."""
        name, layer = ("resid_pre", layer) if layer < self.n_layers else ("resid_post", self.n_layers - 1)
        return self.site(name, layer)[position]

    def components(self, layer: int, position: int) -> list[Component]:
        """Who wrote what `layer` receives at `position`, in the order of `read`."""
        named = [Component("embedding")]
        for below in range(layer):
            heads = self.parts.layers[below].geometry.n_heads
            named += [Component("head", below, head, source) for head in range(heads) for source in range(position + 1)]
            named += [Component("bias", below), Component("mlp", below)]
        return named

    def writes(self, layer: int, position: int) -> Float[Tensor, "c d"]:
        """What layer `layer` added to the stream: heads by source token, the output bias, the MLP."""
        parts, dtype = self.parts.layers[layer], self.parts.dtype
        weights, geometry = parts.weights, parts.geometry
        seen = slice(position + 1)
        values = self.site("v", layer)[:, seen].repeat_interleave(geometry.n_heads // geometry.n_kv_heads, 0)
        mixed = self.site("pattern", layer)[:, position, seen, None] * values
        heads = (mixed @ weights.W_O.detach().to(dtype)).flatten(0, 1)
        bias = heads.new_zeros(1, heads.shape[1]) if weights.b_O is None else weights.b_O.detach().to(dtype)[None]
        attention, mlp = self.site("attn_out", layer)[position], self.site("mlp_out", layer)[position]
        heads = self._behind(parts.behind_attention, attention, heads)
        bias = self._behind(parts.behind_attention, attention, bias, constant=True)
        return torch.cat([heads, bias, self._behind(parts.behind_mlp, mlp, mlp[None], constant=True)])

    def read(self, layer: int, position: int, reader: Float[Tensor, "d r"]) -> Float[Tensor, "c r"]:
        """Every component's write as `reader` sees it; their sum is that of `state(layer, position)`."""
        return torch.cat([part @ reader for part in self._all_writes(layer, position)])

    def _all_writes(self, layer: int, position: int) -> Iterator[Tensor]:
        yield self.state(0, position)[None]
        for below in range(layer):
            yield self.writes(below, position)

    def _behind(self, norm: Norm | None, whole: Tensor, pieces: Tensor, *, constant: bool = False) -> Tensor:
        """Pieces of a module's output as they enter the stream; the norm's bias goes with the `constant` piece."""
        if norm is not None:
            pieces = norm.centre(pieces) * norm.frozen_scale(whole)
            if norm.gain is not None:
                pieces = pieces * norm.gain.detach()
            if norm.bias is not None and constant:
                pieces = pieces + norm.bias.detach()
        return pieces * self.parts.multiplier

    def _check(self, layer: int) -> None:
        """Attention and MLP are all that the layer added."""
        parts = self.parts.layers[layer]
        before, after = self.site("resid_pre", layer), self.site("resid_post", layer)
        attention, mlp = self.site("attn_out", layer), self.site("mlp_out", layer)
        added = self._behind(parts.behind_attention, attention, attention, constant=True)
        added = added + self._behind(parts.behind_mlp, mlp, mlp, constant=True)
        worst = float((before + added - after).abs().max() / after.abs().max())
        # many families normalise in float32 whatever their weights are
        if not worst <= max(TOLERANCE[self.parts.model.dtype], TOLERANCE[torch.float32]):
            raise ClearheadError(
                f"layer {layer} of {self.parts.model.name} writes more into the residual stream than its attention and "
                f"MLP (the sum is off by {worst:.1e} of the largest entry), so no signal can be traced through it"
            )
