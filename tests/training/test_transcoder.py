"""Training transcoders, SAEs and cross-layer transcoders: exact resume, stores, what the run leaves, bad input."""

import dataclasses
import json
import os
import signal

import pytest

from clearhead.config import TrainClt, TrainSae, TrainTranscoder
from clearhead.data.harvest import MLP, LiveActivations
from clearhead.data.store import write_store
from clearhead.data.text import token_blocks
from clearhead.dictionaries.load import KINDS, load_dictionary_of
from clearhead.dictionaries.transcoder import Transcoder
from clearhead.errors import ClearheadError
from clearhead.training import clt as clt_module
from clearhead.training import train_dictionary
from clearhead.training.checkpoint import list_checkpoints
from clearhead.training.clt import train_clt
from clearhead.training.evaluate import measure_fidelity
from clearhead.training.transcoder import train_sae, train_transcoder

TRAIN = {"transcoder": train_transcoder, "sae": train_sae, "clt": train_clt}


@pytest.fixture
def runs(short):
    """Twelve steps of 64 features of each kind."""
    shared = {
        field: getattr(short, field) for field in ("model", "text", "context", "tokens", "batch_tokens", "device")
    }
    shared |= {"features": 64, "k": 4, "dead_after_tokens": 128, "aux_k": 8, "checkpoint_every": 4, "out": short.out}
    return {
        "transcoder": TrainTranscoder(layer=1, **shared),
        "sae": TrainSae(layer=0, **shared),
        "clt": TrainClt(**shared),
    }


def stop_at(source, step: int):
    """The class of activations `source`, which sends Ctrl-C before it serves the batch of `step`."""

    class Stopping(source):
        served = -1  # the first batch is the sample that scales and initial weights come from

        def batch(self, block_indices):
            if Stopping.served == step:
                os.kill(os.getpid(), signal.SIGINT)
            Stopping.served += 1
            return super().batch(block_indices)

    return Stopping


@pytest.mark.parametrize("kind", TRAIN)
def test_half_plus_resumed_half_equals_the_whole_bitwise(kind, runs, tmp_path, monkeypatch):
    whole = dataclasses.replace(runs[kind], out=tmp_path / "whole")
    summary = TRAIN[kind](whole)
    module, name = (clt_module, "LayeredActivations") if kind == "clt" else (train_dictionary, "LiveActivations")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="saved after step 6 of 12"):
        patch.setattr(module, name, stop_at(getattr(module, name), 5))
        TRAIN[kind](runs[kind])
    assert list_checkpoints(runs[kind].out)[-1].name == "step-00000006"
    TRAIN[kind](runs[kind])
    weights = [(folder / kind / "model.safetensors").read_bytes() for folder in (runs[kind].out, tmp_path / "whole")]
    assert weights[0] == weights[1]
    assert summary["tokens"] == 768 and 0 < summary["final_batch_fvu"] < 1 and summary["features"] == 64


def test_what_a_run_leaves_names_where_it_belongs(runs):
    for kind, config in runs.items():
        TRAIN[kind](dataclasses.replace(config, out=config.out / kind))
        module = load_dictionary_of(config.out / kind)
        assert type(module) is KINDS[kind]
        assert module.provenance["model"] == config.model and module.provenance["tokens"] == 768
    sites = [load_dictionary_of(config.out / kind).provenance for kind, config in runs.items()]
    assert [(p["layer"], p["input_site"], p["output_site"]) for p in sites] == [
        (1, "mlp_in.1", "mlp_out.1"),
        (0, "resid_post.0", "resid_post.0"),
        (None, "mlp_in.*", "mlp_out.*"),
    ]


def test_folded_weights_predict_what_was_trained(runs, tiny):
    """The saved module works on unscaled activations: its FVU there is that of the last steps, not that of noise."""
    config = dataclasses.replace(runs["transcoder"], tokens=80 * 64, checkpoint_every=100, lr=5e-3)
    summary = train_transcoder(config)
    blocks = token_blocks(tiny, config.text, split="train", n_tokens=2_000, context=config.context)
    metrics, _ = measure_fidelity(load_dictionary_of(config.out), LiveActivations(tiny, blocks, 1, sites=MLP))
    assert metrics["fvu"] == pytest.approx(summary["final_batch_fvu"], rel=0.25)
    assert metrics["fvu"] < 0.6 and metrics["l0"] == pytest.approx(4, abs=0.05)


