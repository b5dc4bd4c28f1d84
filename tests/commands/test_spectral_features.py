"""`clearhead spectral features` on the small model: what it prints, what it leaves, and what it refuses."""

import json

import pytest
import torch
from safetensors.torch import load_file

from clearhead import cli
from clearhead.config import SpectralFeatures
from clearhead.dictionaries.init import from_attention
from clearhead.errors import ClearheadError
from clearhead.model.access import Model

HEAD = ["--model", "clearhead-tiny", "--layer", "1", "--head", "2", "--device", "cpu"]
SMALL = [*HEAD, "--context", "32", "--tokens", "2048", "--modes", "3", "--neighbours", "4"]


@pytest.fixture(scope="module")
def model():
    return Model.load("clearhead-tiny", self_test=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, word in (("a", "cat"), ("b", "dog"), ("c", "owl")):
        lines = [f"The {word} sat on mat {i} and saw the {word} of day {i * i}." for i in range(200)]
        (folder / f"{name}.txt").write_text("\n".join(lines))
    return str(folder)


@pytest.fixture(scope="module")
def dictionary(model, tmp_path_factory):
    """The exact copy of a layer, as a dictionary of that layer."""
    lorsa = from_attention(model.weights(1), model.geometry(1))
    lorsa.provenance = {"model": "clearhead-tiny", "layer": 1}
    return str(lorsa.save_pretrained(tmp_path_factory.mktemp("lorsa")))


@pytest.fixture(scope="module")
def run(text, dictionary, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    assert (
        cli.main(
            ["spectral", "features", *SMALL, "--text", text, "--ica", "--dictionary", dictionary, "--out", str(out)]
        )
        == 0
    )
    return out


def test_the_run_directory_holds_every_feature_with_its_numbers(run):
    rows = json.loads((run / "features.json").read_text())
    assert [(row["kind"], row["number"], row["side"]) for row in rows] == [
        (kind, number, side) for kind in ("mode", "pair") for number in range(3) for side in ("query", "key")
    ]
    for row in rows:
        assert -1 <= row["stability"] <= 1 and 0 <= row["unused"] <= 1 and 0 <= row["cone_component"] <= 1 + 1e-9
        for what in ("embedding", "unembedding", "elements"):
            sizes = [abs(item["cos"]) for item in row[what]]
            assert len(sizes) == 4 and sizes == sorted(sizes, reverse=True)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["positions"]["used"] > 1500 and summary["model_note"] and summary["rank"] == 32
    assert summary["interference"]["features"] == 128 and 0 <= summary["pairs_concentration"] <= 1
    assert json.loads((run / "config.json").read_text())["layer"] == 1


def test_directions_are_those_of_the_table(run, model):
    tensors = load_file(run / "features.safetensors")
    rows = json.loads((run / "features.json").read_text())
    assert tensors["mode.query.features"].shape == (128, 3)
    strengths = [row["strength"] for row in rows if row["kind"] == "mode" and row["side"] == "key"]
    assert tensors["mode.strength"].tolist() == pytest.approx(strengths)
    nearest = rows[1]["embedding"][0]
    weight = model.places.embedding.get_parameter("weight").detach().double()
    embeddings = weight - weight.mean(1, keepdim=True)
    row = embeddings[nearest["id"]] - embeddings.mean(0)
    cosine = torch.nn.functional.cosine_similarity(row, tensors["mode.key.features"][:, 0], dim=0)
    assert nearest["cos"] == pytest.approx(float(cosine), abs=1e-5)
    assert model.token_strings([nearest["id"]]) == [nearest["token"]]


def test_the_table_is_printed_and_a_rerun_gives_the_same(run, tmp_path, capsys):
    assert cli.main(["spectral", "features", "--from", str(run), "--out", str(tmp_path / "again")]) == 0
    shown = capsys.readouterr().out
    assert "head 1.2 of clearhead-tiny: 3 of 32 modes" in shown
    assert shown.count(" query ") == shown.count(" key ") == 6 and "on these pairs" in shown
    assert "few positions" in shown and f"features: {tmp_path / 'again'}" in shown
    assert (tmp_path / "again" / "features.json").read_text() == (run / "features.json").read_text()


def test_other_settings_in_the_same_directory_are_refused(run, capsys):
    other = ["--modes", "2", "--batch-blocks", "3", "--out", str(run)]
    assert cli.main(["spectral", "features", "--from", str(run), *other]) == 2
    error = capsys.readouterr().err
    assert "(modes: 3 -> 2)" in error and "choose another directory with --out" in error


def test_outside_the_cone_other_tokens_are_near(run, tmp_path):
    assert cli.main(["spectral", "features", "--from", str(run), "--outside-cone", "--out", str(tmp_path)]) == 0
    before, after = (json.loads((folder / "features.json").read_text())[0] for folder in (run, tmp_path))
    assert before["stability"] == after["stability"] and before["embedding"] != after["embedding"]


def test_a_dry_run_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["spectral", "features", *SMALL, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "runs/clearhead-tiny-1.2-features" in shown and "16.000" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_dictionary_of_another_model_is_refused_before_any_work(dictionary, model, tmp_path, capsys):
    lorsa = from_attention(model.weights(1), model.geometry(1))
    lorsa.provenance = {"model": "gpt2", "layer": 1}
    other = str(lorsa.save_pretrained(tmp_path / "other"))
    out = tmp_path / "out"
    assert cli.main(["spectral", "features", *SMALL, "--dictionary", other, "--out", str(out)]) == 2
    assert "was trained on gpt2, not on clearhead-tiny" in capsys.readouterr().err
    assert cli.main(["spectral", "features", *SMALL, "--dictionary", str(tmp_path), "--out", str(out)]) == 2
    assert "holds no config.json" in capsys.readouterr().err and not out.exists()


def test_a_head_that_does_not_exist_is_refused(text, tmp_path, capsys):
    arguments = [*SMALL, "--text", text, "--out", str(tmp_path / "out")]
    arguments[arguments.index("--head") + 1] = "4"
    assert cli.main(["spectral", "features", *arguments]) == 2
    assert "no head 4: layer 1 has 4 heads" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"head": -1}, {"modes": 0}, {"tokens": 0}, {"neighbours": 0}, {"context": 1}])
def test_configurations_that_no_run_could_mean_are_refused(change):
    with pytest.raises(ClearheadError, match="is not possible"):
        SpectralFeatures(**{"head": 0} | change)
