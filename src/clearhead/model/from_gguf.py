"""A Llama-layout GGUF file as a folder transformers loads: weights dequantised to float32, config, tokenizer.

llama.cpp stores the rows of W_Q and W_K so that the two halves a rotation mixes lie side by side; with r the head's
width, row 2i+s of a head here was row s·r/2+i in the original. Undoing it is the only change to the numbers: what is
written equals transformers' own GGUF loader to the last bit, in a quarter of its time, and the tokenizer is right
(transformers' omits the digit splitter of `tokenizer.ggml.pre = smollm`, so numbers would be split differently).

Reads the `llama` architecture with a byte-level BPE tokenizer; says so about anything else. The output is a function
of the file alone: two conversions are equal byte for byte.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from clearhead.errors import ClearheadError

CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a token that text never produces

TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert(source: Path, folder: Path) -> None:
    """Write config.json, model.safetensors (float32), tokenizer.json and tokenizer_config.json into `folder`.

    Raises `ClearheadError` for an architecture, a tokenizer or a tensor this does not know.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for key, known in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
        if fields.get(key) != known:
            raise ClearheadError(f"{source.name} says {key} = {fields.get(key)!r}; only {known!r} can be converted")
    weights = _weights(reader, fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"])
    config = _config(fields, tied="lm_head.weight" not in weights)
    _write_json(folder / "config.json", config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))


def _weights(reader: GGUFReader, n_heads: int, n_kv_heads: int) -> dict[str, np.ndarray]:
    weights = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        value = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)
        if tensor.name in TOP_LEVEL:
            weights[TOP_LEVEL[tensor.name]] = value
            continue
        block, layer, name, kind = (tensor.name.split(".") + [""] * 4)[:4]
        if block != "blk" or name not in TENSORS or kind != "weight":
            raise ClearheadError(f"no place in a Llama model is known for the GGUF tensor {tensor.name!r}")
        if name == "attn_q":
            value = _halves_apart(value, n_heads)
        if name == "attn_k":
            value = _halves_apart(value, n_kv_heads)
        weights[f"model.layers.{layer}.{TENSORS[name]}.weight"] = value
    return weights


def _halves_apart(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the rows [h·r, d] of a projection: (h, i, s) back to (h, s, i)."""
    width = rows.shape[0] // n_heads
    heads = rows.reshape(n_heads, width // 2, 2, rows.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    theta = fields["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF holds the float32 next to the decimal the authors wrote; its shortest decimal is theirs
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
