"""Several layers in one go: harvested once, trained and measured one by one, named where one fails."""

import json
import shutil

import pytest

from clearhead import cli
from clearhead.commands.opening.run_folders import runs_in
from clearhead.commands.printing.table import show_layers
from clearhead.training import layers as training_layers
from clearhead.training import train_dictionary
from tests.training.conftest import TINY, books  # noqa: F401  (a folder of text)

SMALL = ["--model", str(TINY), "--context", "32", "--device", "cpu", "--tokens", "512", "--batch-tokens", "64"]
LORSA = ["train", "lorsa", *SMALL, "--heads", "64", "--groups", "4", "--k", "4"]


@pytest.fixture(scope="module")
def trained(books, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("layers") / "run"
    assert cli.main([*LORSA, "--layer", "all", "--text", str(books), "--out", str(out)]) == 0
    return out


def test_every_layer_gets_a_run_as_if_trained_alone(trained, books, tmp_path, capsys):  # noqa: F811
    assert runs_in(trained) == [trained / "0", trained / "1"]
    assert runs_in(trained / "1") == [trained / "1"] and runs_in(tmp_path) == [tmp_path]
    alone = [*LORSA, "--layer", "1", "--text", str(books), "--store", str(trained / "stores" / "1")]
    assert cli.main([*alone, "--out", str(tmp_path / "alone")]) == 0
    weights = [(run / "lorsa" / "model.safetensors").read_bytes() for run in (trained / "1", tmp_path / "alone")]
    assert weights[0] == weights[1]


def test_what_is_finished_is_not_done_again_and_what_is_missing_is(trained, books, tmp_path, capsys, monkeypatch):  # noqa: F811
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    (out / "0" / "summary.json").unlink()
    shutil.rmtree(out / "stores" / "1")
    done = []
    whole = train_dictionary.train_dictionary
    monkeypatch.setattr(
        training_layers, "train_dictionary", lambda config, *rest: done.append(config.layer) or whole(config, *rest)
    )
    command = [*LORSA, "--layer", "0,1", "--text", str(books), "--out", str(out)]
    assert cli.main(command) == 0
    assert done == [0] and not (out / "stores" / "1").exists()
    shown = capsys.readouterr().out
    assert "mean" in shown and f"clearhead evaluate {out}" in shown
    assert cli.main([*command, "--k", "5"]) == 2
    assert "k: 4 -> 5" in capsys.readouterr().err


def test_a_layer_that_fails_is_named_and_the_others_go_on(trained, books, tmp_path, capsys):  # noqa: F811
    stores = tmp_path / "stores"
    shutil.copytree(trained / "stores", stores)
    (stores / "0" / "shard-00000.safetensors").unlink()
    command = [*LORSA, "--layer", "all", "--text", str(books), "--store", str(stores), "--out", str(tmp_path / "run")]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "layer 0 left out: " in shown and "shard-00000.safetensors is missing" in shown and "\n      1  " in shown
    assert runs_in(tmp_path / "run")[-1].name == "1"
    (stores / "1" / "shard-00000.safetensors").unlink()
    assert cli.main([*command[:-1], str(tmp_path / "other")]) == 2
    assert "no layer could be trained; layer 0: " in capsys.readouterr().err


def test_evaluate_prints_one_table(trained, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    shutil.rmtree(out / "1" / "lorsa")
    command = ["evaluate", str(out), "--tokens", "320", "--downstream-tokens", "160", "--device", "cpu"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "CE recovered" in shown and "layer 1 left out: " in shown and "has not been trained to its end" in shown
    assert json.loads((out / "0" / "evaluation.json").read_text())["fvu"] > 0
    assert cli.main([*command, "--out", "x.json"]) == 2
    assert cli.main([*command, "--dry-run"]) == 0
    assert "0, 1" in capsys.readouterr().out


def test_the_plan_says_disk_memory_and_time(books, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    assert cli.main([*LORSA, "--layer", "0,1", "--text", str(books), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    # 2 layers of 512 tokens, each with 2 x 128 numbers of 2 bytes and an id of 8
    assert "at most 532 kB in runs/tiny-gpt2-2L-0,1-h64-k4-data/stores" in shown
    assert "memory, estimated" in shown and "time of the trainings" in shown and "time of the harvest" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["transcoder", "sae"])
def test_other_dictionaries_of_several_layers(kind, books, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "run"
    sizes = ["--features", "48", "--k", "4", "--text", str(books), "--out", str(out)]
    assert cli.main(["train", kind, *SMALL, "--layer", "all", *sizes]) == 0
    assert [(out / layer / kind).exists() for layer in ("0", "1")] == [True, True]
    assert f"trained in {out}" in capsys.readouterr().out


def test_numbers_that_a_layer_lacks_are_dashes_and_do_not_count(capsys):
    show_layers({0: {"a": 1.0, "b": 2.0}, 3: {"a": 3.0}}, {"a": "A", "b": "B"}, {1: "why"}, "title")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:5]] == [
        ["layer", "A", "B"],
        ["0", "1.000", "2.000"],
        ["3", "3.000", "–"],
        ["mean", "2.000", "2.000"],
    ]
    assert lines[5] == "layer 1 left out: why"


def test_layers_measured_together_have_the_numbers_of_each_alone(trained, tmp_path, capsys):
    out, alone = tmp_path / "run", tmp_path / "alone"
    shutil.copytree(trained, out)
    shutil.copytree(trained / "1", alone)
    options = ["--tokens", "320", "--downstream-tokens", "160", "--device", "cpu"]
    assert cli.main(["evaluate", str(out), *options]) == 0
    assert cli.main(["evaluate", str(alone), *options]) == 0
    together, apart = (json.loads((run / "evaluation.json").read_text()) for run in (out / "1", alone))
    for record in (together, apart):
        del record["config"], record["environment"]
    assert together == apart
    config = json.loads((out / "1" / "config.json").read_text())
    (out / "1" / "config.json").write_text(json.dumps(config | {"context": 16}))
    assert cli.main(["evaluate", str(out), *options]) == 0
    assert "layer 1 left out: its context is 16, and that of" in capsys.readouterr().out
