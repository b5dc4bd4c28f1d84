"""Where each model family keeps its layers, norms, projections and MLP: data, and no computation.

A `Family` names modules by their path. Paths of layers and of the final norm start at the causal LM (`model.layers`),
paths of norms, attention and MLP start at one layer (`self_attn`), paths of projections start at the attention module
(`q_proj`). `find_family(model)` returns the family of a transformers model with the choices its config makes
(parallel or sequential block, multi-query or not) already applied. A model type that is not in the table is tried as a
Llama, whose names most recent families share; where a path is missing the model is refused with the path.

Nothing numeric is stored here: widths, head counts, windows and soft-caps come from the model's own config and modules.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from clearhead.errors import ClearheadError, UnknownNameError

Layout = Literal["blocks", "groups", "shards", "gated", "latent", "separate"]
"""How queries, keys and values lie along the output axis of their projection (dh head width, h heads, g kv heads):

- `separate`: three projections, each [head, dh]
- `gated`: three projections, that of the queries [head, 2, dh] holding a query and an output gate
- `blocks`: one projection [q heads | k heads | v heads]
- `groups`: one projection [g, h/g + 2, dh]: the queries of a kv head, then its key, then its value
- `shards`: one projection [4, 3, h/4, dh] in the order query, value, key (CodeGen)
- `latent`: keys and values come out of a shared low-rank latent (DeepSeek); queries [head, dh]
"""


@dataclass(frozen=True)
class Family:
    """The module paths of one model family; `None` where the family has no such module."""

    name: str
    """The transformers model type, `config.model_type`."""
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    attention: str = "self_attn"
    """From a layer to the module that computes attention."""
    query: str = "q_proj"
    """The query projection, or the fused one where `layout` says that there is one."""
    key: str | None = "k_proj"
    value: str | None = "v_proj"
    output: str = "o_proj"
    query_norm: str | None = None
    key_norm: str | None = None
    layout: Layout = "separate"
    attention_norm: str | None = "input_layernorm"
    """The norm before attention; None where attention reads the residual stream itself."""
    mlp_norm: str | None = "post_attention_layernorm"
    """The norm before the MLP; None where the MLP reads the residual stream, or shares the norm of attention."""
    post_attention_norm: str | None = None
    """A norm applied to the attention's output before it is added to the residual stream."""
    post_mlp_norm: str | None = None
    mlp_input: str = "mlp"
    """The module whose input is `mlp_in`."""
    mlp_output: str = "mlp"
    """The module whose output is `mlp_out`."""
    parallel: bool = False
    """Attention and MLP read the same residual stream, so there is no `resid_mid`."""
    interface: bool = True
    """Attention goes through transformers' attention interface."""
    plain: frozenset[str] = frozenset()
    """Off the interface: which of q, k, v are used exactly as projected (no rotation, norm or clipping)."""
    sdpa: bool = True
    """HF's sdpa path computes the same function as its eager path."""
    mlp_output_mutated: bool = False
    """The layer adds to the MLP's output in place, so what is read must be a copy."""


