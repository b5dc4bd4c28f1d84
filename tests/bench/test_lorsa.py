import re
import sys

import pytest
import torch
from safetensors.torch import save_file

from clearhead.bench import lorsa as bench
from clearhead.config import BenchLorsa
from clearhead.errors import ClearheadError

SMALL = {
    "d_model": 32,
    "context": 16,
    "batch": 2,
    "heads": 32,
    "groups": 4,
    "d_qk": 16,
    "k": 4,
    "repeats": 2,
    "threads": 1,
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return bench.bench_lorsa(BenchLorsa(**SMALL, out=folder)), folder


def test_all_implementations_compute_the_same_gradients(measured):
    results, _ = measured
    assert 0 <= results["agreement"]["dense"] < 1e-4


def test_times_and_memory_are_reported(measured):
    results, folder = measured
    for name in ("ours", "dense"):
        taken = results[name]
        assert 0 < taken["min_cpu"] <= taken["cpu"] and 0 < taken["min_wall"] <= taken["wall"]
    (report,) = folder.iterdir()
    text = report.read_text()
    assert re.search(r"\| clearhead \| \d+ \| \d+ \| 1\.00 \|", text)
    assert "--heads 32" in text and "--out" not in text and str(folder) not in text


class Answering:
    """A worker that gives the gradients it was made with."""

    def __init__(self, **gradients):
        self.gradients = gradients

    def ask(self, command):
        save_file(self.gradients, command.partition(" ")[2])
        return {"loss": 0.0}


def test_other_gradients_are_refused(tmp_path):
    ours, near = Answering(W_V=torch.ones(3, 2)), Answering(W_V=torch.full((3, 2), 1.0001))
    assert bench._compare_gradients({"ours": ours, "dense": near}, tmp_path)["dense"] == pytest.approx(1e-4, rel=0.01)
    for other in (torch.full((3, 2), 1.01), torch.full((3, 2), torch.nan)):
        with pytest.raises(ClearheadError, match="dense implementation computes other gradients.*W_V"):
            bench._compare_gradients({"ours": ours, "dense": Answering(W_V=other)}, tmp_path)


def test_reference_that_does_not_start_says_why(tmp_path):
    """This environment has no llamascopium, so its interpreter is not one of the reference."""
    problem = tmp_path / "problem.safetensors"
    bench._write_problem(BenchLorsa(**SMALL), problem)
    with pytest.raises(ClearheadError, match="(?s)reference implementation stopped.*llamascopium"):
        bench.Worker("reference", sys.executable, problem, 1)


def test_reference_interpreter_must_exist(tmp_path):
    with pytest.raises(ClearheadError, match="no interpreter"):
        bench.bench_lorsa(BenchLorsa(**SMALL, out=tmp_path, reference_python=tmp_path / "python"))


def test_failed_installation_gives_the_last_words(monkeypatch, tmp_path):
    monkeypatch.setattr(bench.sys, "executable", "false")
    with pytest.raises(ClearheadError, match="-m venv .* failed"):
        bench.make_reference(tmp_path / "environment")
