"""`clearhead pretrain` through the command line: a run, its plan, and what it refuses."""

import json

import pytest

from clearhead import cli
from clearhead.config import Pretrain
from clearhead.config.pretrain import spread_steps

SIZES = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch-tokens", "64", "--device", "cpu"]


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, word in (("a", "cat"), ("b", "dog"), ("c", "owl")):
        (folder / f"{name}.txt").write_text("\n".join(f"The {word} saw day {i * i}." for i in range(200)))
    return str(folder)


def test_a_run_through_the_command_line(text, tmp_path, capsys):
    out = tmp_path / "run"
    command = ["pretrain", *SIZES, "--text", text, "--vocabulary", "270", "--tokens", "256", "--checkpoints", "3"]
    assert cli.main([*command, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "repeat_ce_second" in shown and str(out / "model") in shown
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "env.json", "metrics.jsonl", "summary.json", "model", "snapshots", "checkpoints"} <= names
    assert sorted(path.name for path in (out / "snapshots").iterdir()) == [f"step-0000000{s}" for s in (0, 2, 4)]
    assert json.loads((out / "config.json").read_text())["vocabulary"] == 270
    assert cli.main(["pretrain", "--from", str(out), "--seed", "1", "--out", str(out)]) == 2
    assert "seed: 0 -> 1" in capsys.readouterr().err


def test_a_dry_run_predicts_and_writes_nothing(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    before = sorted(tmp_path.iterdir())
    assert cli.main(["pretrain", *SIZES, "--text", text, "--tokens", "6400", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    width, inner = 16, 64
    layer = 4 * width * width + 4 * width + 2 * width * inner + inner + width + 4 * width
    assert f"{1024 * width + 16 * width + layer + 2 * width:,}" in shown
    assert "100 of 64 tokens" in shown and "measured on 6 steps" in shown
    assert "runs/pretrain-gpt2-1x16-texts-s0" in shown
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--width", "130"], "--width 130 is not possible: the 4 heads share it equally"),
        (["--architecture", "llama", "--width", "36"], "each of the 4 heads needs an even width"),
        (["--batch-tokens", "100"], "give a multiple of --context 128"),
        (["--repeat-share", "1"], "give a share from 0 up to"),
        (["--checkpoints", "0,9999999"], "steps between 0 and 4883"),
        (["--checkpoints", "many"], "give a number of models"),
        (["--checkpoints", "5,5"], "give a number of models"),
        (["--tokenizer", "clearhead-tiny", "--vocabulary", "300"], "leave one of the two out"),
        (["--context", "4"], "needs at least 8 tokens"),
        (["--layers", "0"], "give a number above 0"),
        (["--vocabulary", "200"], "256 bytes"),
        (["--text", "no-such-file.txt"], "no-such-file.txt"),
    ],
)
def test_bad_input_is_one_message(args, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    assert cli.main(["pretrain", *args]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("count", [2, 3, 7, 24, 40])
def test_a_number_of_models_is_dense_at_the_start_and_even_to_the_end(count):
    steps = spread_steps(count, 6000)
    assert len(steps) == count and steps[0] == 0 and steps[-1] == 6000
    gaps = [b - a for a, b in zip(steps, steps[1:], strict=False)]
    early = (count - 1) // 4
    assert max(gaps[early:]) - min(gaps[early + 1 :] or gaps) <= 1 or count < 4
    assert gaps[: early + 1] == sorted(gaps[: early + 1])


def test_steps_that_coincide_are_kept_once():
    assert spread_steps(24, 5) == [0, 1, 2, 3, 4, 5]
    assert spread_steps(0, 5) == [] and spread_steps(1, 5) == [5]
    assert Pretrain(tokens=4096 * 10, checkpoints="10,0,3").checkpoint_steps() == [0, 3, 10]
