"""`clearhead trace` at toy size: what it writes, what it prints, what it refuses."""

import dataclasses
import json

import pytest
import torch

from clearhead import cli
from clearhead.config import TracePrompt
from clearhead.configfile import from_file
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.errors import ClearheadError
from clearhead.units.bundle import load_graph

TEXT = "Once upon a time there was a little girl named Lily. She"
SMALL = ["--model", "clearhead-tiny", "--device", "cpu"]


@pytest.fixture(scope="module")
def transcoder(tmp_path_factory):
    """A transcoder of random features for layer 0."""
    provenance = {"model": "clearhead-tiny", "layer": 0, "input_site": "mlp_in.0", "output_site": "mlp_out.0"}
    module = Transcoder(TranscoderConfig(d_in=128, d_out=128, n_features=64, k=4), provenance)
    generator = torch.Generator().manual_seed(0)
    for weight in (module.W_enc, module.W_dec):
        torch.nn.init.normal_(weight, generator=generator)
    return module.save_pretrained(tmp_path_factory.mktemp("dictionaries") / "transcoder")


@pytest.fixture(scope="module")
def traced(transcoder, tmp_path_factory):
    out = tmp_path_factory.mktemp("trace") / "run"
    options = ["--dictionaries", str(transcoder), "--units", "12", "--tables", "1", "--out", str(out)]
    assert cli.main(["trace", TEXT, *SMALL, *options]) == 0
    return out


def test_a_prompt_leaves_a_graph_in_two_formats_and_its_numbers(traced, transcoder):
    summary = json.loads((traced / "summary.json").read_text())
    graph = load_graph(traced / "graph")
    assert graph.provenance.prompt == TEXT and graph.provenance.model == "clearhead-tiny"
    assert summary["units_explained"] == 12 and summary["graph_units"] == len(graph.units)
    assert summary["replacement_score"] == pytest.approx(graph.scores["replacement"])
    parts = [summary[f"influence_{where}"] for where in ("in_tokens", "in_errors", "in_biases", "unexplained")]
    assert sum(parts) == pytest.approx(1) and summary["largest_error_of_a_row"] < 1e-5
    assert list(graph.tokens) == summary["tokens"] and len(graph.loadings) and len(graph.attention) == 1
    listed = json.loads((traced / "neuronpedia" / "graph-metadata.json").read_text())["graphs"]
    exported = json.loads((traced / "neuronpedia" / f"{listed[0]['slug']}.json").read_text())
    assert len(exported["nodes"]) == len(graph.units) and len(exported["links"]) == len(graph)
    assert from_file(traced) == TracePrompt(
        prompt=TEXT,
        model="clearhead-tiny",
        device="cpu",
        dictionaries=(str(transcoder),),
        units=12,
        tables=1,
        out=traced,
    )


def test_what_is_printed_names_tokens_heads_and_pairs(tmp_path, capsys):
    options = ["--answer", " was", "--tables", "1", "--edge", "@10", "logit.310@17", "--out", str(tmp_path / "run")]
    assert cli.main(["trace", TEXT, *SMALL, *options]) == 0
    printed = capsys.readouterr().out
    assert "' was'" in printed and "11:' She'" in printed or "' She'" in printed
    for words in (
        "replacement score",
        "edges that carry most",
        "heads by the influence they carry",
        "edge asked for, and its heads",
        "above the mean key",
        "CPU seconds",
    ):
        assert words in printed
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["targets"]) == 1 and summary["dictionaries"] == []
    edge = summary["edge"]
    assert edge["past_all_heads"] == 0 and sum(edge["heads"].values()) == pytest.approx(edge["weight"], abs=1e-4)
    assert 1 <= edge["heads_80"] <= edge["heads_90"] <= len(edge["heads"])
    assert load_graph(tmp_path / "run" / "graph").labels == {"logit.310@17": " was"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--answer", " wasabi peas"], "tokens of clearhead-tiny"),
        (["--unit", "feature.1.3@4"], "not active in this prompt"),
        (["--unit", "feature.1"], "is named by"),
        (["--dictionaries", "nowhere"], "nowhere"),
        (["--edge", "@99", "logit.310@17"], "none of the prompt's tokens"),
        (["--edge", "@1", "embedding.3@0"], "reads nothing"),
        (["--edge", "@1"], "give two"),
    ],
)
def test_bad_targets_are_one_message(options, says, tmp_path, capsys):
    assert cli.main(["trace", TEXT, *SMALL, *options, "--out", str(tmp_path / "run")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_prompt_longer_than_the_context_and_a_dictionary_of_another_model_are_refused(transcoder, tmp_path, capsys):
    assert cli.main(["trace", TEXT * 30, *SMALL, "--out", str(tmp_path / "a")]) == 2
    assert "clearhead-tiny reads 128: give a shorter one" in capsys.readouterr().err
    config = transcoder / "config.json"
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes((transcoder / "model.safetensors").read_bytes())
    (other / "config.json").write_text(config.read_text().replace('"clearhead-tiny"', '"another"'))
    assert cli.main(["trace", TEXT, *SMALL, "--dictionaries", str(other), "--out", str(tmp_path / "b")]) == 2
    assert "trained on another" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"prompt": "  "}, "give a text"),
        ({"wrong": " a"}, "give --answer too"),
        ({"unit": "feature.0.1@2", "answer": " a"}, "exclude each other"),
        ({"units": 0}, "above 0"),
        ({"unit_share": 1.5}, "a share"),
        ({"tables": -1}, "0 or a positive"),
    ],
)
def test_options_that_mean_nothing_are_refused(changed, says):
    with pytest.raises(ClearheadError, match=says):
        dataclasses.replace(TracePrompt(prompt=TEXT), **changed)


def test_a_dry_run_says_what_will_be_traced_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trace", TEXT, *SMALL, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "graph-clearhead-tiny-once-upon-a-time" in printed and "1,000" in printed
    assert list(tmp_path.iterdir()) == []
