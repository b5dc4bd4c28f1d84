"""Per-head weights: the projections rebuilt from views equal the model's own outputs, in every family."""

import dataclasses

import pytest
import torch
from torch import nn

from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.model.families import find_family
from clearhead.model.weights import (
    attention_module,
    attention_norm,
    attention_weights,
    fold_attention_norm,
    fold_norm,
    read_projections,
    split_qkv,
)
from tests.model import tiny_configs
from tests.model.tiny_configs import CONFIGS, LLAMA, OFF_INTERFACE, VOCABULARY, build

REFUSED = ("deepseek_v3", "qwen3_next")
FAMILIES = [name for name in (*CONFIGS, *OFF_INTERFACE) if name not in REFUSED]
TOKENS = torch.arange(5, 5 + 24).view(2, 12) * 3 % VOCABULARY
EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")  # torch's grouped matrix product knows no float64
VARIANTS = {
    "stablelm_qk_norm": LLAMA | {"model_type": "stablelm", "qk_layernorm": True},
    "phi_qk_norm": LLAMA | {"model_type": "phi", "qk_layernorm": True},
    "cohere_qk_norm": LLAMA | {"model_type": "cohere", "use_qk_norm": True},
    "gpt_bigcode_multi_head": CONFIGS["gpt_bigcode"] | {"model_type": "gpt_bigcode", "multi_query": False},
    "gpt2_inverse_layer": CONFIGS["gpt2"] | {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
    "falcon_grouped": OFF_INTERFACE["falcon"]
    | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_multi_head": OFF_INTERFACE["falcon"] | {"model_type": "falcon", "multi_query": False, "bias": True},
    "codegen_eight_heads": CONFIGS["codegen"] | {"model_type": "codegen", "n_head": 8},
    "llama_biased": LLAMA | {"model_type": "llama", "attention_bias": True},
}


@pytest.fixture
def variants(monkeypatch):
    for name, config in VARIANTS.items():
        monkeypatch.setitem(tiny_configs.CONFIGS, name, config)


def close(found, expected, tolerance: float) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def check_projections(model: Model, layer: int, tolerance: float) -> None:
    weights = attention_weights(model, layer)
    sites = [f"{name}.{layer}" for name in ("attn_in", "q_pre", "k_pre", "z", "attn_out", "head_out")]
    run = model.run(TOKENS, read=sites)
    projected = weights.project(run[f"attn_in.{layer}"])
    assert close(projected.q, run[f"q_pre.{layer}"], tolerance)
    assert close(projected.k, run[f"k_pre.{layer}"], tolerance)
    heads = weights.head_out(run[f"z.{layer}"])
    assert close(heads, run[f"head_out.{layer}"], tolerance)
    written = heads.sum(-2) if weights.b_O is None else heads.sum(-2) + weights.b_O
    assert close(written, run[f"attn_out.{layer}"], tolerance)
    if model.family.interface or "v" in model.family.plain:
        value = model.run(TOKENS, read=[f"v.{layer}"])[f"v.{layer}"]
        assert close(projected.v, value, max(tolerance, 1e-6) if weights.v_norm else tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_views_rebuild_every_projection(name):
    double = name not in EXPERTS
    model = Model(build(name).double() if double else build(name), self_test=False)
    for layer in model.attention_layers:
        check_projections(model, layer, 1e-12 if double else 3e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_configured_variants(name, variants):
    model = Model(build(name), self_test=False)
    for layer in model.attention_layers:
        check_projections(model, layer, 3e-6)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "gpt_bigcode", "phi3", "falcon", "bloom", "mpt", "gptj"])
def test_weights_are_views_of_the_parameters(name):
    hf = build(name)
    weights = attention_weights(Model(hf, self_test=False), 0)
    storages = {parameter.untyped_storage().data_ptr() for parameter in hf.parameters()}
    for tensor in (weights.W_Q, weights.W_K, weights.W_V, weights.W_O, weights.b_Q, weights.b_K, weights.b_V):
        assert tensor is None or tensor.untyped_storage().data_ptr() in storages


@pytest.mark.parametrize("name", ["gpt2", "codegen", "gpt_neox", "gemma3_text", "stablelm_qk_norm"])
def test_gradients_reach_the_parameters(name, variants):
    hf = build(name)
    weights = attention_weights(Model(hf, self_test=False), 1)
    tensors = [weights.W_Q, weights.W_K, weights.W_V, weights.W_O]
    tensors += [norm.gain for norm in (weights.q_norm, weights.k_norm) if norm is not None]
    sum(tensor.square().sum() for tensor in tensors).backward()
    attention = attention_module(hf, find_family(hf), 1)
    shape = read_projections(hf, find_family(hf), 1)
    for module in (*shape.names, shape.output):
        assert attention.get_submodule(module).weight.grad.abs().min() > 0
    gains = [parameter for key, parameter in attention.named_parameters() if "norm" in key]
    assert len(gains) == 0 or all(gain.grad is not None for gain in gains)


def test_per_head_repeats_the_kv_head_that_serves_each_query_head():
    hf = build("qwen3")
    model = Model(hf, self_test=False)
    weights = attention_weights(model, 0)
    repeated = weights.per_head()
    assert repeated.W_K.shape == (4, 32, 16) and weights.W_K.shape == (2, 32, 16)
    assert torch.equal(repeated.W_K[1], weights.W_K[0]) and torch.equal(repeated.W_V[2], weights.W_V[1])
    run = model.run(TOKENS, read=["attn_in.0", "v.0", "pattern.0", "z.0"])
    v = repeated.project(run["attn_in.0"]).v
    assert close((run["pattern.0"] @ v).transpose(1, 2), run["z.0"], 1e-5)


def test_per_head_refuses_statistics_over_all_kv_heads():
    with pytest.raises(ClearheadError, match="normalise first, then repeat"):
        attention_weights(Model(build("olmo2"), self_test=False), 0).per_head()


@pytest.mark.parametrize("name", ["gpt2", "phi3", "gpt_neox"])
def test_split_qkv_cuts_module_outputs(name):
    hf = build(name)
    model = Model(hf, self_test=False)
    shape = read_projections(hf, model.family, 0)
    attention = attention_module(hf, model.family, 0)
    run = model.run(TOKENS, read=["attn_in.0", "q_pre.0", "k_pre.0", "v.0"])
    outputs = {key: attention.get_submodule(key)(run["attn_in.0"]) for key in shape.names}
    parts = split_qkv(model, 0, outputs)
    for part, site in zip(parts, ("q_pre.0", "k_pre.0", "v.0"), strict=True):
        assert torch.equal(part, run[site])


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_folded_weights_read_the_plain_normalised_residual(name, variants):
    model = Model(build(name), self_test=False)
    for layer in model.attention_layers:
        norm, weights = attention_norm(model, layer), fold_attention_norm(model, layer)
        run = model.run(TOKENS, read=[f"{site}.{layer}" for site in ("resid_pre", "q_pre", "k_pre")])
        residual = run[f"resid_pre.{layer}"]
        read = residual if norm is None else norm.normalise(residual)
        projected = weights.project(read)
        assert close(projected.q, run[f"q_pre.{layer}"], 1e-5)
        assert close(projected.k, run[f"k_pre.{layer}"], 1e-5)
        if norm is not None:
            frozen = weights.project(residual * norm.frozen_scale(residual))  # no centring: W is centred
            assert close(frozen.q, run[f"q_pre.{layer}"], 2e-5)
            assert weights.reads == "normalised"
            again = fold_norm(weights, norm)
            assert all(
                getattr(again, field.name) is getattr(weights, field.name) for field in dataclasses.fields(weights)
            )


def test_refusals_say_why(monkeypatch):
    cases = {
        "deepseek_v3": "low-rank latents",
        "qwen3_next": "gated by the input",
        "olmo_clipped": "clipped to ±8",
        "bitnet": "holds attn_sub_norm",
        "gemma4_shared": "borrowed from another layer",
    }
    extra = {
        "olmo_clipped": LLAMA | {"model_type": "olmo", "clip_qkv": 8.0},
        "bitnet": LLAMA,
        "gemma4_shared": CONFIGS["gemma4_text"] | {"model_type": "gemma4_text", "num_kv_shared_layers": 1},
    }
    extra["gemma4_shared"]["num_hidden_layers"] = 3
    extra["gemma4_shared"]["layer_types"] = ["sliding_attention", "full_attention", "full_attention"]
    for name, config in extra.items():
        monkeypatch.setitem(tiny_configs.CONFIGS, name, config)
    for name, reason in cases.items():
        model = Model(build(name), self_test=False)
        with pytest.raises(ClearheadError, match=reason):
            attention_weights(model, model.n_layers - 1)


def test_layers_that_do_not_exist_or_do_not_attend():
    with pytest.raises(ClearheadError, match="layers 0 to 1"):
        attention_weights(Model(build("llama"), self_test=False), 2)
    with pytest.raises(ClearheadError, match="no softmax attention"):
        attention_weights(Model(build("lfm2"), self_test=False), 0)


def test_an_adapted_or_unknown_module_is_refused():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + x.sum()

    hf = build("llama")
    attention = hf.model.layers[0].self_attn
    plain, attention.q_proj = attention.q_proj, Adapted(32, 32, bias=False)
    with pytest.raises(ClearheadError, match="q_proj is a Adapted; merge adapters"):
        attention_weights(Model(hf, self_test=False), 0)
    attention.q_proj = plain
    attention.register_module("gate_proj", nn.Linear(32, 32))
    with pytest.raises(ClearheadError, match="it holds gate_proj"):
        attention_weights(Model(hf, self_test=False), 0)
    attention.gate_proj = None
    attention.q_proj = nn.Linear(32, 64, bias=False)
    with pytest.raises(ClearheadError, match="do not make 4 heads"):
        attention_weights(Model(hf, self_test=False), 0)


def test_smollm2_identities(smollm2):
    check_projections(smollm2, 12, 3e-6)
    norm, weights = attention_norm(smollm2, 12), fold_attention_norm(smollm2, 12)
    run = smollm2.run(TOKENS, read=["resid_pre.12", "q_pre.12"])
    assert close(weights.project(norm.normalise(run["resid_pre.12"])).q, run["q_pre.12"], 1e-5)
