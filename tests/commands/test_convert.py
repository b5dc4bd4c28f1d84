"""Dictionaries go out to another library's layout and come back as runs that the other verbs take."""

import json
import shutil

import pytest
from transformers import GPT2Config

from clearhead import cli
from clearhead.config import Convert
from clearhead.dictionaries.load import load_dictionary_of
from clearhead.errors import ClearheadError
from tests.training.conftest import TINY, books  # noqa: F401  (a folder of text)

MEASURED = ["--tokens", "320", "--device", "cpu"]


@pytest.fixture(scope="module")
def trained(books, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("convert")
    shared = ["--model", str(TINY), "--context", "32", "--device", "cpu", "--tokens", "256", "--batch-tokens", "64"]
    shared += ["--k", "4", "--text", str(books)]
    lorsa = ["train", "lorsa", *shared, "--layer", "1", "--heads", "64", "--groups", "4", "--out", str(out / "lorsa")]
    features = ["train", "transcoder", *shared, "--layer", "all", "--features", "48", "--out", str(out / "transcoder")]
    assert cli.main(lorsa) == 0 and cli.main(features) == 0
    return out


def test_a_lorsa_that_went_out_comes_back_with_its_numbers(trained, books, tmp_path, capsys):  # noqa: F811
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    assert cli.main(["convert", str(trained / "lorsa"), "--to", "llamascopium", "--out", str(theirs)]) == 0
    back = ["convert", str(theirs), "--model", str(TINY), "--text", str(books), "--context", "32", "--out", str(run)]
    assert cli.main(back) == 0
    assert f"next: clearhead evaluate {run}" in capsys.readouterr().out
    found = []
    for place in (trained / "lorsa", run):
        assert cli.main(["evaluate", str(place), *MEASURED, "--downstream-tokens", "160"]) == 0
        found.append(json.loads((place / "evaluation.json").read_text()))
    for name in ("fvu", "l0", "ce_replaced"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4), name
    assert cli.main(["analyze", str(run), *MEASURED]) == 0
    assert cli.main(["trust", str(run), "--dry-run"]) == 0
    assert cli.main(["catalogue", str(run), "--dry-run"]) == 0
    assert cli.main(["fidelity", str(trained / "lorsa"), str(run)]) == 2
    assert "it comes from another library" in capsys.readouterr().err


def test_transcoders_of_all_layers_go_to_circuit_tracer_and_one_comes_back(trained, tmp_path, capsys):
    theirs = tmp_path / "theirs"
    assert cli.main(["convert", str(trained / "transcoder"), "--to", "circuit-tracer", "--out", str(theirs)]) == 0
    back = ["convert", str(theirs), "--model", str(TINY), "--context", "32", "--out", str(tmp_path / "run")]
    assert cli.main([*back, "--layer", "1", "--dry-run"]) == 0
    assert "mlp_in.1" in capsys.readouterr().out and not (tmp_path / "run").exists()
    assert cli.main([*back, "--layer", "1"]) == 0
    assert load_dictionary_of(tmp_path / "run").provenance["layer"] == 1
    assert cli.main([*back, "--layer", "0"]) == 2  # another run lies there
    assert "holds another run (layer: 1 -> 0)" in capsys.readouterr().err


def test_what_does_not_fit_is_refused(trained, tmp_path, capsys):
    theirs = tmp_path / "theirs"
    assert cli.main(["convert", str(trained / "lorsa"), "--to", "circuit-tracer", "--out", str(theirs)]) == 2
    assert "circuit-tracer takes these alone" in capsys.readouterr().err
    assert cli.main(["convert", str(trained / "transcoder"), "--to", "llamascopium"]) == 2
    assert "name one run" in capsys.readouterr().err
    assert cli.main(["convert", str(trained / "transcoder" / "0"), "--to", "llamascopium"]) == 2
    assert "only a Lorsa" in capsys.readouterr().err
    unfinished = tmp_path / "unfinished"
    shutil.copytree(trained / "lorsa", unfinished, ignore=shutil.ignore_patterns("lorsa"))
    assert cli.main(["convert", str(unfinished), "--to", "llamascopium"]) == 2
    assert "holds no finished dictionary" in capsys.readouterr().err
    for option in ([], ["--dry-run"]):  # a run that lies there is not replaced
        before = (unfinished / "config.json").read_text()
        out = ["--to", "llamascopium", "--out", str(unfinished), *option]
        assert cli.main(["convert", str(trained / "lorsa"), *out]) == 2
        assert "holds files already" in capsys.readouterr().err
        assert (unfinished / "config.json").read_text() == before
    assert cli.main(["convert", str(trained / "lorsa"), "--to", "llamascopium", "--out", str(theirs)]) == 0
    GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=8).save_pretrained(tmp_path / "narrow")
    back = ["convert", str(theirs), "--out", str(tmp_path / "run")]
    assert cli.main([*back, "--model", str(tmp_path / "narrow")]) == 2
    assert "narrow has 32; give the model it was trained on" in capsys.readouterr().err
    back += ["--model", str(TINY)]
    settings = theirs / "config.json"
    good = settings.read_text()
    for text, option, expected in (
        (good, ["--layer", "0"], "is of layer 1, not of 0"),
        (good.replace("blocks.1.", "blocks.2."), [], "is of layer 2, and"),
        (good.replace("blocks.1.hook_attn_out", "blocks.0.hook_attn_out"), [], "the layers [0, 1]"),
        (good, [], "type --context 128"),
        (good.replace("hook_point_in", "hook"), [], "KeyError: 'hook_point_in'"),
        (good.replace('"top_k": 4', '"top_k": "many"'), [], "are not what llamascopium writes"),
    ):
        settings.write_text(text)
        assert cli.main([*back, *option]) == 2
        assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(ClearheadError, match="name the model"):
        Convert(dictionary=theirs)
    with pytest.raises(ClearheadError, match="means nothing here"):
        Convert(dictionary=theirs, to="llamascopium", layer=3)
