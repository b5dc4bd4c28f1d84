"""The benchmark of circuits measures what it says, at toy size."""

import pytest
import torch

from clearhead.bench.circuits import plain_effects, random_prompt, take_turns, time_circuits
from clearhead.model import Model


def test_both_ways_find_the_same_effects_and_times_are_positive():
    before = torch.get_num_threads()
    numbers = time_circuits("clearhead-tiny", tokens=16, repeats=1, threads=before + 1)
    assert torch.get_num_threads() == before
    assert numbers["heads"] == 8 and numbers["tokens"] == 16
    assert numbers["largest difference of the effects"] < 1e-4
    for clock in ("CPU", "wall"):
        slow, fast = (numbers[f"head patches, {name} ({clock} s)"] for name in ("plain", "prefix"))
        assert min(slow, fast) > 0
        assert numbers[f"head patches, plain / prefix ({clock})"] == slow / fast
        base = numbers[f"forward + backward ({clock} s)"]
        for count, kind in ((8 * 136, "attention"), (110, "graph")):
            ratio = numbers[f"scores of {count} {kind} edges ({clock} s)"] / base
            assert numbers[f"scores of {kind} edges / forward + backward ({clock})"] == pytest.approx(ratio)


def test_the_prompt_is_fit_to_measure_differences():
    model = Model.load("clearhead-tiny")
    rows = random_prompt(model, 16)
    assert rows.clean.shape == rows.corrupt.shape == (1, 16)
    assert float(plain_effects(model, rows).abs().min()) > 0


def test_pieces_of_work_take_turns():
    order: list[str] = []
    spent = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b"] * 3
    assert [len(some) for some in spent.values()] == [3, 3]
    assert all(seconds == pytest.approx(0, abs=0.5) for some in spent.values() for one in some for seconds in one)
