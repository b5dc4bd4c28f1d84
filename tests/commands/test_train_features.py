"""The verbs that train transcoders, SAEs and cross-layer transcoders, from the command line to the evaluation."""

import json

import pytest

from clearhead import cli
from tests.training.conftest import TINY, books  # noqa: F401  (a folder of text)

SMALL = ["--model", str(TINY), "--context", "32", "--device", "cpu"]
SIZES = ["--tokens", "512", "--batch-tokens", "64", "--features", "48", "--k", "4"]


@pytest.mark.parametrize("kind", ["transcoder", "sae", "clt"])
def test_train_then_evaluate(kind, books, tmp_path, capsys):  # noqa: F811
    out, text = str(tmp_path / "run"), ["--text", str(books)]
    assert cli.main(["train", kind, *SMALL, *SIZES, *text, "--out", out]) == 0
    shown = capsys.readouterr().out
    assert f"trained in {out}" in shown and f"next: clearhead evaluate {out}" in shown
    assert cli.main(["evaluate", out, "--tokens", "640", "--downstream-tokens", "320", "--device", "cpu"]) == 0
    assert "ce_replaced" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert metrics["l0"] == pytest.approx(8 if kind == "clt" else 4, abs=0.5) and metrics["fvu"] > 0
    assert json.loads((tmp_path / "run" / kind / "config.json").read_text())["metrics"]["fvu"] == metrics["fvu"]
    assert cli.main(["evaluate", out, "--dry-run"]) == 0
    assert "features" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "site", "share"), [("transcoder", "mlp", ["--repeat-share", "0.25"]), ("sae", "resid_pre", [])]
)
def test_harvest_then_train_from_the_store(kind, site, share, books, tmp_path, capsys):  # noqa: F811
    store, text = str(tmp_path / "store"), ["--text", str(books), "--layer", "1", *share]
    assert cli.main(["harvest", *SMALL, *text, "--site", site, "--tokens", "512", "--out", store]) == 0
    command = f"train {kind}" + (" --site resid_pre" if kind == "sae" else "")
    shown = capsys.readouterr().out
    assert f"next: clearhead {command} --model" in shown and (" --repeat-share 0.25" in shown) == bool(share)
    options = [*command.split(), *SMALL, *SIZES, *text]
    assert cli.main([*options, "--out", str(tmp_path / "stored"), "--store", store]) == 0
    assert cli.main([*options, "--out", str(tmp_path / "live")]) == 0
    weights = [(tmp_path / run / kind / "model.safetensors").read_bytes() for run in ("stored", "live")]
    assert weights[0] == weights[1]
    if share:
        capsys.readouterr()
        plain = [*options[: -len(share)], "--out", str(tmp_path / "plain"), "--store", store]
        assert cli.main(plain) == 2 and "holds repeat_share 0.25, not 0.0" in capsys.readouterr().err


def test_dry_run_measures_a_few_steps_and_writes_nothing(books, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "clt", *SMALL, *SIZES, "--text", str(books), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    # two encoders, three decoders of 48 features x 128, and biases
    assert f"{5 * 48 * 128 + 2 * 48 + 2 * 128:,}" in shown and "measured on 6 steps" in shown
    assert not list(tmp_path.iterdir())


def test_what_a_transcoder_run_is_not_for_is_refused(books, tmp_path, capsys):  # noqa: F811
    out = str(tmp_path / "run")
    assert cli.main(["train", "transcoder", *SMALL, *SIZES, "--text", str(books), "--out", out]) == 0
    assert cli.main(["trust", out]) == 2
    assert "holds a dictionary of kind transcoder" in capsys.readouterr().err
    assert cli.main(["harvest", *SMALL, "--site", "z"]) == 2
    assert "give one of attention, mlp, resid_pre" in capsys.readouterr().err