@pytest.mark.parametrize(
    "options",
    [{"skip": True}, {"activation": "batchtopk"}, {"activation": "jumprelu", "sparsity": 0.5}],
    ids=["skip", "batchtopk", "jumprelu"],
)
def test_every_form_of_a_transcoder_learns(options, runs):
    config = dataclasses.replace(runs["transcoder"], tokens=40 * 64, checkpoint_every=100, lr=5e-3, **options)
    train_transcoder(config)
    lines = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["batch_fvu"] < 0.9 and lines[-1]["l0"] > 0
    module = load_dictionary_of(config.out)
    assert isinstance(module, Transcoder) and (module.W_skip is not None) == config.skip
    assert module.W_skip is None or float(module.W_skip.detach().abs().max()) > 0


def test_a_store_of_the_mlp_gives_the_same_transcoder(runs, tiny, tmp_path):
    live, config = runs["transcoder"], runs["transcoder"]
    blocks = token_blocks(tiny, live.text, split="train", n_tokens=live.tokens, context=live.context, at_most=True)
    store = write_store(tmp_path / "store", LiveActivations(tiny, blocks, 1, sites=MLP)).path
    train_transcoder(live)
    train_transcoder(dataclasses.replace(config, out=tmp_path / "stored", store=store))
    names = ("transcoder", "model.safetensors")
    assert live.out.joinpath(*names).read_bytes() == (tmp_path / "stored").joinpath(*names).read_bytes()
    attention = write_store(tmp_path / "attention", LiveActivations(tiny, blocks, 1)).path
    with pytest.raises(ClearheadError, match=r"attn_in\.1.*not \['mlp_in\.1', 'mlp_out\.1'\]"):
        train_transcoder(dataclasses.replace(config, out=tmp_path / "wrong", store=attention))


def test_impossible_configurations_say_what_to_type():
    with pytest.raises(ClearheadError, match="nothing else makes jumprelu sparse; begin with --sparsity"):
        TrainTranscoder(activation="jumprelu")
    with pytest.raises(ClearheadError, match="topk is sparse by --k"):
        TrainSae(sparsity=1.0)
    with pytest.raises(ClearheadError, match="--k 32 is not possible: at most all 8"):
        TrainClt(features=8)
    with pytest.raises(ClearheadError, match="--layer means nothing here: a cross-layer transcoder spans all layers"):
        TrainClt(layer=1)
    with pytest.raises(ClearheadError, match="give one of resid_pre.*and --layer apart"):
        TrainSae(site="resid_post.3")
    with pytest.raises(ClearheadError, match="there is no layer 9"):
        TrainTranscoder(layer=9).resolved(n_layers=2, d_model=8)


def test_the_other_settings_of_a_run_are_refused(runs):
    train_transcoder(runs["transcoder"])
    with pytest.raises(ClearheadError, match="skip: False -> True"):
        train_transcoder(dataclasses.replace(runs["transcoder"], skip=True))


def test_an_sae_trains_from_a_store_of_attention_as_from_its_own_site(runs, tiny, books, tmp_path):
    blocks = token_blocks(tiny, str(books), split="train", n_tokens=768, context=32)
    store = write_store(tmp_path / "store", LiveActivations(tiny, blocks, 0)).path
    live = dataclasses.replace(runs["sae"], site="attn_out", out=tmp_path / "live")
    train_sae(live)
    train_sae(dataclasses.replace(live, store=store, out=tmp_path / "stored"))
    weights = [(tmp_path / name / "sae" / "model.safetensors").read_bytes() for name in ("live", "stored")]
    assert weights[0] == weights[1]
    with pytest.raises(ClearheadError, match="holds sites"):
        train_sae(dataclasses.replace(live, site="mlp_out", store=store, out=tmp_path / "other"))


def test_a_transcoder_of_attention_names_its_sites(runs, tmp_path):
    config = dataclasses.replace(runs["transcoder"], site="attention", out=None)
    assert config.directory().name.endswith("-1-attention-transcoder-f64-k4")
    train_transcoder(dataclasses.replace(config, out=tmp_path / "run"))
    provenance = load_dictionary_of(tmp_path / "run").provenance
    assert (provenance["input_site"], provenance["output_site"]) == ("attn_in.1", "attn_out.1")
