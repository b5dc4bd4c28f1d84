"""Random-init models of every tested family: two layers, four heads, width 32, saturated attention.

`CONFIGS[name]` holds the keyword arguments of the family's transformers config (a variant names its family as
`model_type`); `build(name)` makes the model, in
eval mode, reproducibly. Weights are drawn wide (σ = 0.5) so that attention patterns are far from uniform and a wrong
mask, scale or rotation shows; norm gains and biases, which transformers initialises to 1 and 0, are perturbed so that
a forgotten gain or bias shows too. Nothing is downloaded.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 97
CONTEXT = 64

LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.5,
}
HEADS = LLAMA | {"head_dim": 16}  # n_heads * d_head = 64, not d_model
SLIDING = {"sliding_window": 4}
MULTI_HEAD = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
GPT2 = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": VOCABULARY,
    "n_positions": CONTEXT,
    "initializer_range": 0.5,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

CONFIGS: dict[str, dict] = {
    "gpt2": GPT2,
    "gptj": GPT2 | {"rotary_dim": 4},
    "codegen": GPT2 | {"rotary_dim": 4},
    "gpt_bigcode": GPT2,
    "gpt_neox": MULTI_HEAD,
    "gpt_neox_sequential": MULTI_HEAD | {"model_type": "gpt_neox", "use_parallel_residual": False},
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": HEADS,
    "qwen3_moe": HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_next": HEADS
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "gemma": HEADS,
    "gemma2": HEADS | SLIDING | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gemma3_text": HEADS | SLIDING | {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": HEADS
    | SLIDING
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 24,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "mistral": LLAMA | SLIDING,
    "ministral": HEADS | SLIDING | {"layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": LLAMA | EXPERTS,
    "phi": LLAMA,
    "phi3": LLAMA,
    "olmo": LLAMA,
    "olmo2": LLAMA,
    "olmo3": LLAMA | SLIDING,
    "opt": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "word_embed_proj_dim": 32,
        "init_std": 0.5,
    },
    "gpt_oss": HEADS
    | EXPERTS
    | SLIDING
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "cohere": LLAMA | {"logit_scale": 1.0},
    "cohere2": LLAMA | SLIDING | {"logit_scale": 1.0},
    "granite": LLAMA,
    "smollm3": LLAMA,
    "glm": HEADS,
    "glm4": HEADS,
    "stablelm": LLAMA,
    "starcoder2": LLAMA | SLIDING,
    "nemotron": LLAMA,
    "lfm2": LLAMA | {"layer_types": ["conv", "full_attention"]},
    "biogpt": MULTI_HEAD,
    "helium": LLAMA | {"head_dim": 8},
    "arcee": LLAMA,
    "ernie4_5": LLAMA,
    "exaone4": LLAMA | {"layer_types": ["sliding_attention", "full_attention"]} | SLIDING,
    "hunyuan_v1_dense": HEADS,
    "seed_oss": HEADS,
    "apertus": LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "deepseek_v3": LLAMA
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
    },
}
"""Families on transformers' attention interface."""

OFF_INTERFACE: dict[str, dict] = {
    "gpt_neo": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "intermediate_size": 64,
        "initializer_range": 0.5,
    },
    "bloom": {"n_layer": 2, "hidden_size": 32, "n_head": 4, "vocab_size": VOCABULARY, "initializer_range": 0.5},
    "falcon_alibi": {
        "model_type": "falcon",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.5,
        "alibi": True,
        "parallel_attn": False,
    },
    "falcon": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.5,
    },
    "mpt": {"n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": VOCABULARY, "initializer_range": 0.5},
}
"""Families that compute attention without the interface."""


def build(name: str, seed: int = 0, attn: str = "eager") -> PreTrainedModel:
    """The tiny model of family `name`, the same for the same seed, in eval mode, on attention path `attn`."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # defaults lie outside the tiny vocabulary
    given = {"model_type": name} | tokens | (CONFIGS | OFF_INTERFACE)[name]
    config = AutoConfig.for_model(**given)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
    return model
