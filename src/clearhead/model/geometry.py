"""The shape and the rules of one layer's attention: everything about its scores that is not a weight.

    score_ij = cap(scale · q_i·k_j) + slope · j,     cap(s) = c·tanh(s/c) where there is a soft-cap c, else s
    q = q_scale · R(i) norm(q_pre)   or, in a few families, norm(R(i) q_pre);   k likewise, without q_scale

`attention_geometry` reads it from the transformers module and config; `form_queries_keys` and `score` are the two
formulas. Mask and softmax are not here: `window` says how far back a query sees, `sinks` that the softmax has one
more column.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from clearhead.errors import ClearheadError
from clearhead.model.families import find_family, find_module
from clearhead.model.norms import HeadNormRule, HoldsModel
from clearhead.model.rope import RopeSpec, rope_spec, rotate
from clearhead.model.weights import (
    AttentionWeights,
    attention_module,
    attention_weights,
    read_head_norms,
    read_projections,
)

if TYPE_CHECKING:
    from clearhead.model.access import Model


@dataclass(frozen=True)
class AttentionGeometry:
    """One layer's attention without its weights."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    """Width of queries and keys."""
    d_value: int
    """Width of values."""
    scale: float
    """What multiplies q·k, for q as the attention function receives it."""
    q_scale: float
    """What multiplies the query before that (OPT, whose `scale` is 1); 1 in every other family."""
    softcap: float | None
    window: int | None
    """Number of keys a query sees, itself included; None if all before it."""
    sinks: bool
    """A learned logit per head takes part in the softmax and is then dropped (GPT-OSS)."""
    rope: RopeSpec | None
    qk_norm: HeadNormRule | None
    v_norm: HeadNormRule | None
    """Gemma 4 normalises values: v is then not linear in the layer's input."""
    alibi: tuple[float, ...] | None
    """Per head, the slope by which a score grows with the key's position; up to a constant per query."""


def attention_geometry(model: HoldsModel, layer: int) -> AttentionGeometry:
    """The geometry of layer `layer` of a clearhead `Model` (or anything with the transformers model at `.hf`).

    Raises `ClearheadError` with the reason where the layer's attention does not consist of per-head projections and
    a softmax, or turns queries and keys in an unknown way.
    """
    family = find_family(model.hf)
    attention = attention_module(model.hf, family, layer)
    shape = read_projections(model.hf, family, layer)
    norms = read_head_norms(model.hf, attention, shape)
    rotary = find_module(model.hf, f"{family.layers.rpartition('.')[0]}.rotary_emb")
    own_scale = _own_scale(attention, model.hf.config.model_type)
    ignores_cap = model.hf.config.model_type in _IGNORE_SOFTCAP
    scales_queries = model.hf.config.model_type in _SCALE_QUERIES
    return AttentionGeometry(
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        d_head=shape.d_head,
        d_value=shape.d_value,
        scale=1.0 if scales_queries else own_scale,
        q_scale=own_scale if scales_queries else 1.0,
        softcap=None if ignores_cap else vars(attention).get("attn_logit_softcapping"),
        window=_window(model.hf, attention, layer),
        sinks="sinks" in dict(attention.named_parameters(recurse=False)),
        rope=rope_spec(model.hf, rotary, attention, layer),
        qk_norm=norms.q and norms.q.rule,
        v_norm=norms.v and norms.v.rule,
        alibi=_alibi_slopes(model.hf, attention, shape.n_heads),
    )


def form_queries_keys(
    geometry: AttentionGeometry,
    weights: AttentionWeights,
    q_pre: Float[Tensor, "*b h t dh"],
    k_pre: Float[Tensor, "*b g t dh"],
    positions: Int[Tensor, "*#b t"] | None = None,
) -> tuple[Float[Tensor, "*b h t dh"], Float[Tensor, "*b g t dh"]]:
    """Queries and keys as the attention function receives them, from the outputs of their projections.

    `positions` count from 0 along t where not given. Only the norms of `weights` are used.
    """
    q, k = q_pre, k_pre
    if geometry.qk_norm is not None and not geometry.qk_norm.after_rope:
        q, k = _normalise(weights, q, k)
    if geometry.rope is not None:
        if positions is None:
            positions = torch.arange(q.shape[-2], device=q.device)
        cos, sin = geometry.rope.tables(positions, q.dtype)
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
        q, k = rotate(q, cos, sin, geometry.rope), rotate(k, cos, sin, geometry.rope)
    if geometry.qk_norm is not None and geometry.qk_norm.after_rope:
        q, k = _normalise(weights, q, k)
    return (q if geometry.q_scale == 1.0 else q * geometry.q_scale), k


