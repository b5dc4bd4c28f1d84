"""Edge gates of a sparse model: where they sit, how a forward is told which gates to draw, and what was counted.

    gates = install(model)                    one gate per attention layer, all heads open
    with gates.sampled(seed=7) as tally:      or gates.hard(), gates.opened()
        logits = model.hf(tokens).logits
    tally[3].opened                           open edges of layer 3, per batch row, head and query

A gate is a submodule of its attention module (`clearhead_gate`, so its bias is saved, moved and trained with the
model), and the model attends through `attend_gated`, registered in transformers' attention interface. Outside of a
`with` the gates are hard (in the folder of a control, as that was trained): training, generation with a cache and plain
forwards all see the same model. What recomputes a forward in its backward pass must do so inside of the `with`. What an
attention mask says about the keys of a query must be an interval that ends at the query, as causal masks, windows,
packed documents and padding are.

The formulas are in ops/gated.py; how gates are trained in sparsify/. Refused: layers whose scores are more than
scale · q·k (soft-caps, ALiBi, attention sinks) and families off the attention interface.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.model.weights import EDGE_GATE
from clearhead.ops.gated import Estimator, Mode, Noise, gated_attention, noise_keys, uniforms, visible_pairs
from clearhead.ops.gated_decode import gated_decode
from clearhead.ops.open_tiles import expected_open_tiles

if TYPE_CHECKING:
    from clearhead.model.access import Model

GATED = "clearhead_gated"
"""The name of `attend_gated` in transformers' interfaces."""
CHILD = EDGE_GATE
"""The name of a gate in its attention module, and a part of its tensors' names in a checkpoint."""
SETTINGS = "clearhead_gates"
"""The entry of a model's config that says that it is gated."""


class LayerCount(NamedTuple):
    """The edges of one layer in one forward; only `expected` and `tiles` carry gradients."""

    expected: Float[Tensor, "b h t"]
    opened: Int32[Tensor, "b h t"]
    leak: Float[Tensor, "b h t"]
    visible: Int[Tensor, "b t"]
    """Keys that each query sees; the row axis has length 1 where all rows see the same."""
    tiles: Float[Tensor, "b h"] | None = None
    """Expected share of open tiles (ops/open_tiles.py), where it was asked for; carries gradients."""


Tally = dict[int, LayerCount]
"""What a forward under `Gates` counted, by layer."""


@dataclass
class Control:
    """What the gates of one model draw at the moment; shared by all its layers."""

    mode: Mode | Literal["random"] = "hard"
    estimator: Estimator = "straight_through"
    slope: float = 0.0
    seed: int = 0
    batch: int = 0
    rates: dict[int, Float[Tensor, " h"]] | None = None
    """Mode "random": the share of edges that is open, by layer and head."""
    tile: int | None = None
    """Count the open tiles of so many by so many pairs as well, in expectation."""
    check: bool = False
    tally: Tally | None = field(default=None, repr=False)


