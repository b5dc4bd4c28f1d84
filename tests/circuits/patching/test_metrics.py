"""Metrics of a circuit on logits small enough to work out by hand."""

import math

import pytest
import torch

from clearhead.circuits.patching.metrics import METRICS, measure_logits
from clearhead.data.tasks import TaskBatch
from clearhead.errors import ClearheadError, NonFiniteError

TOKENS = torch.zeros(1, 1, dtype=torch.long)


def rows(answers=(0,), wrong=(1,)):
    return TaskBatch([7], TOKENS, TOKENS, [list(answers)], [list(wrong)], {})


def logits(*weights):
    """Logits whose probabilities are in proportion to the weights."""
    return torch.tensor(weights, dtype=torch.float64).log()[None]


def measured(circuit, full, **given):
    found = measure_logits(circuit[None], rows(**given), full)[0, 0].tolist()
    return dict(zip(METRICS, found, strict=True))


def test_all_four_by_hand():
    found = measured(logits(6, 1, 1), logits(2, 1, 1))
    assert found["logit_difference"] == pytest.approx(math.log(6))
    assert found["probability_difference"] == pytest.approx(5 / 8)
    assert found["kl"] == pytest.approx(-(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.25 / 0.125)))
    assert found["accuracy"] == 1


def test_several_answers_are_a_mean_of_logits_a_sum_of_probabilities_and_the_best_counts():
    found = measured(logits(1, 4, 2, 1), logits(1, 4, 2, 1), answers=(0, 1), wrong=(2, 3))
    assert found["logit_difference"] == pytest.approx((math.log(4) - math.log(2)) / 2)
    assert found["probability_difference"] == pytest.approx(2 / 8)
    assert found["kl"] == pytest.approx(0, abs=1e-15)
    assert found["accuracy"] == 1


def test_a_tie_is_not_right():
    assert measured(logits(2, 2, 1), logits(2, 2, 1))["accuracy"] == 0


def test_items_that_cannot_be_measured_are_named():
    with pytest.raises(ClearheadError, match="item 7"):
        measured(logits(1, 1), logits(1, 1), wrong=())
    with pytest.raises(NonFiniteError, match=r"items \[7\]"):
        measured(logits(1, 0), logits(1, 1))
