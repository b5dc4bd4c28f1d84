"""Pretraining: repeated sequences by their definition, exact resume also after a kill, kept models, named errors."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from clearhead.config import Pretrain
from clearhead.data.repeats import repeated_sequences
from clearhead.dictionaries.dictionary import load_tensors
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.model.access import Model
from clearhead.training import pretrain as pretrain_module
from clearhead.training.checkpoint import list_checkpoints
from clearhead.training.language_model import LanguageModelling, TextAndRepeats, Watch
from clearhead.training.optim import adam
from clearhead.training.pretrain import build_model, model_of_size, open_tokenizer, pretrain
from clearhead.training.repeats import next_token_losses

ALPHABET = torch.arange(3, 50)
WORKER = """
import json, sys
from pathlib import Path
import torch
from clearhead.configfile import from_dict
from clearhead.training.pretrain import pretrain
torch.set_num_threads(1)
pretrain(from_dict(json.loads(Path(sys.argv[1]).read_text())))
"""


@pytest.fixture
def config(books, tmp_path) -> Pretrain:
    """Twelve steps of a model of one layer."""
    torch.set_num_threads(1)
    return Pretrain(
        layers=1,
        width=16,
        heads=2,
        vocabulary=280,
        context=16,
        text=str(books),
        tokens=12 * 64,
        batch_tokens=64,
        checkpoints="0,5,12",
        device="cpu",
        out=tmp_path / "run",
    )


def weights(folder) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_every_sequence_of_a_training_is_drawn_once_and_text_takes_turns():
    text = torch.arange(5)[:, None].expand(5, 16)
    source = TextAndRepeats(text, 16, total=40, repeats=10, seed=0, alphabet=torch.arange(100, 200))
    batches = [
        source.batch(torch.randperm(40, generator=torch.Generator().manual_seed(0))[part::4]) for part in range(4)
    ]
    tokens = torch.cat(batches)
    repeated = tokens[:, 0] >= 100
    assert int(repeated.sum()) == 10
    assert torch.bincount(tokens[~repeated][:, 0]).tolist() == [6] * 5
    assert torch.equal(
        tokens[repeated].unique(dim=0),
        repeated_sequences(0, torch.arange(10), 16, torch.arange(100, 200)).unique(dim=0),
    )


def test_the_loss_is_the_mean_log_probability_of_the_next_token(config):
    model = build_model(config, open_tokenizer(config)).double()
    tokens = torch.randint(280, (3, 16), generator=torch.Generator().manual_seed(0))
    loss, _ = LanguageModelling(model).loss(model, tokens, pretrain_module.schedule(config), 0)
    loss, logits = loss.detach(), model(input_ids=tokens).logits.detach()
    by_hand = [
        float(torch.logsumexp(logits[b, i], 0) - logits[b, i, tokens[b, i + 1]]) for b in range(3) for i in range(15)
    ]
    assert float(loss) == pytest.approx(sum(by_hand) / 45, rel=1e-12)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_finished_run_holds_models_that_load_and_have_learned(config, architecture):
    config = dataclasses.replace(config, architecture=architecture, tokens=60 * 64, checkpoints="0,5,60", lr=0.01)
    summary = pretrain(config)
    assert summary["held_out_ce"] < 4.0 < math.log(280) - 1  # about thirty words: less than a character's worth is left
    assert summary["snapshots"] == [0, 5, 60] and summary["tokens"] == 3840
    assert {path.name for path in (config.out / "snapshots").iterdir()} == {f"step-{s:08d}" for s in (0, 5, 60)}
    assert weights(config.out / "snapshots" / "step-00000060") == weights(config.out / "model")
    first = Model.load(str(config.out / "snapshots" / "step-00000000"))
    fresh = build_model(config, open_tokenizer(config))
    assert all(torch.equal(a, b) for a, b in zip(first.hf.parameters(), fresh.parameters(), strict=True))
    ids = first.tokenizer("the owls lived").input_ids
    assert first.tokenizer.decode(ids) == "the owls lived" and ids == open_tokenizer(config)("the owls lived").input_ids
    lines = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 5, 20, 40, 60]
    assert lines[0]["held_out_ce"] == pytest.approx(math.log(280), abs=0.1)
    assert lines[-1]["held_out_ce"] == summary["held_out_ce"]
    assert pretrain(config) | {"peak_memory_bytes": 0} == summary | {"peak_memory_bytes": 0}


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_mlps_are_as_narrow_as_asked(config, architecture):
    with torch.device("meta"):
        model = model_of_size(dataclasses.replace(config, architecture=architecture, mlp_width=1), 280)
    shapes = [tuple(weight.shape) for name, weight in model.named_parameters() if ".mlp." in name and weight.dim() == 2]
    assert shapes and all(sorted(shape) == [1, 16] for shape in shapes)


def test_the_seed_decides_weights_and_leaves_the_random_state(config):
    tokenizer = open_tokenizer(config)
    state = torch.get_rng_state()
    zero, again = (build_model(config, tokenizer).state_dict() for _ in range(2))
    one = build_model(dataclasses.replace(config, seed=1), tokenizer).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    name = "transformer.wte.weight"
    assert torch.equal(zero[name], again[name]) and not torch.equal(zero[name], one[name])


def test_half_plus_resumed_half_equals_the_whole_bitwise(config, tmp_path, monkeypatch):
    whole = dataclasses.replace(config, out=tmp_path / "whole")
    pretrain(whole)

    class Stopping(Watch):
        def __call__(self, done):
            if done == 6:
                os.kill(os.getpid(), signal.SIGINT)
            return super().__call__(done)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="saved after step 6 of 12"):
        patch.setattr(pretrain_module, "Watch", Stopping)
        pretrain(config)
    # a tied weight is one weight: saved and restored once
    assert "lm_head.weight" not in load_tensors(list_checkpoints(config.out)[-1] / "module.safetensors")
    assert not (config.out / "model").exists()
    pretrain(config)
    assert weights(config.out / "model") == weights(tmp_path / "whole" / "model")
    for name in ("step-00000000", "step-00000005", "step-00000012"):
        folders = (config.out / "snapshots" / name, tmp_path / "whole" / "snapshots" / name)
        assert len({weights(folder) for folder in folders}) == 1
    steps = [json.loads(line)["step"] for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 5, 12]


def test_a_killed_run_resumed_equals_an_uninterrupted_one_bitwise(config, tmp_path):
    config = dataclasses.replace(config, tokens=120 * 64, checkpoints="0,110")
    pretrain(dataclasses.replace(config, out=tmp_path / "whole"))
    killed = dataclasses.replace(config, out=tmp_path / "killed")
    script, settings = tmp_path / "worker.py", tmp_path / "config-of-worker.json"
    script.write_text(WORKER)
    settings.write_text(json.dumps(killed.to_dict()))
    process = subprocess.Popen([sys.executable, str(script), str(settings)], env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not list_checkpoints(tmp_path / "killed"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "model").exists()
    pretrain(killed)
    assert weights(tmp_path / "killed" / "model") == weights(tmp_path / "whole" / "model")
    parts = [path for path in (tmp_path / "killed").rglob(".*") if path.name != ".lock"]
    assert not parts


def test_the_finished_model_can_be_stored_in_half_precision_and_the_kept_ones_stay_whole(config):
    pretrain(dataclasses.replace(config, store_dtype="float16"))
    half = load_tensors(config.out / "model" / "model.safetensors")
    kept = load_tensors(config.out / "snapshots" / "step-00000012" / "model.safetensors")
    assert half.keys() == kept.keys()
    for name, tensor in kept.items():
        assert tensor.dtype == torch.float32 and torch.equal(half[name], tensor.half())


def test_weight_decay_shrinks_matrices_only_and_none_is_adam():
    def trained(optimizer_of, steps=5):
        torch.manual_seed(0)
        module = nn.Linear(4, 3)
        optimizer = optimizer_of(list(module.parameters()))
        for step in range(steps):
            module(torch.full((2, 4), float(step + 1))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return module

    plain = trained(lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99), fused=True))
    ours = trained(lambda p: adam([(p, 1.0)], 0.1, (0.9, 0.99)))
    assert torch.equal(plain.weight, ours.weight) and torch.equal(plain.bias, ours.bias)
    start = trained(lambda p: adam([(p, 1.0)], 0.1, (0.9, 0.99)), steps=0)
    once = trained(lambda p: adam([(p, 1.0)], 0.1, (0.9, 0.99)), steps=1)
    decayed = trained(lambda p: adam([(p, 1.0)], 0.1, (0.9, 0.99), weight_decay=0.5), steps=1)
    assert torch.equal(decayed.bias, once.bias)
    assert torch.allclose(decayed.weight, once.weight - 0.1 * 0.5 * start.weight, atol=1e-7)


def test_an_existing_tokenizer_gives_the_vocabulary(config):
    config = dataclasses.replace(config, vocabulary=None, tokenizer="clearhead-tiny", tokens=64, checkpoints="0")
    assert pretrain(config)["vocabulary"] == 1024
    text = "the quiet river"
    own, given = (Model.load(name).tokenizer for name in (str(config.out / "model"), "clearhead-tiny"))
    assert own(text).input_ids == given(text).input_ids


def test_every_process_measures_alike_and_one_saves(config, tmp_path):
    tokenizer = open_tokenizer(config)
    model = build_model(config, tokenizer)
    held_out = torch.randint(280, (4, 16), generator=torch.Generator().manual_seed(0))
    measured = {"held_out": held_out, "alphabet": ALPHABET, "keep": [3], "steps": 12}
    first, second = (
        Watch(model, tokenizer, tmp_path / name, **measured, save=name == "first") for name in ("first", "second")
    )
    assert first(3) == second(3) and first(4) == second(4) == {} and first(12) == second(12)
    assert first(3)["held_out_ce"] == pytest.approx(float(next_token_losses(model, held_out).mean().detach()))
    assert (tmp_path / "first" / "snapshots" / "step-00000003").is_dir() and not (tmp_path / "second").exists()


def test_a_loss_that_is_no_number_is_not_saved(config, monkeypatch):
    class Broken(Watch):
        def measure(self):
            return super().measure() | {"held_out_ce": float("nan")}

    monkeypatch.setattr(pretrain_module, "Watch", Broken)
    with pytest.raises(NonFiniteError, match="held_out_ce is nan after step 0; lower --lr"):
        pretrain(config)
    assert not (config.out / "snapshots").exists()


def test_what_cannot_be_trained_is_refused_by_name(config, tmp_path):
    short = tmp_path / "short"
    short.mkdir()
    for name in "ab":
        (short / f"{name}.txt").write_text("The owls lived in the old mill. " * 12)
    with pytest.raises(ClearheadError, match="too short or too uniform for 280 tokens.*lower --vocabulary"):
        pretrain(dataclasses.replace(config, text=str(short)))
    with pytest.raises(ClearheadError, match="blocks of 16 tokens and a batch takes 256; lower --batch-tokens"):
        pretrain(dataclasses.replace(config, text=str(short), vocabulary=260, batch_tokens=4096, checkpoints="0"))
    with pytest.raises(ClearheadError, match="--vocabulary 200 is too small.*need 257"):
        pretrain(dataclasses.replace(config, vocabulary=200))
    with pytest.raises(ClearheadError, match="--tokenizer .*nowhere: no tokenizer could be loaded"):
        pretrain(dataclasses.replace(config, vocabulary=None, tokenizer=str(tmp_path / "nowhere")))


def test_other_settings_in_the_same_directory_are_refused(config):
    pretrain(config)
    with pytest.raises(ClearheadError, match="width: 16 -> 32"):
        pretrain(dataclasses.replace(config, width=32))
    with pytest.raises(ClearheadError, match="already holds a run"):
        pretrain(dataclasses.replace(config, resume=False))
