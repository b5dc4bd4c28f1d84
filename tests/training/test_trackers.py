"""Trackers: none by default, a named package that is missing says how to get it, what a package is handed."""

import sys
from types import SimpleNamespace

import pytest

from clearhead.errors import ClearheadError
from clearhead.training.trackers import open_tracker


def test_none_and_other_processes_have_no_tracker(tmp_path):
    assert open_tracker("none", tmp_path, {}, True) is None
    assert open_tracker("wandb", tmp_path, {}, False) is None


def test_a_missing_package_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ClearheadError, match="pip install trackio"):
        open_tracker("trackio", tmp_path, {}, True)


def test_a_session_gets_name_configuration_and_steps(tmp_path, monkeypatch):
    calls = []
    fake = SimpleNamespace(init=lambda **kw: calls.append(kw), log=lambda metrics: calls.append(metrics))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    open_tracker("wandb", tmp_path / "mine", {"k": 8}, True).log({"loss": 1.0}, 20)
    assert calls == [
        {"project": "clearhead", "name": "mine", "config": {"k": 8}},
        {"loss": 1.0, "step": 20},
    ]
