"""Edge gates in real model classes: dense when open, the same on both paths, counted, saved, restored, generated."""

import copy
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.model import Model
from clearhead.model.gates import CHILD, find_gates, first_visible, install
from tests.model.conftest import tiny_tokens
from tests.model.tiny_configs import build

EAGER = {
    "rtol": 1e-3,
    "atol": 1e-4,
}  # these models are float64, but their own eager attention takes its softmax in float32
GATEABLE = ["llama", "gpt2", "qwen3", "mistral", "gemma3_text"]


def gated(name: str, bias: float = 0.0, **options) -> Model:
    model = Model(build(name).double(), self_test=False)
    install(model, bias=bias, **options)
    return model


@pytest.mark.parametrize("name", GATEABLE)
def test_open_gates_leave_the_model_as_it_was(name):
    hf = build(name).double()
    tokens = tiny_tokens()
    dense = Model(hf).run(tokens).logits
    model = Model(hf)
    gates = install(model, bias=-3.0)
    with gates.opened() as tally:
        torch.testing.assert_close(model.run(tokens).logits, dense, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(model.run(tokens, path="eager").logits, dense, **EAGER)
    assert sorted(tally) == model.attention_layers
    for layer in tally.values():
        assert torch.equal(layer.opened.long(), layer.visible[:, None].expand_as(layer.opened))
    gates.set_bias(torch.full((len(gates.layers), model.n_heads), 50.0))
    torch.testing.assert_close(model.run(tokens).logits, dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", GATEABLE)
@pytest.mark.parametrize("sink", [None, 0.3])
def test_both_paths_close_the_same_edges(name, sink):
    model = gated(name, sink=sink)
    gates, tokens = find_gates(model.hf), tiny_tokens()
    read = [f"{site}.{layer}" for layer in model.attention_layers for site in ("pattern", "scores", "v", "z")]
    for switch in (gates.hard, lambda: gates.sampled(9, batch=3), gates.opened):
        with switch() as tally:
            fused = model.run(tokens).logits
        with switch():
            run = model.run(tokens, read=[*read, "logits"])
        torch.testing.assert_close(run.logits, fused, **EAGER)
        for layer in model.attention_layers:
            pattern, v = run[f"pattern.{layer}"], run[f"v.{layer}"]
            mixed = pattern.to(v.dtype) @ v.repeat_interleave(pattern.shape[1] // v.shape[1], dim=1)
            torch.testing.assert_close(mixed.transpose(1, 2), run[f"z.{layer}"], rtol=1e-5, atol=1e-6)
            assert torch.equal((pattern > 0).sum(-1).int(), tally[layer].opened)
    with gates.hard():
        scores, pattern = run["scores.0"], model.run(tokens, read=["pattern.0"])["pattern.0"]
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    assert torch.equal((pattern > 0)[..., seen], (scores > 0)[..., seen])
    assert 0 < (pattern > 0).sum() < seen.sum() * pattern.shape[0] * pattern.shape[1]


def test_outside_of_a_switch_gates_are_hard_and_a_switch_leaves_no_trace():
    model = gated("llama")
    gates, tokens = find_gates(model.hf), tiny_tokens()
    plain = model.hf(tokens).logits
    with gates.hard():
        assert torch.equal(plain, model.run(tokens).logits)
    with pytest.raises(RuntimeError, match="on purpose"), gates.sampled(1):
        assert not torch.equal(model.run(tokens).logits, plain)
        raise RuntimeError("on purpose")
    assert gates.control.mode == "hard" and gates.control.tally is None
    assert torch.equal(model.run(tokens).logits, plain)
    twin = copy.deepcopy(model.hf)
    with find_gates(twin).opened():
        assert not torch.equal(twin(tokens).logits, plain)
        assert torch.equal(model.hf(tokens).logits, plain)


def test_gates_get_gradients_of_loss_and_price():
    model = gated("qwen3", sink=0.0)
    gates, tokens = find_gates(model.hf), tiny_tokens()
    with gates.sampled(2) as tally:
        logits = model.hf(tokens).logits
    (logits.square().mean() + sum(layer.expected.sum() for layer in tally.values())).backward()
    for parameter in gates.parameters():
        assert parameter.grad is not None and bool((parameter.grad != 0).all())


def test_random_edges_have_their_density_and_know_nothing_of_the_text():
    model = gated("llama")
    gates, tokens = find_gates(model.hf), torch.randint(2, 90, (3, 60))
    rates = {layer: torch.linspace(0.1, 0.9, model.n_heads) for layer in gates.layers}
    with gates.random(rates, seed=4):
        run = model.run(tokens, read=["pattern.1", "logits"])
        fused = model.run(tokens).logits
    torch.testing.assert_close(run.logits, fused, **EAGER)
    opened = run["pattern.1"] > 0
    assert torch.equal(opened[0], opened[1]) and torch.equal(opened[0], opened[2])
    share = opened[0].sum((-1, -2)) / (60 * 61 / 2)
    assert (share - rates[1]).abs().max() < 0.06


@pytest.mark.parametrize("sink", [None, 0.4])
def test_a_saved_model_comes_back_with_its_gates(tmp_path, sink):
    hf = build("llama")
    model = Model(hf, self_test=False)
    gates = install(model, sink=sink, settings={"base": "somewhere"})
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in gates.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    tokens = tiny_tokens()
    expected = model.run(tokens).logits
    hf.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = Model.load(str(tmp_path), tokenizer=False)
    assert loaded.gates is not None and loaded.gates.has_sink == (sink is not None)
    assert torch.equal(loaded.gates.bias(), gates.bias())
    assert torch.equal(loaded.run(tokens).logits, expected)
    assert torch.equal(loaded.hf(tokens).logits, expected)
    assert loaded.hf.config.clearhead_gates["base"] == "somewhere"


def test_transformers_alone_says_that_it_leaves_the_gates_out(tmp_path, caplog, monkeypatch):
    model = gated("llama")
    model.hf.save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert CHILD in caplog.text and "UNEXPECTED" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        Model.load(str(tmp_path), tokenizer=False)
    assert CHILD not in caplog.text


def test_a_checkpoint_whose_gates_are_gone_is_refused(tmp_path):
    hf = build("llama")
    hf.config.clearhead_gates = {"sink": False}
    hf.save_pretrained(tmp_path)
    with pytest.raises(CorruptFileError, match="says that it has edge gates, and .*clearhead_gate.bias is missing"):
        Model.load(str(tmp_path), tokenizer=False)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("sink", [None, 0.3])
def test_generation_with_a_cache_is_generation_without(name, sink):
    model = gated(name, sink=sink)
    tokens = tiny_tokens()[:, :5]
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with_cache = model.hf.generate(tokens, use_cache=True, **how)
    without = model.hf.generate(tokens, use_cache=False, **how)
    assert torch.equal(with_cache, without)
    step = tokens
    for _ in range(12):
        step = torch.cat([step, model.run(step).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(step, with_cache)


def test_padding_on_either_side_changes_nothing_of_a_text():
    model = Model(build("llama"))  # float32: transformers' own eager attention knows no other for masked rows
    install(model, bias=0.0)
    row = tiny_tokens()[:1, :6]
    alone = model.run(row).logits[0]
    pad = torch.zeros(1, 3, dtype=torch.int64)
    mask = torch.tensor([[1] * 6 + [0] * 3])
    for path in ("sdpa", "eager"):
        right = model.run(torch.cat([row, pad], 1), attention_mask=mask, path=path).logits[0, :6]
        left = model.run(torch.cat([pad, row], 1), attention_mask=mask.flip(1), path=path).logits[0, 3:]
        torch.testing.assert_close(right, alone, **EAGER)
        torch.testing.assert_close(left, alone, **EAGER)


def test_masks_become_intervals():
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    documents = causal & torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool()
    window = causal.triu(-1)
    padded = causal & torch.tensor([False, True, True, True])
    masks = torch.stack([causal, documents, window, padded])[:, None]
    expected = torch.tensor([[0, 0, 0, 0], [0, 0, 2, 2], [0, 0, 1, 2], [1, 1, 1, 1]])
    assert torch.equal(first_visible(masks, 4, 4), expected)
    additive = torch.zeros(masks.shape).masked_fill(~masks, torch.finfo(torch.float32).min)
    assert torch.equal(first_visible(additive, 4, 4), expected)
    assert torch.equal(first_visible(masks[:, :, 3:], 1, 4), expected[:, 3:])
    assert first_visible(None, 4, 4) is None
    gap = causal & ~torch.eye(4, dtype=torch.bool).roll(1, 0)
    for bad in (torch.ones(4, 4, dtype=torch.bool), gap, causal.tril(-1)):
        with pytest.raises(ClearheadError, match="gaps or shows later keys"):
            first_visible(bad[None, None], 4, 4)
    with pytest.raises(ClearheadError, match="one attention mask for all heads"):
        first_visible(causal.expand(1, 2, 4, 4), 4, 4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", "soft-cap"),
        ("gpt_oss", "attention sinks"),
        ("bloom", "outside of transformers' attention interface|ALiBi"),
    ],
)
def test_attention_that_cannot_be_gated_is_refused(name, reason):
    with pytest.raises(ClearheadError, match=reason):
        install(Model(build(name), self_test=False))


def test_gates_are_installed_once_and_never_with_dropout():
    model = gated("gpt2")
    with pytest.raises(ClearheadError, match="has edge gates already"):
        install(model)
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0.5)
    dropping = Model(GPT2LMHeadModel(config), self_test=False)
    install(dropping)
    dropping.hf.train()
    with pytest.raises(ClearheadError, match="dropout"):
        dropping.hf(torch.ones(1, 4, dtype=torch.int64))


def test_caches_and_modes_that_decoding_does_not_know_are_refused():
    model = gated("llama")
    tokens = tiny_tokens()[:1, :5]
    how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with pytest.raises(ClearheadError, match="static"):
        model.hf.generate(tokens, cache_implementation="static", **how)
    with find_gates(model.hf).opened(), pytest.raises(ClearheadError, match="whole sequences"):
        model.hf.generate(tokens, **how)
