"""A sweep follows the pairs of the last checkpoint, whose row is the census; the first row is as untrained weights."""

import json
import math

import pytest
import torch

from clearhead import cli
from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.spectral.census import take_census
from clearhead.spectral.control_runs import compare_untrained, untrained
from clearhead.spectral.firings import Prompts
from clearhead.spectral.sparsity import n_recon, rolls_tovee
from clearhead.spectral.sweep import Checkpoint, find_checkpoints, sweep


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder like that of `clearhead pretrain`, with an untrained and a trained model."""
    folder = tmp_path_factory.mktemp("run")
    trained = Model.load("clearhead-tiny")
    for step, model in ((0, untrained(trained, 0)), (5, untrained(trained, 1)), (1000, trained)):
        path = folder / "snapshots" / f"step-{step:08d}"
        model.hf.save_pretrained(path)
        trained.tokenizer.save_pretrained(path)
    return folder


@pytest.fixture(scope="module")
def prompts():
    once = torch.randint(1024, (4, 16), generator=torch.Generator().manual_seed(3))
    return Prompts([f"row {n}" for n in range(4)], list(once.repeat(1, 2)), "random tokens said twice")


def test_checkpoints_are_found_and_ordered_by_step(run, tmp_path):
    assert [one.step for one in find_checkpoints(str(run))] == [0, 5, 1000]
    assert [one.step for one in find_checkpoints(str(run / "snapshots"))] == [0, 5, 1000]
    assert find_checkpoints("org/model@step9,step10") == [
        Checkpoint("org/model", "step9", 9),
        Checkpoint("org/model", "step10", 10),
    ]
    for named, message in (
        (str(tmp_path), "holds 0 checkpoints"),
        ("org/model@step9", "holds 1 checkpoints"),
        ("org/model@a,b", "no number in its name"),
        ("nowhere", "is no folder"),
        ("clearhead-tiny@1,2", "has no revisions"),
        (f"{tmp_path}@1,2", "has no revisions"),
    ):
        with pytest.raises(ClearheadError, match=message):
            find_checkpoints(named)


def test_the_last_row_is_the_census_and_the_first_that_of_untrained_weights(run, prompts):
    checkpoints, trained = find_checkpoints(str(run)), Model.load("clearhead-tiny")
    found = list(
        sweep(checkpoints, prompts, trained, threshold=0.5, basis="fixed", seed=0, dtype="float32", device="cpu")
    )
    assert [rows[0].step for rows in found] == [0, 5, 1000] and all(len(rows) == 8 for rows in found)
    census = take_census(trained, prompts)
    for row in found[-1]:
        own = census.layers[row.layer].firings.of_head(row.head)
        assert row.pairs == len(own) and row.n_firings == int(census.layers[row.layer].n_firings[row.head])
        if len(own):
            assert math.isclose(row.sparsity, float(rolls_tovee(own.contributions).double().mean()), rel_tol=1e-5)
            assert row.n_recon == float(n_recon(own.contributions).double().quantile(0.5))
            assert row.gauge_sparsity > row.sparsity + 0.1
    blank = compare_untrained(trained, prompts, census, seed=0)
    for row in found[0]:
        if row.pairs:
            assert 0.25 < row.sparsity < 0.55 and abs(row.sparsity - row.gauge_sparsity) < 0.15
            assert abs(blank[row.layer, row.head][0].sparsity - row.sparsity) < 0.15


def test_checkpoints_of_another_model_are_refused(run, prompts, tmp_path):
    from tests.model.tiny_configs import build

    build("gpt2").save_pretrained(tmp_path / "step-1")
    other = [Checkpoint(str(tmp_path / "step-1"), None, 1), find_checkpoints(str(run))[-1]]
    with pytest.raises(ClearheadError, match="not checkpoints of one model"):
        list(
            sweep(
                other,
                prompts,
                Model.load("clearhead-tiny"),
                threshold=0.5,
                basis="fixed",
                seed=0,
                dtype="float32",
                device="cpu",
            )
        )


def test_two_checkpoints_of_one_step_are_refused(tmp_path):
    for name in ("a-5", "b-5"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(ClearheadError, match="two checkpoints of one step"):
        find_checkpoints(str(tmp_path))


def test_the_verb_writes_a_table_numbers_and_a_page(run, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day and the clocks were striking. " * 60)
    words = [
        "spectral",
        "sweep",
        str(run),
        "--text",
        str(text),
        "--tokens",
        "256",
        "--context",
        "32",
        "--device",
        "cpu",
    ]
    assert cli.main([*words, "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    assert "0, 5, 1,000" in capsys.readouterr().out and not (tmp_path / "out").exists()
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == 0
    table = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert len(table["step"]) == 24 and set(table["step"]) == {0, 5, 1000}
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["n_checkpoints"] == 3
    heads = [value for name, value in summary.items() if name.startswith("head_")]
    assert heads and all(head["sparsity_last"] < head["sparsity_first"] for head in heads)
    assert (tmp_path / "out" / "page.html").stat().st_size > 1e6
    assert "step 1,000:" in capsys.readouterr().out
