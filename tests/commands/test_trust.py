"""`clearhead trust` at toy size: the table of an atlas, heads and families, and what is refused."""

import json
import shutil
from dataclasses import replace

import pytest

from clearhead import cli
from clearhead.atlas import Atlas, AtlasWriter
from clearhead.config import TrainLorsa, Trust
from clearhead.dictionaries.init import from_attention
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.runs import write_json


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """As training and analysis leave it: the layer's own heads, of which 8 count, and an atlas with a family."""
    folder = tmp_path_factory.mktemp("trust") / "run"
    folder.mkdir()
    training = TrainLorsa(model="clearhead-tiny", layer=1, heads=128, groups=4, k=8, context=32, out=folder)
    write_json(folder / "config.json", training.to_dict())
    model = Model.load("clearhead-tiny", tokenizer=False)
    exact = from_attention(model.weights(1), model.geometry(1))
    lorsa = Lorsa(replace(exact.config, k=8, activation="topk"), {"model": "clearhead-tiny", "layer": 1})
    lorsa.load_state_dict(exact.state_dict())
    lorsa.save_pretrained(folder / "lorsa")
    with AtlasWriter(folder / "atlas", {"model": "clearhead-tiny"}) as atlas:
        family = {"family": ["family.1.0"], "layer": [1], "units": [["lorsa.1.3", "lorsa.1.40"]]}
        numbers = {name: [1.0] for name in ("overlap", "read_rank", "write_rank")}
        atlas.append("families", family | numbers | {"label": [""]})
    return folder


def test_an_atlas_gets_the_table(run, capsys):
    sizes = ["--tokens", "256", "--effects", "3", "--cases", "2", "--device", "cpu"]
    other = shutil.copytree(run, run.with_name("copy"))
    assert cli.main(["trust", str(run), *sizes, "--seeds", str(other)]) == 0
    rows = Atlas(run / "atlas").sql("select * from trust")
    stable = [row["value"] for row in rows if row["measure"] == "seed_stability"]
    assert stable == pytest.approx([1] * len(stable)) and len(stable) > 20
    effects = [row["unit_id"] for row in rows if row["measure"] == "causal_effect"]
    assert len(effects) == 4 and "family.1.0" in effects
    assert len(Atlas(run / "atlas").sql("select * from families")) == 1
    summary = json.loads((run / "trust.json").read_text())
    assert summary["heads with effects"] == 3 and summary["cases"] == 6
    printed = capsys.readouterr().out
    assert "KL when removed, nats" in printed and " to " in printed


def test_named_heads_are_set_to_other_values_with_their_family(run, tmp_path, capsys):
    atlas = shutil.copytree(run / "atlas", tmp_path / "run" / "atlas")
    options = [
        "--heads",
        "40",
        "1",
        "--becomes",
        "0.5",
        "2",
        "mean",
        "--tokens",
        "256",
        "--cases",
        "3",
        "--device",
        "cpu",
    ]
    assert cli.main(["trust", str(run), *options, "--out", str(atlas)]) == 0
    rows = Atlas(atlas).sql("select * from interventions")
    assert {row["unit_id"] for row in rows} <= {"lorsa.1.40", "lorsa.1.1", "family.1.0"} and len(rows) >= 2 * 4 * 3
    assert {row["becomes"] for row in rows} == {"0", "0.5", "2", "mean"}
    own = {row["becomes"]: row for row in rows if row["unit_id"] == "family.1.0" and row["changed"] == "own"}
    assert own["0"]["direct"] == pytest.approx(-own["2"]["direct"]) == pytest.approx(2 * own["0.5"]["direct"])
    removed = Atlas(atlas).sql("select value from trust where measure = 'causal_effect' and unit_id = 'family.1.0'")
    assert removed[0]["value"] == pytest.approx(-own["0"]["effect"])
    printed = capsys.readouterr().out
    assert "first order" in printed and "family.1.0 is linear" in printed
    assert "when set to 2" not in printed  # the table says it
    assert "slope with gradient when set to 2, another active head" in json.loads(
        (atlas.parent / "trust.json").read_text()
    )
    assert "of 32 coordinates" in printed


def test_a_dry_run_says_what_will_be_measured(run, capsys):
    assert cli.main(["trust", str(run), "--heads", "1", "2", "--dry-run"]) == 0
    assert "two controls" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"heads": (-1,)}, "count from 0"),
        ({"heads": (2, 2)}, "each head once"),
        ({"cases": 0}, "above 0"),
        ({"becomes": ("1",)}, "other than 1"),
        ({"becomes": ("twice",)}, "mean or elsewhere"),
        ({"becomes": ("nan",)}, "other than 1"),
        ({"becomes": ("1.0000001",)}, "other than 1"),
        ({"becomes": ("0.5", ".5")}, "each setting once"),
        ({"becomes": ("mean", "2", "mean")}, "each setting once"),
    ],
)
def test_options_that_mean_nothing_are_refused(changed, says, run):
    with pytest.raises(ClearheadError, match=says):
        Trust(run=run, **changed)


def test_a_run_without_an_atlas_says_which_verb_makes_one(run, tmp_path, capsys):
    assert cli.main(["trust", str(run), "--out", str(tmp_path)]) == 2
    assert "type: clearhead analyze" in capsys.readouterr().err


def test_other_seeds_are_other_runs_of_the_same_layer(run, tmp_path, capsys):
    assert cli.main(["trust", str(run), "--seeds", str(run)]) == 2
    assert "is the run itself" in capsys.readouterr().err
    elsewhere = shutil.copytree(run / "lorsa", tmp_path / "lorsa")
    config = json.loads((elsewhere / "config.json").read_text())
    config["provenance"]["layer"] = 0
    write_json(elsewhere / "config.json", config)
    assert cli.main(["trust", str(run), "--seeds", str(elsewhere)]) == 2
    assert "was trained on layer 0" in capsys.readouterr().err


def test_an_atlas_of_other_heads_is_refused_before_the_work(run, tmp_path, capsys):
    with AtlasWriter(tmp_path / "atlas", {"model": "clearhead-tiny"}) as atlas:
        atlas.append("units", {"unit_id": ["lorsa.0.1"], "kind": ["lorsa"], "layer": [0], "index": [1]})
    assert cli.main(["trust", str(run), "--out", str(tmp_path / "atlas")]) == 2
    assert "is of layer 0" in capsys.readouterr().err
    for kind, heads, training in (("transcoder", 128, None), ("lorsa", 64, None), ("lorsa", 128, {"seed": 1})):
        told = {"model": "clearhead-tiny", "training": training}
        with AtlasWriter(tmp_path / "atlas", {"dictionary": {"kind": kind, "n_heads": heads, "provenance": told}}):
            pass
        assert cli.main(["trust", str(run), "--out", str(tmp_path / "atlas")]) == 2
        assert "is of another dictionary than" in capsys.readouterr().err
