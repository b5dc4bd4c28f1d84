"""The benchmark of the spectral lens measures what it says, at toy size."""

import re

from clearhead import cli
from clearhead.bench.spectral import sum_error, time_spectral
from clearhead.model import Model
from clearhead.spectral.attention_modes import head_modes
from tests.model.test_weights import TOKENS


def test_times_are_positive_and_sums_are_scores():
    numbers = time_spectral("clearhead-tiny", context=32, blocks=4, repeats=1, threads=1)
    assert numbers["heads"] == 8
    for name in ("decomposition (CPU s)", "forward (CPU s)", "census (CPU s)", "census / forward"):
        assert numbers[name] > 0
    assert numbers["error of the sum, float32"] < 1e-4 and numbers["error of the sum, float64"] < 1e-10
    assert numbers["largest error of a decomposition"] < 1e-10


def test_a_wrong_basis_shows_as_an_error_of_the_sum():
    model = Model.load("clearhead-tiny")
    modes = {0: head_modes(model, 0), 1: head_modes(model, 1)}
    assert sum_error(model, modes, TOKENS) < 1e-5
    broken = {layer: one.to(one.G_q.dtype, "cpu") for layer, one in modes.items()}
    broken[1].G_q[2] *= 1.01
    assert sum_error(model, broken, TOKENS) > 1e-3


def test_the_verb_writes_its_report(tmp_path, capsys):
    words = ["bench", "spectral", "--model", "clearhead-tiny", "--context", "16", "--blocks", "2", "--repeats", "1"]
    assert cli.main([*words, "--out", str(tmp_path)]) == 0
    (report,) = tmp_path.glob("*-spectral.md")
    text = report.read_text()
    assert "| census / forward |" in text and re.search(r"Command: `clearhead ", text)
    assert "written to" in capsys.readouterr().out