class EdgeGate(nn.Module):
    """The gate of one attention layer: a bias per head; with `sink` also κ, for a denominator over open edges."""

    def __init__(self, layer: int, n_heads: int, control: Control, *, bias: float, sink: float | None):
        super().__init__()
        self.layer, self.control = layer, control
        self.bias = nn.Parameter(torch.full((n_heads,), bias))
        self.sink = None if sink is None else nn.Parameter(torch.full((n_heads,), sink))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, first: Int[Tensor, "b t"] | None
    ) -> Float[Tensor, "b h t dv"]:
        """Gated attention of whole sequences, under the control's mode; adds to its tally."""
        control = self.control
        if control.mode == "random":
            return self._attend_random(q, k, v, scale, first)
        noise = Noise(control.seed, self.layer, control.batch) if control.mode == "sampled" else None
        found = gated_attention(
            q,
            k,
            v,
            self.bias,
            mode=control.mode,
            scale=scale,
            noise=noise,
            first=first,
            sink=None if control.mode == "open" else self.sink,
            slope=control.slope,
            estimator=control.estimator,
            check=control.check,
        )
        if control.tally is not None:
            seen = torch.arange(1, q.shape[2] + 1, device=q.device)[None]
            visible = seen if first is None else (seen - first).clamp_min(0)
            tiles = None
            if control.tile is not None:
                tiles = expected_open_tiles(q, k, self.bias, scale=scale, first=first, tile=control.tile)
            control.tally[self.layer] = LayerCount(found.expected, found.opened, found.leak, visible, tiles)
        return found.out

    def _attend_random(self, q: Tensor, k: Tensor, v: Tensor, scale: float, first: Tensor | None) -> Tensor:
        """Attention through edges that know nothing of queries and keys; every pair is laid out."""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        seen = visible_pairs(first, q.shape[2], q.device)[:, None]
        scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
        pattern = scores.softmax(-1).nan_to_num(0.0)  # a row that sees nothing
        return self.close(pattern, scores) @ v

    def open_edges(self, scores: Float[Tensor, "b h q k"]) -> Bool[Tensor, "b h q k"]:
        """Which edges are open under the control's mode, for masked scores whose queries are the last positions."""
        control = self.control
        logits = scores + self.bias.to(scores.dtype)[:, None, None]
        if control.mode == "hard":
            return logits > 0
        if control.mode == "open":
            return torch.ones_like(logits, dtype=torch.bool)
        b, h, queries, keys = scores.shape
        if control.mode == "random":  # the same edges in every row of every batch
            b = 1
        noise = noise_keys(Noise(control.seed, self.layer, control.batch), b, h, scores.device)
        columns = torch.arange(keys, device=scores.device)
        drawn = uniforms(noise, columns[keys - queries :], columns)
        if control.mode == "random":
            assert control.rates is not None
            return (drawn < control.rates[self.layer].to(drawn.device)[:, None, None]) & torch.isfinite(scores)
        return drawn < logits.float().sigmoid()

    def close(self, pattern: Float[Tensor, "b h q k"], scores: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
        """The weights of the values: of a dense `pattern`, the softmax of `scores`, what the open edges carry."""
        if self.control.mode == "open":
            return pattern
        opened = self.open_edges(scores)
        if self.sink is None:
            return pattern * opened
        logits = scores.float().masked_fill(~opened, -torch.inf)
        sink = self.sink.float()[:, None, None].expand(*logits.shape[:3], 1)
        return torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1].to(pattern.dtype)


class Gates:
    """All gates of a model, and the switch of what they draw."""

    def __init__(self, layers: dict[int, EdgeGate]):
        self.layers = layers
        self.control = next(iter(layers.values())).control

    def parameters(self) -> list[nn.Parameter]:
        """Biases, and sinks where there are some."""
        return [parameter for gate in self.layers.values() for parameter in gate.parameters()]

    @property
    def has_sink(self) -> bool:
        """Whether the denominator runs over open edges and a sink."""
        return next(iter(self.layers.values())).sink is not None

    def bias(self) -> Float[Tensor, "l h"]:
        """The gate bias of every layer and head."""
        return torch.stack([gate.bias.detach() for gate in self.layers.values()])

    @torch.no_grad()
    def set_bias(self, bias: Float[Tensor, "l h"]) -> None:
        """Sets the bias of every layer and head, in the order of `layers`."""
        for gate, row in zip(self.layers.values(), bias, strict=True):
            gate.bias.copy_(row)

    def sampled(
        self,
        seed: int,
        batch: int = 0,
        *,
        estimator: Estimator = "straight_through",
        slope: float = 0.0,
        tile: int | None = None,
    ):
        """Gates drawn at random; `batch` is the global index of the first row, so that no two rows share noise."""
        return self._switched(Control("sampled", estimator, slope, seed, batch, tile=tile))

    def hard(self, *, slope: float = 0.0, tile: int | None = None):
        """Gates open where their probability exceeds one half."""
        return self._switched(Control("hard", slope=slope, tile=tile))

    def opened(self):
        """All gates open and no sink: the dense model."""
        return self._switched(Control("open"))

    def random(self, rates: dict[int, Float[Tensor, " h"]], seed: int = 0):
        """A control: edges that are open by lot, a share of each head's, the same for every text; nothing is counted.

        The lot falls on places (head, query, key), so a model can get used to it.
        """
        return self._switched(Control("random", seed=seed, rates=rates))

    @contextmanager
    def _switched(self, to: Control) -> Iterator[Tally]:
        control = self.control
        before = dict(vars(control))
        tally: Tally = {}
        vars(control).update(vars(to) | {"tally": tally, "check": control.check})
        try:
            yield tally
        finally:
            vars(control).update(before)