LLAMA = Family("llama")
SANDWICH = replace(
    LLAMA,
    mlp_norm="pre_feedforward_layernorm",
    post_attention_norm="post_attention_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
POST_NORM = replace(SANDWICH, attention_norm=None, mlp_norm=None)
GPT2 = Family(
    "gpt2",
    layers="transformer.h",
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    attention="attn",
    query="c_attn",
    key=None,
    value=None,
    output="c_proj",
    layout="blocks",
    attention_norm="ln_1",
    mlp_norm="ln_2",
)
GPTJ = replace(
    GPT2,
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="out_proj",
    layout="separate",
    mlp_norm=None,
    parallel=True,
)
OPT = replace(
    LLAMA,
    output="out_proj",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    mlp_input="fc1",
    mlp_output="fc2",
)
BLOOM = Family(
    "bloom",
    layers="transformer.h",
    embedding="transformer.word_embeddings",
    final_norm="transformer.ln_f",
    attention="self_attention",
    query="query_key_value",
    key=None,
    value=None,
    output="dense",
    layout="groups",
    mlp_output="mlp.dense_4h_to_h",  # the MLP's and the attention's own outputs already hold the residual stream
    interface=False,
    plain=frozenset("qkv"),
)
QK_NORM = {"query_norm": "q_norm", "key_norm": "k_norm"}

_TABLE = [
    LLAMA,
    *(
        replace(LLAMA, name=name)
        for name in (
            "arcee",
            "ernie4_5",
            "gemma",
            "glm",
            "gpt_oss",
            "granite",
            "helium",
            "ministral",
            "mistral",
            "mixtral",
            "nemotron",
            "olmo",
            "qwen2",
            "qwen2_moe",
            "seed_oss",
            "smollm3",
            "starcoder2",
        )
    ),
    *(replace(LLAMA, name=name, **QK_NORM) for name in ("qwen3", "qwen3_moe")),
    replace(LLAMA, name="qwen3_next", layout="gated", **QK_NORM),
    replace(LLAMA, name="hunyuan_v1_dense", query_norm="query_layernorm", key_norm="key_layernorm"),
    replace(LLAMA, name="apertus", attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm", **QK_NORM),
    replace(LLAMA, name="phi3", query="qkv_proj", key=None, value=None, layout="blocks"),
    replace(LLAMA, name="deepseek_v3", query="q_b_proj", key=None, value=None, layout="latent"),
    replace(SANDWICH, name="gemma2"),
    *(replace(SANDWICH, name=name, **QK_NORM) for name in ("gemma3_text", "gemma4_text")),
    replace(
        SANDWICH,
        name="glm4",
        mlp_norm="post_attention_layernorm",
        post_attention_norm="post_self_attn_layernorm",
        post_mlp_norm="post_mlp_layernorm",
    ),
    *(replace(POST_NORM, name=name, **QK_NORM) for name in ("olmo2", "olmo3", "exaone4")),
    replace(LLAMA, name="stablelm"),
    *(replace(LLAMA, name=name, mlp_norm=None, parallel=True) for name in ("cohere", "cohere2")),
    replace(LLAMA, name="phi", final_norm="model.final_layernorm", output="dense", mlp_norm=None, parallel=True),
    replace(
        LLAMA,
        name="lfm2",
        final_norm="model.embedding_norm",
        output="out_proj",
        attention_norm="operator_norm",
        mlp_norm="ffn_norm",
        mlp_input="feed_forward",
        mlp_output="feed_forward",
        query_norm="q_layernorm",
        key_norm="k_layernorm",
    ),
    replace(
        OPT,
        name="opt",
        layers="model.decoder.layers",
        embedding="model.decoder.embed_tokens",
        final_norm="model.decoder.final_layer_norm",
    ),
    replace(
        OPT, name="biogpt", layers="biogpt.layers", embedding="biogpt.embed_tokens", final_norm="biogpt.layer_norm"
    ),
    GPT2,
    replace(GPT2, name="gpt_bigcode"),
    replace(GPTJ, name="gptj"),
    replace(GPTJ, name="codegen", query="qkv_proj", key=None, value=None, layout="shards"),
    replace(
        GPTJ,
        name="gpt_neo",
        attention="attn.attention",
        mlp_norm="ln_2",
        parallel=False,
        interface=False,
        plain=frozenset("qkv"),
    ),
    Family(
        "gpt_neox",
        layers="gpt_neox.layers",
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        attention="attention",
        query="query_key_value",
        key=None,
        value=None,
        output="dense",
        layout="groups",
    ),
    BLOOM,
    replace(BLOOM, name="falcon", mlp_output="mlp"),
    replace(
        BLOOM,
        name="mpt",
        layers="transformer.blocks",
        embedding="transformer.wte",
        final_norm="transformer.norm_f",
        attention="attn",
        query="Wqkv",
        output="out_proj",
        layout="blocks",
        attention_norm="norm_1",
        mlp_norm="norm_2",
        mlp_input="ffn",
        mlp_output="ffn.down_proj",
    ),
]
FAMILIES: dict[str, Family] = {family.name: family for family in _TABLE}
"""Every family that is known by name."""


def find_family(model: PreTrainedModel) -> Family:
    """The family of `model`, with its config's choices applied.

    Raises `UnknownNameError` where the model type is not in the table and its modules are not named as Llama's are.
    """
    config = model.config
    known = FAMILIES.get(config.model_type)
    family = _apply_config(known, config) if known else replace(LLAMA, name=config.model_type)
    missing = _missing_paths(model, family)
    if not missing:
        return family
    if known is None:
        raise UnknownNameError(
            "model family",
            config.model_type,
            FAMILIES,
            f"Its modules are not named as Llama's are either (no {missing[0]!r}); add a row to"
            " clearhead/model/families.py.",
        )
    raise ClearheadError(
        f"model type {config.model_type!r}: no module at {missing[0]!r}; this version of transformers or of the model"
        " names its modules differently from clearhead/model/families.py"
    )


def _apply_config(family: Family, config: PreTrainedConfig) -> Family:
    """The family as this config builds it: parallel blocks, multi-query projections, places of norms."""
    match family.name:
        case "gpt_neox" | "stablelm":
            parallel = config.use_parallel_residual
            shared = parallel and family.name == "stablelm"  # a parallel StableLM block has a single norm
            return replace(family, parallel=parallel, mlp_norm=None if shared else family.mlp_norm)
        case "gpt2":
            # this option is computed in a method of its own, which the interface does not reach
            return replace(family, interface=not config.reorder_and_upcast_attn)
        case "gpt_bigcode":
            return replace(family, layout="blocks" if config.multi_query else "groups")
        case "opt" if not config.do_layer_norm_before:
            return replace(
                family,
                attention_norm=None,
                mlp_norm=None,
                post_attention_norm=family.attention_norm,
                post_mlp_norm=family.mlp_norm,
            )
        case "deepseek_v3":
            return replace(family, query="q_b_proj" if config.q_lora_rank else "q_proj")
        case "mpt":
            return replace(family, plain=family.plain if config.attn_config.clip_qkv is None else frozenset())
        case "falcon":
            return _apply_falcon(family, config)
        case _:
            return family


def _apply_falcon(family: Family, config: PreTrainedConfig) -> Family:
    """Falcon's three generations: ALiBi and sequential, multi-query and parallel, grouped with one or two norms."""
    new = config.new_decoder_architecture
    parallel = new or config.parallel_attn
    two_norms = new and config.num_ln_in_parallel_attn == 2
    return replace(
        family,
        layout="blocks" if config.multi_query and not new else "groups",
        plain=frozenset("qkv" if config.alibi else "v"),
        sdpa=not config.alibi,  # HF's sdpa path scales ALiBi's biases differently from its eager path
        attention_norm="ln_attn" if two_norms else "input_layernorm",
        mlp_norm="ln_mlp" if two_norms else None if parallel else "post_attention_layernorm",
        parallel=parallel,
        mlp_output_mutated=parallel,
    )


def _missing_paths(model: PreTrainedModel, family: Family) -> list[str]:
    """The family's paths that lead to no module; attention and what lies in it is looked for in any of the layers."""
    modules = dict(model.named_modules())
    missing = [path for path in (family.layers, family.embedding, family.final_norm) if path not in modules]
    inside = [family.query, family.key, family.value, family.output]
    paths = [f"{family.attention}.{path}" for path in inside if path]
    paths += [p for p in (family.attention_norm, family.mlp_norm, family.mlp_input, family.mlp_output) if p]
    count = config_layers(model.config)
    for path in dict.fromkeys([family.attention, *paths]):
        if not any(f"{family.layers}.{layer}.{path}" in modules for layer in range(count)):
            missing.append(f"{family.layers}.*.{path}")
    return missing


def config_layers(config: PreTrainedConfig) -> int:
    """The number of layers; every transformers config answers to this name through its attribute map."""
    return config.num_hidden_layers


def find_module(root: nn.Module, path: str) -> nn.Module | None:
    """The submodule of `root` at `path`, or None where there is none."""
    node: nn.Module | None = root
    for part in path.split("."):
        node = node._modules.get(part)
        if node is None:
            return None
    return node
