"""The weights of one attention layer, per head, whatever way the family stores them.

    q_pre = attn_in · W_Q[h] + b_Q[h]      k_pre, v likewise      attn_out = Σ_h z[h] · W_O[h] + b_O

The tensors are views of the model's own parameters where the layout allows it (everywhere but in CodeGen, whose fused
projection is cut in four shards, and in grouped fused projections with several queries per group), so gradients reach
the parameters. Layers that do not decompose this way raise `ClearheadError` with the reason: low-rank latent attention
(DeepSeek), gated outputs (Qwen3-Next), clipped projections, keys borrowed from another layer (Gemma 4's last layers),
quantised or adapted projections. `fold_attention_norm` gives the same weights with the norm before the layer folded in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from clearhead.errors import ClearheadError
from clearhead.model.families import Family, config_layers, find_family, find_module
from clearhead.model.norms import HeadNorm, HoldsModel, Norm, fold, read_head_norm, read_norm

_NORM_AFTER_ROPE = ("hunyuan_v1_dense", "hunyuan_v1_moe", "nanochat")


class QKV(NamedTuple):
    """Queries, keys and values, or anything that is cut the same way."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Projections:
    """Which submodules of an attention module project, how their features are ordered, how many heads that makes."""

    names: tuple[str, ...]
    """One fused or three separate modules, in the order q, k, v."""
    output: str
    layout: Literal["separate", "blocks", "groups", "shards"]
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_value: int

    def split(self, outputs: Mapping[str, Tensor]) -> QKV:
        """Cuts the features of the projections into heads: each `[..., features]` to `[..., head, width]`.

        `outputs` maps the names in `names` to tensors (outputs, biases, or weights with the input axis first). The
        layouts are those of families.py. Views wherever the layout allows.
        """
        given = [outputs[name] for name in self.names]
        h, g, dh, dv = self.n_heads, self.n_kv_heads, self.d_head, self.d_value
        match self.layout:
            case "separate" | "blocks":
                q, k, v = given if len(given) == 3 else given[0].split([h * dh, g * dh, g * dv], -1)
                return QKV(q.unflatten(-1, (h, dh)), k.unflatten(-1, (g, dh)), v.unflatten(-1, (g, dv)))
            case "groups":
                heads = given[0].unflatten(-1, (g, h // g + 2, dh))
                return QKV(heads[..., :-2, :].flatten(-3, -2), heads[..., -2, :], heads[..., -1, :])
            case "shards":
                shards = given[0].unflatten(-1, (4, 3, -1))
                q, v, k = (shards[..., part, :].flatten(-2).unflatten(-1, (h, dh)) for part in range(3))
                return QKV(q, k, v)


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """One layer's projections per head. K and V have one entry per kv head; `per_head` repeats them."""

    W_Q: Float[Tensor, "h d dh"]
    W_K: Float[Tensor, "g d dh"]
    W_V: Float[Tensor, "g d dv"]
    W_O: Float[Tensor, "h dv d"]
    b_Q: Float[Tensor, "h dh"] | None
    b_K: Float[Tensor, "g dh"] | None
    b_V: Float[Tensor, "g dv"] | None
    b_O: Float[Tensor, " d"] | None
    q_norm: HeadNorm | None
    k_norm: HeadNorm | None
    v_norm: HeadNorm | None
    """Gemma 4 only: the values are v_norm(attn_in · W_V), not linear in the layer's input."""
    sinks: Float[Tensor, " h"] | None = None
    """GPT-OSS: per head the logit that joins the softmax and carries no value."""
    reads: Literal["attn_in", "normalised"] = "attn_in"
    """What W_Q, W_K, W_V act on: the module's input, or (folded) the residual normalised without gain and bias."""

    def to(self, dtype: torch.dtype, device: torch.device | str) -> "AttentionWeights":
        """The same weights in another format and place."""

        def moved(value: Any) -> Any:
            if isinstance(value, HeadNorm):
                return HeadNorm(value.rule, moved(value.gain), moved(value.bias))
            return value.to(dtype=dtype, device=device) if isinstance(value, Tensor) else value

        return replace(self, **{field.name: moved(getattr(self, field.name)) for field in fields(self)})

    def per_head(self) -> "AttentionWeights":
        """The same with keys, values and their norms repeated, so that entry h serves query head h.

        Raises `ClearheadError` where keys are normalised over all kv heads together and there are fewer of them than
        query heads: repeated keys would have other statistics.
        """
        ratio = len(self.W_Q) // len(self.W_K)
        if ratio == 1:
            return self
        return replace(
            self,
            W_K=self.W_K.repeat_interleave(ratio, 0),
            W_V=self.W_V.repeat_interleave(ratio, 0),
            b_K=None if self.b_K is None else self.b_K.repeat_interleave(ratio, 0),
            b_V=None if self.b_V is None else self.b_V.repeat_interleave(ratio, 0),
            k_norm=self.k_norm and self.k_norm.repeat(ratio),
            v_norm=self.v_norm and self.v_norm.repeat(ratio),
        )

    def project(self, x: Float[Tensor, "*b t d"]) -> QKV:
        """q_pre `[*b, h, t, dh]`, k_pre `[*b, g, t, dh]` and v `[*b, g, t, dv]` of the layer's input."""
        return QKV(
            _apply_heads(x, self.W_Q, self.b_Q),
            _apply_heads(x, self.W_K, self.b_K),
            self._normalise_values(_apply_heads(x, self.W_V, self.b_V)),
        )

    def _normalise_values(self, v: Tensor) -> Tensor:
        return v if self.v_norm is None else self.v_norm(v)

    def head_out(self, z: Float[Tensor, "*b t h dv"]) -> Float[Tensor, "*b t h d"]:
        """Each head's write, z · W_O. Their sum plus `b_O` is the layer's output."""
        return torch.einsum("...hv,hvd->...hd", z, self.W_O)


def _apply_heads(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.einsum("...td,hde->...hte", x, weight)
    return y if bias is None else y + bias[:, None]


def attention_module(hf: PreTrainedModel, family: Family, layer: int) -> nn.Module:
    """The attention module of layer `layer`.

    Raises `ClearheadError` for a layer that does not exist or holds no softmax attention.
    """
    count = config_layers(hf.config)
    if not 0 <= layer < count:
        raise ClearheadError(f"layer {layer} does not exist: the model has layers 0 to {count - 1}")
    module = find_module(hf, f"{family.layers}.{layer}.{family.attention}")
    if module is None:
        raise ClearheadError(
            f"layer {layer} of this {hf.config.model_type} model has no softmax attention; choose another layer"
        )
    return module


def read_projections(hf: PreTrainedModel, family: Family, layer: int) -> Projections:
    """Names, order and head counts of one layer's projections.

    Raises `ClearheadError` with the reason where queries, keys, values and outputs are not one linear map each.
    """
    attention = attention_module(hf, family, layer)
    where = f"layer {layer} of this {hf.config.model_type} model"
    if family.layout == "latent":
        _refuse(where, "queries, keys and values pass through low-rank latents with norms inside")
    if family.layout == "gated":
        _refuse(where, "its output is gated by the input, so z is not what the heads' patterns mix")
    _refuse_clipping(hf, where)
    names = (family.query,) if family.key is None or family.value is None else (family.query, family.key, family.value)
    weights: dict[str, Tensor] = {}
    for name in (*names, family.output):
        module = find_module(attention, name)
        if module is None:
            _refuse(where, f"it has no {name}: keys or values are borrowed from another layer, or are the same tensor")
        if not _is_plain_linear(module):
            _refuse(where, f"{name} is a {type(module).__name__}; merge adapters and load the model unquantised")
        weights[name] = _input_first(module)
    widths = {name: weights[name].shape[-1] for name in names}
    n_heads = hf.config.num_attention_heads
    d_value = weights[family.output].shape[0] // n_heads
    if len(names) == 3:
        d_head = widths[family.query] // n_heads
        n_kv_heads = widths[names[2]] // d_value
    else:
        d_head = d_value
        n_kv_heads = (widths[family.query] // d_head - n_heads) // 2
    shape = Projections(names, family.output, family.layout, n_heads, n_kv_heads, d_head, d_value)
    _check_parts(attention, shape, where)
    return shape


def attention_weights(model: HoldsModel, layer: int) -> AttentionWeights:
    """The weights of layer `layer` of a clearhead `Model` (or anything with the transformers model at `.hf`)."""
    family = find_family(model.hf)
    attention = attention_module(model.hf, family, layer)
    shape = read_projections(model.hf, family, layer)
    modules = {name: attention.get_submodule(name) for name in (*shape.names, shape.output)}
    weight = shape.split({name: _input_first(modules[name]) for name in shape.names})
    biases = {name: _bias(modules[name]) for name in shape.names}
    present = {name: bias for name, bias in biases.items() if bias is not None}
    bias = shape.split(present) if len(present) == len(biases) else None
    norms = read_head_norms(model.hf, attention, shape)
    return AttentionWeights(
        W_Q=weight.q.movedim(1, 0),
        W_K=weight.k.movedim(1, 0),
        W_V=weight.v.movedim(1, 0),
        W_O=_input_first(modules[shape.output]).unflatten(0, (shape.n_heads, shape.d_value)),
        b_Q=bias and bias.q,
        b_K=bias and bias.k,
        b_V=bias and bias.v,
        b_O=_bias(modules[shape.output]),
        q_norm=norms.q,
        k_norm=norms.k,
        v_norm=norms.v,
        sinks=dict(attention.named_parameters(recurse=False)).get("sinks"),
    )


def attention_norm(model: HoldsModel, layer: int) -> Norm | None:
    """The norm between the residual stream and the layer's attention; None where attention reads the stream itself."""
    family = find_family(model.hf)
    attention_module(model.hf, family, layer)
    if family.attention_norm is None:
        return None
    module = find_module(model.hf, f"{family.layers}.{layer}.{family.attention_norm}")
    if module is None:
        raise ClearheadError(f"layer {layer} has no {family.attention_norm!r}; add its name to families.py")
    return read_norm(module, model.hf.config.hidden_size)


def fold_attention_norm(model: HoldsModel, layer: int) -> AttentionWeights:
    """The layer's weights as they act on n(resid_pre), the residual stream normalised without gain and bias.

    n is `attention_norm(model, layer).normalise`. Where attention reads the residual stream itself (OLMo 2) the weights
    are those of `attention_weights`.
    """
    norm = attention_norm(model, layer)
    weights = attention_weights(model, layer)
    return weights if norm is None else fold_norm(weights, norm)


def fold_norm(weights: AttentionWeights, norm: Norm) -> AttentionWeights:
    """`weights` with the gain, bias and centring of `norm` in W_Q, W_K, W_V. Weights already folded are returned."""
    if weights.reads == "normalised":
        return weights
    W_Q, b_Q = fold(norm, weights.W_Q, weights.b_Q)
    W_K, b_K = fold(norm, weights.W_K, weights.b_K)
    W_V, b_V = fold(norm, weights.W_V, weights.b_V)
    return replace(weights, W_Q=W_Q, W_K=W_K, W_V=W_V, b_Q=b_Q, b_K=b_K, b_V=b_V, reads="normalised")


def split_qkv(model: HoldsModel, layer: int, outputs: Mapping[str, Float[Tensor, "b t _"]]) -> QKV:
    """q_pre `[b, h, t, dh]`, k_pre `[b, g, t, dh]`, v `[b, g, t, dv]` from what the projections returned.

    `outputs` maps each name in `read_projections(...).names` to that module's output `[b, t, features]`.
    """
    parts = read_projections(model.hf, find_family(model.hf), layer).split(outputs)
    return QKV(*(part.movedim(-2, -3) for part in parts))


class HeadNorms(NamedTuple):
    """The norms of queries, keys and values; None where there is none."""

    q: HeadNorm | None
    k: HeadNorm | None
    v: HeadNorm | None


_NORM_NAMES = (
    ("q_norm", "q_layernorm", "query_layernorm"),
    ("k_norm", "k_layernorm", "key_layernorm"),
    ("v_norm",),
)
"""What families call the norms of queries, keys and values; some have them only if their config says so."""


def read_head_norms(hf: PreTrainedModel, attention: nn.Module, shape: Projections) -> HeadNorms:
    """The norms inside an attention module."""
    after_rope = hf.config.model_type in _NORM_AFTER_ROPE
    sizes = ((shape.n_heads, shape.d_head), (shape.n_kv_heads, shape.d_head), (shape.n_kv_heads, shape.d_value))
    found = []
    for names, (n_heads, width) in zip(_NORM_NAMES, sizes, strict=True):
        module = next((module for name, module in attention.named_children() if name in names), None)
        found.append(None if module is None else read_head_norm(module, n_heads, width, after_rope))
    return HeadNorms(*found)


def _input_first(module: nn.Module) -> Float[Tensor, "d features"]:
    """The weight so that the module computes x · weight + bias, as a view."""
    weight = module.get_parameter("weight")
    return weight if isinstance(module, Conv1D) else weight.T


def _bias(module: nn.Module) -> Tensor | None:
    return dict(module.named_parameters(recurse=False)).get("bias")


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether the module computes x · weight + bias and nothing else; adapters and quantised layers do more."""
    if not isinstance(module, nn.Linear | Conv1D):
        return False
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    own_forward = type(module).forward is nn.Linear.forward or type(module).__module__.startswith("transformers.")
    return own_forward and weight is not None and weight.ndim == 2 and weight.dtype.is_floating_point


EDGE_GATE = "clearhead_gate"
"""The part of an attention module that is ours (gates.py); it changes no projection."""


def _check_parts(attention: nn.Module, shape: Projections, where: str) -> None:
    """Refuses a module whose widths do not add up, or that holds a part clearhead does not know."""
    h, g, dh, dv = shape.n_heads, shape.n_kv_heads, shape.d_head, shape.d_value
    expected = [h * dh, g * dh, g * dv] if len(shape.names) == 3 else [(h + 2 * g) * dh]
    expected.append(h * dv)
    modules = [attention.get_submodule(name) for name in (*shape.names, shape.output)]
    found = [_input_first(module).shape[-1] for module in modules[:-1]] + [_input_first(modules[-1]).shape[0]]
    if found != expected or g == 0 or h % g:
        _refuse(where, f"its projections have widths {found}, which do not make {h} heads")
    known = {*shape.names, shape.output, *(name for names in _NORM_NAMES for name in names), EDGE_GATE}
    parts = {name for name, _ in attention.named_children()} - known
    strangers = [name for name in sorted(parts) if list(attention.get_submodule(name).parameters())]
    strangers += [name for name, _ in attention.named_parameters(recurse=False) if name != "sinks"]
    if strangers:
        _refuse(where, f"it holds {', '.join(strangers)}, whose part in the computation is unknown")


def _refuse_clipping(hf: PreTrainedModel, where: str) -> None:
    """OLMo, MPT and DBRX can clamp the projections' outputs."""
    nested = hf.config.to_dict()
    clip = nested.get("clip_qkv") or (nested.get("attn_config") or {}).get("clip_qkv")
    if clip is not None:
        _refuse(where, f"queries, keys and values are clipped to ±{clip}")


def _refuse(where: str, reason: str) -> NoReturn:
    raise ClearheadError(
        f"the attention of {where} does not decompose into W_Q, W_K, W_V and W_O per head: {reason}. "
        "Its sites can still be read and edited"
    )
