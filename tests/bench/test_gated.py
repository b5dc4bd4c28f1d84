"""The benchmark of gated attention measures what it says, at toy size."""

import pytest
import torch

from clearhead import cli
from clearhead.bench import gated
from clearhead.bench.gated import gradient_error, time_gated
from clearhead.errors import ClearheadError


def test_numbers_of_a_small_shape_and_threads_stay():
    before = torch.get_num_threads()
    numbers = time_gated(1, 2, 96, 16, device="cpu", repeats=1, threads=before + 1)
    assert torch.get_num_threads() == before
    assert all(value >= 0 for value in numbers.values())
    assert numbers["gated / dense"] == pytest.approx(numbers["gated (CPU ms)"] / numbers["dense (CPU ms)"])
    assert 0 < numbers["open edges in 'few open' (%)"] < 1
    assert numbers["error of gradients"] < 1e-5


def test_every_pair_is_laid_out_only_where_that_fits(monkeypatch):
    monkeypatch.setattr(gated, "CPU_BYTES", 0)
    monkeypatch.setattr(gated, "_peak", lambda form, sizes: 1)
    numbers = time_gated(1, 2, 96, 16, device="cpu", repeats=1, threads=1)
    assert numbers["gated / dense"] > 0 and not any("laid out" in name for name in numbers)


def test_the_error_is_one_of_the_fast_form():
    assert 0 < gradient_error(64, 16) < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there_is_refused(capsys):
    with pytest.raises(ClearheadError, match="finds no CUDA device"):
        time_gated(1, 2, 96, 16, device="cuda", repeats=1, threads=1)
    assert cli.main(["bench", "gated", "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
