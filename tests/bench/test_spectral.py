"""The benchmark of the spectral lens measures what it says, at toy size."""

import re
import sys

import pytest
import torch

from clearhead import cli
from clearhead.bench.spectral import sum_error, time_spectral
from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.spectral.attention_modes import head_modes
from tests.model.test_weights import TOKENS


def test_times_are_positive_and_sums_are_scores():
    before = torch.get_num_threads()
    numbers = time_spectral("clearhead-tiny", context=32, blocks=4, repeats=1, threads=before + 1)
    assert torch.get_num_threads() == before
    assert numbers["heads"] == 8 and numbers["tokens"] == 128
    for clock in ("CPU", "wall"):
        spent = [numbers[f"{name} ({clock} s)"] for name in ("decomposition", "forward", "census")]
        assert min(spent) > 0 and numbers[f"census / forward ({clock})"] == spent[2] / spent[1]
    assert numbers["error of the sum, float32"] < 1e-4 and numbers["error of the sum, float64"] < 1e-10
    assert numbers["largest error of a decomposition"] < 1e-10


def test_a_context_longer_than_the_models_is_refused_and_threads_stay():
    before = torch.get_num_threads()
    with pytest.raises(ClearheadError, match="context: expected 2 to 128"):
        time_spectral("clearhead-tiny", context=200, blocks=1, repeats=1, threads=before + 1)
    assert torch.get_num_threads() == before


def test_a_wrong_basis_shows_as_an_error_of_the_sum():
    model = Model.load("clearhead-tiny")
    modes = {0: head_modes(model, 0), 1: head_modes(model, 1)}
    assert sum_error(model, modes, TOKENS) < 1e-5
    broken = {layer: one.to(one.G_q.dtype, "cpu") for layer, one in modes.items()}
    broken[1].G_q[2] *= 1.01
    assert sum_error(model, broken, TOKENS) > 1e-3


def test_the_verb_writes_its_report(tmp_path, capsys, monkeypatch):
    words = ["bench", "spectral", "--model", "clearhead-tiny", "--context", "16", "--blocks", "2", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["clearhead", *words])  # the report quotes the command line, here not pytest's
    assert cli.main([*words, "--out", str(tmp_path)]) == 0
    (report,) = tmp_path.glob("*-spectral.md")
    text = report.read_text()
    assert "| census / forward (CPU) |" in text and re.search(r"Command: `clearhead ", text)
    assert "written to" in capsys.readouterr().out
