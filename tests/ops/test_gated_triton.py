"""The GPU kernels of gated attention, in Triton's interpreter: against the float64 reference, gates bit by bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

CASES = Path(__file__).with_name("gated_triton_cases.py")


@pytest.fixture(scope="module")
def answers():
    """Triton interprets only what is imported with the variable set, so the kernels get a process of their own."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, CASES], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("dtype", "tolerance", "cases"), [("float32", 4e-6, 10), ("float16", 1e-3, 2)])
def test_values_and_gradients_are_the_references(answers, dtype, tolerance, cases):
    numbers = answers[dtype]
    errors = {name: value for name, value in numbers.items() if "error of" in name}
    assert {name: value for name, value in errors.items() if not value <= tolerance} == {}
    assert len({name.split(":")[0] for name in errors}) == cases
    assert min(value for name, value in errors.items() if name.endswith(("dq", "dk", "dv", "dbias", "dsink"))) > 0


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gates_are_the_same_in_all_kernels_all_tiles_and_the_reference(answers, dtype):
    numbers = answers[dtype]
    counts = {
        name: value for name, value in numbers.items() if name.endswith(("flips", "kernels differ", "tiles differ"))
    }
    assert set(counts.values()) == {0.0} and "tiles differ" in counts


def test_noise_is_the_librarys_bit_by_bit(answers):
    assert answers["noise"] == {"different": 0}


def test_the_open_edges_are_those_of_the_uniform_numbers(answers):
    assert answers["gates"]["different"] == 0 and 500 < answers["gates"]["open"] < 2 * 64 * 65 / 2


def test_a_head_with_all_gates_closed_gives_exactly_zero_and_reads_no_values(answers):
    assert set(answers["closed"].values()) == {0.0} and len(answers["closed"]) == 8


def test_rows_that_see_nothing_are_exactly_zero(answers):
    assert answers["unseen"] == {"largest": 0.0, "opened": 0, "lse": True, "finite": True}


def test_scores_beyond_the_range_of_exp_are_right(answers):
    assert {name: value for name, value in answers["large_scores"].items() if not value < 1e-5} == {}


def test_one_position(answers):
    assert answers["one_row"] == {"error": 0.0}


def test_gates_that_changed_between_the_passes_are_refused(answers):
    said = answers["other_gates"]["said"]
    assert "opened other edges than the forward pass in 1 of 2 heads, first in batch 0, head 1" in said


def test_what_the_kernels_cannot_do_is_refused(answers):
    said = answers["refusals"]
    assert "got bfloat16 in Triton's interpreter" in said["bfloat16"]
    assert "q torch.float64" in said["float64"] and "k torch.float32" in said["mixed"]
    assert "width 300" in said["wide"] and "at most 256" in said["wide"]


def test_keys_are_followed_to_the_last_row_that_sees_them(answers):
    assert answers["reach"] == {"wrong": 0}


def test_tensors_on_the_cpu_are_refused_outside_of_the_interpreter():
    from clearhead.errors import ClearheadError
    from clearhead.ops.gated_triton import gated_attention_triton

    x = torch.zeros(1, 2, 4, 16)
    with pytest.raises(ClearheadError, match="tensors on cpu, cpu, cpu; expected one CUDA device"):
        gated_attention_triton(x, x, x, torch.zeros(2), mode="open", scale=1.0)


def test_what_is_beyond_rounding_is_a_problem():
    from clearhead.bench.gated_device import Sizes, find_problems

    right = {"open: error of dq": 0.02, "open: flips": 4.0, "open: kernels differ": 0.0, "tiles differ": 0.0}
    assert find_problems(right, torch.bfloat16, Sizes(1, 2, 1, 100)) == []
    wrong = {"open: error of dq": float("nan"), "open: flips": 5.0, "open: kernels differ": 1.0, "tiles differ": 1.0}
    assert len(find_problems(wrong, torch.bfloat16, Sizes(1, 2, 1, 100))) == 4
    assert find_problems(right, torch.float16, Sizes(1, 2, 1, 100)) == ["open: error of dq: 0.02, at most 0.004"]
