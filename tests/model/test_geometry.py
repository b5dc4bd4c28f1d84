"""Geometry: scores rebuilt from weights equal those the model computes, and a wrong rule does not pass."""

import dataclasses

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.model import Model, geometry
from clearhead.model.geometry import attention_geometry, form_queries_keys, verify_scores
from clearhead.model.weights import attention_weights
from tests.model import tiny_configs
from tests.model.test_weights import FAMILIES, TOKENS, VARIANTS, close
from tests.model.tiny_configs import HEADS, LLAMA, build

SCORED = [name for name in FAMILIES if name != "falcon_alibi"]
OFF = ("bloom", "falcon", "mpt")  # off the attention interface q and k are no sites where rotated; scores are compared
MORE = VARIANTS | {
    "nanochat": LLAMA | {"model_type": "nanochat"},
    "granite_scaled": LLAMA | {"model_type": "granite", "attention_multiplier": 0.3},
    "gemma3_softcap": HEADS
    | {"model_type": "gemma3_text", "sliding_window": 4, "attn_logit_softcapping": 3.0}
    | {"layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.fixture
def more(monkeypatch):
    for name, config in MORE.items():
        monkeypatch.setitem(tiny_configs.CONFIGS, name, config)


@pytest.mark.parametrize("name", [*SCORED, *MORE])
def test_scores_rebuilt_from_weights_are_the_models_own(name, more):
    model = Model(build(name), self_test=False)
    for layer in model.attention_layers:
        assert verify_scores(model, layer) < 2e-6


@pytest.mark.parametrize("name", [name for name in (*SCORED, *MORE) if name.partition("_")[0] not in OFF])
def test_queries_and_keys_are_those_the_attention_function_receives(name, more):
    model = Model(build(name), self_test=False)
    for layer in model.attention_layers:
        run = model.run(TOKENS, read=[f"{site}.{layer}" for site in ("q_pre", "k_pre", "q", "k")])
        q, k = form_queries_keys(
            attention_geometry(model, layer),
            attention_weights(model, layer),
            run[f"q_pre.{layer}"],
            run[f"k_pre.{layer}"],
        )
        assert close(q, run[f"q.{layer}"], 1e-6) and close(k, run[f"k.{layer}"], 1e-6)


@pytest.mark.parametrize("name", SCORED)
def test_window_and_sinks_are_those_of_the_pattern(name):
    model = Model(build(name), self_test=False)
    for layer in model.attention_layers:
        described = attention_geometry(model, layer)
        pattern = model.run(TOKENS, read=[f"pattern.{layer}"])[f"pattern.{layer}"]
        scores = model.run(TOKENS, read=[f"scores.{layer}"])[f"scores.{layer}"]
        hidden = (scores[0, 0] <= torch.finfo(scores.dtype).min / 2) & torch.ones(12, 12).tril().bool()
        outside = torch.ones(12, 12).tril(-described.window).bool() if described.window else torch.zeros(12, 12).bool()
        assert torch.equal(hidden, outside)
        assert pattern.shape[1] == described.n_heads
        assert bool(pattern.sum(-1).min() < 1 - 1e-4) == described.sinks


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"scale": 0.5}),
        ("llama", {"rope": None}),
        ("gemma2", {"softcap": None}),
        ("bloom", {"alibi": None}),
        ("opt", {"q_scale": 1.0}),
        ("qwen3", {"qk_norm": None}),
    ],
)
def test_a_wrong_rule_is_noticed(name, change, monkeypatch):
    model = Model(build(name), self_test=False)
    wrong = dataclasses.replace(attention_geometry(model, 0), **change)
    monkeypatch.setattr(geometry, "attention_geometry", lambda *_: wrong)
    with pytest.raises(ClearheadError, match="scores of layer 0 rebuilt from weights differ"):
        verify_scores(model, 0)


def test_a_wrong_plane_layout_is_noticed(monkeypatch):
    model = Model(build("cohere"), self_test=False)
    right = attention_geometry(model, 0)
    assert right.rope is not None and right.rope.interleaved
    wrong = dataclasses.replace(right, rope=dataclasses.replace(right.rope, interleaved=False))
    monkeypatch.setattr(geometry, "attention_geometry", lambda *_: wrong)
    with pytest.raises(ClearheadError, match="rebuilt from weights differ"):
        verify_scores(model, 0)


def test_values_of_known_layers():
    gemma4 = Model(build("gemma4_text"), self_test=False)
    sliding, full = attention_geometry(gemma4, 0), attention_geometry(gemma4, 1)
    assert (sliding.d_head, sliding.window, full.d_head, full.window) == (16, 4, 24, None)
    assert sliding.v_norm is not None and sliding.scale == 1.0
    olmo2 = attention_geometry(Model(build("olmo2"), self_test=False), 0)
    assert olmo2.qk_norm is not None and olmo2.qk_norm.whole
    bigcode = attention_geometry(Model(build("gpt_bigcode"), self_test=False), 0)
    assert (bigcode.n_heads, bigcode.n_kv_heads) == (4, 1)
    assert attention_geometry(Model(build("gpt_oss"), self_test=False), 0).sinks


def test_falcon_with_alibi_has_weights_but_no_single_score():
    model = Model(build("falcon_alibi"), self_test=False)
    with pytest.raises(ClearheadError, match="once on its sdpa path and twice on its eager path"):
        attention_geometry(model, 0)


def test_positions_may_be_given_per_row():
    model = Model(build("llama"), self_test=False)
    described, weights = attention_geometry(model, 0), attention_weights(model, 0)
    mask = torch.ones_like(TOKENS)
    mask[0, :5] = 0
    run = model.run(TOKENS, read=["q_pre.0", "k_pre.0", "q.0", "k.0"], attention_mask=mask)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    q, k = form_queries_keys(described, weights, run["q_pre.0"], run["k_pre.0"], positions)
    assert close(q, run["q.0"], 1e-6) and close(k, run["k.0"], 1e-6)


def test_smollm2_scores(smollm2):
    described = smollm2.geometry(12)
    assert (described.n_heads, described.n_kv_heads, described.d_head) == (9, 3, 64)
    assert verify_scores(smollm2, 12, n_tokens=64) < 1e-5