def install(
    model: "Model", *, bias: float = 6.0, sink: float | None = None, settings: dict[str, Any] | None = None
) -> Gates:
    """Puts a gate on every attention layer of `model` and makes it attend through them; returns the gates.

    `bias`: where every head's gates begin; at 6 an edge whose score is 0 is open with probability 0.9975. `sink`: the
    first value of κ, for the denominator over open edges (far below all scores it changes nothing at first); None keeps
    all keys in the denominator, as the paper does.
    `settings`: what the model's config is to say about where the gates come from.
    Raises `ClearheadError` where the model is gated already or a layer's attention cannot be.
    """
    if find_gates(model.hf) is not None:
        raise ClearheadError(
            f"{model.name} has edge gates already; continue its run with a larger --tokens, or start from its base"
        )
    if not model.family.interface:
        raise ClearheadError(
            f"{model.name}: {model.family.name} computes attention outside of transformers' attention interface, so no "
            "gates can be installed; use a family on the interface (Llama, GPT-2, Qwen, Gemma 3, ...)"
        )
    for layer in model.attention_layers:
        if reason := _ungateable(model, layer):
            raise ClearheadError(f"{model.name}: layer {layer} {reason}, which edge gates do not support")
    control = Control()
    layers: dict[int, EdgeGate] = {}
    for layer in model.attention_layers:
        attention = model.places.attentions[layer]
        assert attention is not None
        gate = EdgeGate(layer, model.geometry(layer).n_heads, control, bias=bias, sink=sink)
        attention.add_module(CHILD, gate.to(model.device))
        layers[layer] = gate
    setattr(model.hf.config, SETTINGS, (settings or {}) | {"sink": sink is not None})
    use_gates(model.hf)
    return Gates(layers)


