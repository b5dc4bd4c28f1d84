"""Models and tokens: loading, its errors, strings of tokens."""

import json

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from tokenizers import Tokenizer, decoders, models
from transformers import GPT2Config, GPT2Model, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError
from clearhead.model import Model, loading
from tests.model.conftest import tiny_model, tiny_tokens
from tests.model.tiny_configs import VOCABULARY, build


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<s>": 0, "\u2581the": 1, "<0xF0>": 2, "<0x41>": 3, "cat": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def test_token_strings_show_bytes_and_spaces():
    model = Model(build("llama"), byte_fallback_tokenizer())
    assert model.token_strings(torch.arange(5)) == ["<s>", " the", "\\xf0", "A", "cat"]
    assert model.token_strings([77]) == ["[unused 77]"]
    with pytest.raises(ClearheadError, match=f"token id {VOCABULARY} is outside the vocabulary of 0 to"):
        model.token_strings([VOCABULARY])
    with pytest.raises(ClearheadError, match="without a tokenizer"):
        tiny_model("llama").token_strings([1])
    with pytest.raises(ClearheadError, match="without a tokenizer"):
        tiny_model("llama").tokenize("the")


@pytest.fixture
def folder(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_local_folder_loads_without_a_tokenizer(folder):
    model = Model.load(str(folder), tokenizer=False, dtype="float64")
    assert model.dtype == torch.float64
    expected = Model(build("llama").double()).run(tiny_tokens()).logits
    assert torch.equal(model.run(tiny_tokens()).logits, expected)
    with pytest.raises(ClearheadError, match="load it with tokenizer=False"):
        Model.load(str(folder))


@pytest.mark.parametrize("hub_shows", [True, False])
def test_loading_shows_no_bar_and_leaves_the_settings_of_bars(folder, capfd, monkeypatch, hub_shows):
    monkeypatch.setattr(loading, "HF_HUB_DISABLE_PROGRESS_BARS", None)
    logging.enable_progress_bar()
    if not hub_shows:
        disable_progress_bars()
    try:
        Model.load(str(folder), tokenizer=False)
        assert "Loading weights" not in capfd.readouterr().err
        assert logging.is_progress_bar_enabled() and are_progress_bars_disabled() != hub_shows
        LlamaForCausalLM.from_pretrained(folder)
        assert "Loading weights" in capfd.readouterr().err
    finally:
        logging.enable_progress_bar()


def test_bundled_models_say_what_they_are():
    assert "made for clearhead's tests" in Model.load("clearhead-tiny", self_test=False).note


def test_unknown_models_options_and_devices(monkeypatch, folder, tmp_path):
    monkeypatch.setenv("CLEARHEAD_OFFLINE", "1")
    with pytest.raises(UnknownNameError, match="did you mean 'smollm2'.*network is switched off"):
        Model.load("smolm2")
    with pytest.raises(ClearheadError, match="does not hold a causal language model"):
        Model.load(str(tmp_path))
    with pytest.raises(UnknownNameError, match="did you mean 'float32'"):
        Model.load(str(folder), dtype="float23")
    with pytest.raises(ClearheadError, match="device 'cuda:77' cannot be used here"):
        Model.load(str(folder), device="cuda:77")


def test_truncated_weights_are_refused(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CorruptFileError, match="cannot be read"):
        Model.load(str(folder), tokenizer=False)
    (folder / "config.json").write_text("{")
    with pytest.raises(ClearheadError, match="does not hold a causal language model"):
        Model.load(str(folder), tokenizer=False)


def test_weights_of_another_shape_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(CorruptFileError, match="do not fit its config"):
        Model.load(str(folder), tokenizer=False)


def test_folder_without_all_weights_is_refused(tmp_path):
    GPT2Model(GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=97)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": 2, "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(CorruptFileError, match=r"lack 12 of its weights \(transformer.h.1.attn.c_attn.bias, ...\)"):
        Model.load(str(tmp_path), tokenizer=False)
