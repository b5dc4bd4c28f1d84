from pathlib import Path

import pytest

from clearhead.analysis.behaviours import probe_text
from clearhead.analysis.behaviours.registry import BEHAVIOURS
from clearhead.commands import catalogue
from clearhead.commands.catalogue import plan
from clearhead.config import Catalogue
from clearhead.errors import ClearheadError
from clearhead.runs import read_json


def test_one_source_is_given():
    run = Path("runs/x")
    for options in ({}, {"run": run, "model": "smollm2"}, {"run": run, "planted": True}):
        with pytest.raises(ClearheadError, match="--planted"):
            Catalogue(**options)
    with pytest.raises(ClearheadError, match="a run says which layer"):
        Catalogue(run=Path("runs/x"), layer=3)
    with pytest.raises(ClearheadError, match="it is for planted units"):
        Catalogue(model="smollm2", per_kind=3)


def test_the_plan_names_what_and_where(tmp_path):
    told = plan(Catalogue(model="clearhead-tiny", layer="0,1", out=tmp_path))
    assert told["written to"] == str(tmp_path / "catalogue.json") and "induction" in told["behaviours"]
    assert plan(Catalogue(planted=True, per_kind=7))["planted units of each kind"] == 7


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ClearheadError, match="no finished run"):
        plan(Catalogue(run=tmp_path))


def test_the_verb_prints_and_writes_what_it_found(tmp_path, monkeypatch, capsys):
    for name, value in (("NATURAL", 1), ("AGAIN", 1), ("BATCH", 4)):
        monkeypatch.setattr(probe_text, name, value)
    chosen = tuple(one for one in BEHAVIOURS if one.name in ("previous_token", "name_mover"))
    monkeypatch.setattr(catalogue, "BEHAVIOURS", chosen)
    catalogue.run(Catalogue(model="clearhead-tiny", layer=0, chance=False, out=tmp_path))
    record = read_json(tmp_path / "catalogue.json")
    assert [one["found"] for one in record["counts"]] == [1, 0]
    assert record["behaviours"]["unit_id"][0] == "head.0.1"
    printed = capsys.readouterr().out
    assert "original heads: 1 of 4" in printed and "head.0.1" in printed
    assert "no cases in the tokens of clearhead-tiny" in printed  # no name is one of its tokens