def restore_gates(model: "Model", tensors: dict[str, Tensor]) -> Gates:
    """Installs the gates of a checkpoint; `tensors` by their names in it. Raises `CorruptFileError` where some lack."""
    settings = getattr(model.hf.config, SETTINGS)
    gates = install(model, sink=0.0 if settings["sink"] else None, settings=settings)
    wanted = {name: parameter for name, parameter in model.hf.named_parameters() if CHILD in name.split(".")}
    if wrong := sorted(set(wanted) ^ set(tensors)):
        raise CorruptFileError(
            f"{model.name} says that it has edge gates, and {wrong[0]} is missing or of another model"
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            if tensors[name].shape != parameter.shape:
                raise CorruptFileError(f"{model.name}: {name} has shape {list(tensors[name].shape)}")
            parameter.copy_(tensors[name])
    if settings.get("control") == "dense":
        gates.control.mode = "open"
    if rates := settings.get("rates"):
        gates.control.mode = "random"
        gates.control.rates = {int(layer): torch.tensor(row) for layer, row in rates.items()}
    return gates


def find_gates(hf: nn.Module) -> Gates | None:
    """The gates of a transformers model, or None for a dense one."""
    layers = {module.layer: module for module in hf.modules() if isinstance(module, EdgeGate)}
    return Gates(dict(sorted(layers.items()))) if layers else None


def gate_of(module: nn.Module) -> EdgeGate | None:
    """The gate of one attention module."""
    gate = module._modules.get(CHILD)
    return gate if isinstance(gate, EdgeGate) else None


def use_gates(hf: PreTrainedModel) -> None:
    """Makes the model's own forward and generate attend through its gates."""
    for part in hf.modules():
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation_internal = GATED


def attend_gated(
    module: nn.Module,
    query: Float[Tensor, "b h q dh"],
    key: Float[Tensor, "b g k dh"],
    value: Float[Tensor, "b g k dv"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_options: Any,
) -> tuple[Float[Tensor, "b q h dv"], None]:
    """Transformers' attention function of a gated model."""
    gate = gate_of(module)
    if gate is None:
        raise ClearheadError(
            f"{type(module).__name__} attends through edge gates but has none; load it with Model.load"
        )
    if dropout:
        raise ClearheadError("edge gates and attention dropout do not go together; put the model into eval mode")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    first = first_visible(attention_mask, query.shape[2], key.shape[2])
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys:
        z = gate.attend(query, key, value, scale=scale, first=first)
    elif gate.control.mode != "hard":
        raise ClearheadError(
            f"gates in mode {gate.control.mode!r} work on whole sequences; generate with use_cache=False or hard gates"
        )
    else:
        z = _decode(gate, query, key, value, scale, first)
    return z.transpose(1, 2).contiguous(), None


AttentionInterface.register(GATED, attend_gated)
AttentionMaskInterface.register(GATED, sdpa_mask)


def first_visible(mask: Tensor | None, queries: int, keys: int) -> Int[Tensor, "b q"] | None:
    """The first key that each query sees, from a mask [b, 1, q, k] (true or 0 where seen); None: all keys before it.

    A query whose own position nobody sees is padding, and sees nothing. Raises `ClearheadError` for a mask under
    which the keys of a query are no interval that ends at the query.
    """
    if mask is None:
        return None
    if mask.shape[1] != 1:
        raise ClearheadError(f"edge gates need one attention mask for all heads; this one has {mask.shape[1]}")
    seen = (mask if mask.dtype == torch.bool else mask == 0)[:, 0, :, :keys]
    place = torch.arange(keys - queries, keys, device=mask.device)
    real = seen.gather(-1, place[None, :, None].expand(len(seen), -1, 1))[..., 0]
    if queries < keys and bool((~real & seen.any(-1)).any()):
        raise ClearheadError(
            "edge gates need a cache that ends with the newest query; this one has empty places behind it (a static "
            "cache): leave out cache_implementation"
        )
    first = torch.where(real, seen.int().argmax(-1), place + 1)
    span = (place - first + 1).clamp_min(0)
    looked_at = seen[:, :, place].any(1)
    if bool((~real & looked_at).any()) or not torch.equal(seen.sum(-1)[real], span[real]):
        raise ClearheadError(
            "edge gates need masks under which a query sees all keys from some first one up to itself; this attention "
            "mask has gaps or shows later keys"
        )
    return first


def _decode(
    gate: EdgeGate, query: Tensor, key: Tensor, value: Tensor, scale: float, first: Tensor | None
) -> Float[Tensor, "b h q dv"]:
    """Hard gates for queries that are the last positions of cached keys."""
    queries, keys = query.shape[2], key.shape[2]
    rows = []
    for row in range(queries):
        until = keys - queries + row + 1
        begin = None if first is None else first[:, row]
        rows.append(
            gated_decode(
                query[:, :, row : row + 1],
                key[:, :, :until],
                value[:, :, :until],
                gate.bias,
                scale=scale,
                first=begin,
                sink=gate.sink,
            )
        )
    return torch.cat(rows, dim=2)


def _ungateable(model: "Model", layer: int) -> str | None:
    geometry = model.geometry(layer)
    if geometry.softcap is not None:
        return "caps its scores (soft-cap)"
    if geometry.alibi is not None:
        return "adds a position bias to its scores (ALiBi)"
    return "has attention sinks of its own" if geometry.sinks else None
