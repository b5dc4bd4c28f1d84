"""Norms: described exactly, folded exactly, down to the logits."""

import pytest
import torch
from torch import nn

from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.model.norms import final_norm, fold, logit_softcap, read_head_norm, read_norm, unembedding
from tests.model import tiny_configs
from tests.model.test_weights import TOKENS, close
from tests.model.tiny_configs import CONFIGS, HEADS, LLAMA, OFF_INTERFACE, build

VARIANTS = {
    "opt_narrow": CONFIGS["opt"] | {"model_type": "opt", "word_embed_proj_dim": 16},
    "gemma2_capped": HEADS | {"model_type": "gemma2", "sliding_window": 4, "final_logit_softcapping": 2.0},
    "granite_scaled": LLAMA | {"model_type": "granite", "logits_scaling": 8.0},
    "cohere_scaled": LLAMA | {"model_type": "cohere", "logit_scale": 0.0625},
    "mpt_logit_scale": OFF_INTERFACE["mpt"] | {"model_type": "mpt", "logit_scale": 0.5},
}


@pytest.mark.parametrize("name", [*CONFIGS, *OFF_INTERFACE, *VARIANTS])
def test_logits_from_the_folded_unembedding(name, monkeypatch):
    for variant, config in VARIANTS.items():
        monkeypatch.setitem(tiny_configs.CONFIGS, variant, config)
    model = Model(build(name), self_test=False)
    norm, (W_U, b_U), cap = final_norm(model), unembedding(model), logit_softcap(model)
    run = model.run(TOKENS, read=["resid_post.1", "logits"])
    residual = run["resid_post.1"]
    for read in (norm.normalise(residual), residual * norm.frozen_scale(residual)):
        logits = read @ W_U + b_U
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        assert close(logits, run.logits, 2e-5)
    plain = norm.plain()
    twice, shift = fold(plain, W_U, b_U)
    assert close(twice, W_U, 1e-6) and torch.equal(shift, b_U)


@pytest.mark.parametrize(
    ("name", "kind", "offset"),
    [("gpt2", "layer", False), ("llama", "rms", False), ("gemma", "rms", True), ("nemotron", "layer", True)],
)
def test_kind_and_gain_of_known_families(name, kind, offset):
    hf = build(name)
    norm = final_norm(Model(hf, self_test=False))
    module = hf.transformer.ln_f if name == "gpt2" else hf.model.norm
    assert norm.kind == kind and norm.gain is not None
    assert torch.equal(norm.gain, module.weight + 1 if offset else module.weight)
    x = torch.randn(3, 32)
    assert close(norm(x), module(x), 1e-6)


def test_a_norm_without_parameters():
    norm = final_norm(Model(build("olmo"), self_test=False))
    assert norm.gain is None and norm.bias is None and norm.kind == "layer"


def test_gradients_flow_through_the_fold_to_the_gain():
    hf = build("gemma")
    unembedding(Model(hf, self_test=False))[0].square().sum().backward()
    assert hf.model.norm.weight.grad.abs().min() > 0


def test_a_norm_of_another_kind_is_refused():
    class Largest(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return self.weight * x / x.abs().amax(-1, keepdim=True)

    with pytest.raises(ClearheadError, match="neither a LayerNorm nor an RMSNorm"):
        read_norm(Largest(), 8)


def test_a_wrong_epsilon_is_noticed():
    module = nn.LayerNorm(8, eps=1e-5)
    assert read_norm(module, 8).eps == 1e-5

    class Hidden(nn.LayerNorm):
        def forward(self, x):
            return nn.functional.layer_norm(x, (8,), self.weight, self.bias, 1e-3)

    with pytest.raises(ClearheadError, match="cannot be folded"):
        read_norm(Hidden(8, eps=1e-5), 8)


def test_norm_per_head_counts_its_heads():
    hf_like = nn.Module()
    hf_like.norms = nn.ModuleList([nn.LayerNorm(4, bias=False) for _ in range(3)])
    norm = read_head_norm(hf_like, 3, 4, after_rope=False)
    assert norm.gain is not None and norm.gain.shape == (3, 4)
    with pytest.raises(ClearheadError, match="3 norms for 2 heads"):
        read_head_norm(hf_like, 2, 4, after_rope=False)


def test_smollm2_logits(smollm2):
    W_U, b_U = unembedding(smollm2)
    run = smollm2.run(TOKENS, read=["resid_post.29", "logits"])
    assert close(final_norm(smollm2).normalise(run["resid_post.29"]) @ W_U + b_U, run.logits, 1e-5)


@pytest.mark.parametrize("name", ["qwen3", "lfm2", "olmo2", "gemma3_text"])
def test_norms_of_a_model_without_storage_are_read_by_their_class(name):
    with torch.device("meta"):
        empty = Model(build(name), name=name, self_test=False)
    layer = empty.attention_layers[0]
    asked, real = empty.geometry(layer), Model(build(name), name=name, self_test=False).geometry(layer)
    assert asked.qk_norm == real.qk_norm and asked.d_head == real.d_head