def _normalise(weights: AttentionWeights, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    if weights.q_norm is None or weights.k_norm is None:
        raise ClearheadError("this layer normalises queries and keys, but the weights given hold no q_norm and k_norm")
    return weights.q_norm(q), weights.k_norm(k)


def score(
    geometry: AttentionGeometry, q: Float[Tensor, "*b h q dh"], k: Float[Tensor, "*b g k dh"]
) -> Float[Tensor, "*b h q k"]:
    """Scores before mask and softmax, every query with every key, from q and k as the attention function has them."""
    if k.shape[-3] != q.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = q @ k.transpose(-1, -2) * geometry.scale
    if geometry.softcap is not None:
        scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
    if geometry.alibi is not None:
        slopes = torch.tensor(geometry.alibi, dtype=scores.dtype, device=scores.device)
        scores = scores + slopes[:, None, None] * torch.arange(k.shape[-2], device=scores.device)
    return scores


def verify_scores(model: "Model", layer: int, *, n_tokens: int = 12) -> float:
    """Checks that weights and geometry rebuild the scores that the model itself computes; returns the worst error.

    A run over `n_tokens` spread tokens is compared where the query may see the key, up to a constant per query (which
    the softmax removes), relative to the largest score. Raises `ClearheadError` where they differ by more than
    rounding: then rotation, norm, scale or soft-cap of this model is not what `attention_geometry` says.
    """
    geometry, weights = attention_geometry(model, layer), attention_weights(model, layer)
    row = torch.linspace(1, model.d_vocab - 2, n_tokens, dtype=torch.float64).long().to(model.device)
    run = model.run(row[None], read=(f"attn_in.{layer}", f"scores.{layer}"))
    with torch.no_grad():
        projected = weights.project(run[f"attn_in.{layer}"])
        rebuilt = score(geometry, *form_queries_keys(geometry, weights, projected.q, projected.k))
    visible = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=model.device).tril()
    if geometry.window is not None:
        visible &= visible.triu(1 - geometry.window)
    expected = run[f"scores.{layer}"].double().masked_fill(~visible, 0)
    difference = rebuilt.double().masked_fill(~visible, 0) - expected
    constant = difference.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
    worst = float((difference - constant).masked_fill(~visible, 0).abs().max() / expected.abs().max())
    low = model.dtype.itemsize < 4
    tolerance = 16 * torch.finfo(model.dtype).eps if low else 512 * torch.finfo(torch.float32).eps
    if not worst <= tolerance:
        raise ClearheadError(
            f"scores of layer {layer} rebuilt from weights differ from {model.name}'s own by {worst:.1e} of the "
            f"largest (rounding allows {tolerance:.0e}); this family does something with queries or keys that "
            "clearhead misses"
        )
    return worst


_SCALE_QUERIES = ("opt",)
_IGNORE_SOFTCAP = ("gemma3", "gemma3_text")  # the modules hold a soft-cap that their forward does not pass on
_SCALE_ATTRIBUTE = {"bloom": "inv_norm_factor", "falcon": "inv_norm_factor", "mpt": "softmax_scale"}


def _own_scale(attention: nn.Module, family: str) -> float:
    if family == "gpt_neo":  # trained without a scale; its class has no attribute for one
        return 1.0
    name = _SCALE_ATTRIBUTE.get(family, "scaling")
    fields = vars(attention)
    if name not in fields:
        raise ClearheadError(f"{type(attention).__name__} keeps no {name!r}, so the scale of its scores is unknown")
    return float(fields[name])


def _window(hf: PreTrainedModel, attention: nn.Module, layer: int) -> int | None:
    """The sliding window, by layer type where the config lists types, for all layers where the family masks so."""
    config = hf.config.to_dict()
    if hf.config.model_type == "gpt_neo":
        return hf.config.window_size if hf.config.attention_layers[layer] == "local" else None
    window, types = config.get("sliding_window"), config.get("layer_types")
    if types is not None:
        return window if types[layer] == "sliding_attention" else None
    masks = "create_sliding_window_causal_mask" in vars(sys.modules[type(attention).__module__])
    return window if masks else None


def _alibi_slopes(hf: PreTrainedModel, attention: nn.Module, n_heads: int) -> tuple[float, ...] | None:
    """Slopes from the family's own function, as the bias of the key at position 1 over the key at position 0."""
    functions = vars(sys.modules[type(attention).__module__])
    match hf.config.model_type:
        case "bloom":
            bias = functions["build_alibi_tensor"](torch.ones(1, 2), n_heads, torch.float32)
        case "falcon" if hf.config.alibi:
            raise ClearheadError(
                "transformers adds Falcon's ALiBi slopes once on its sdpa path and twice on its eager path, so the "
                "model has no single score to describe; its weights and sites can still be read"
            )
        case "mpt" if hf.config.attn_config.alibi:
            bias = functions["build_mpt_alibi_tensor"](n_heads, 2, hf.config.attn_config.alibi_bias_max)
        case _:
            return None
    bias = bias.reshape(n_heads, 2).double()
    return tuple((bias[:, 1] - bias[:, 0]).tolist())
