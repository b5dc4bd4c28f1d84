from pathlib import Path

import pytest

from clearhead.commands.catalogue import plan
from clearhead.config import Catalogue
from clearhead.errors import ClearheadError


def test_one_source_is_given():
    for options in ({}, {"run": Path("runs/x"), "model": "smollm2"}, {"model": "smollm2", "planted": True}):
        with pytest.raises(ClearheadError, match="--planted"):
            Catalogue(**options)
    with pytest.raises(ClearheadError, match="a run says which layer"):
        Catalogue(run=Path("runs/x"), layer=3)
    with pytest.raises(ClearheadError, match="number of planted units"):
        Catalogue(model="smollm2", per_kind=3)


def test_the_plan_names_what_and_where(tmp_path):
    told = plan(Catalogue(model="clearhead-tiny", layer="0,1", out=tmp_path))
    assert told["written to"] == str(tmp_path / "catalogue.json") and "induction" in told["behaviours"]
    assert plan(Catalogue(planted=True, per_kind=7))["planted units of each kind"] == 7


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ClearheadError, match="no finished run"):
        plan(Catalogue(run=tmp_path))
