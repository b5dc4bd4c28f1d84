import dataclasses

import numpy as np
import pytest
import torch

from clearhead.analysis.behaviours.behaviour import Probe, Scores
from clearhead.analysis.behaviours.registry import BEHAVIOURS


@pytest.fixture
def probe():
    tokens = torch.arange(2 * 6).view(2, 6)
    mask = torch.zeros(2, 6, 6, dtype=torch.bool)
    mask[:, 5, 1] = mask[:, 4, 2] = mask[:, 4, 3] = True
    return Probe("hand", (tokens,), (mask,), marks={"some": (tokens,)})


def test_shuffling_deals_the_tokens_and_keeps_the_keys(probe):
    shuffled = probe.shuffled(3)
    before, after = probe.batches[0], shuffled.batches[0]
    assert torch.equal(after.sort(1).values, before)
    assert torch.equal(after[:, 0], before[:, 0]) and not torch.equal(after, before)
    assert shuffled.expected is probe.expected and shuffled.marks is probe.marks
    assert torch.equal(probe.shuffled(3).batches[0], after) and not torch.equal(probe.shuffled(4).batches[0], after)


def test_keys_of_positions_are_dealt_too(probe):
    fixed = dataclasses.replace(probe, positional=True)
    dealt = [fixed.shuffled(seed).expected[0] for seed in range(20)]
    for mask in dealt:
        assert torch.equal(mask.sum(-1), fixed.expected[0].sum(-1))
        assert not mask.triu(1).any()
    assert len({mask.nonzero().flatten().numpy().tobytes() for mask in dealt}) > 10


def test_found_needs_score_and_cases():
    behaviour = dataclasses.replace(BEHAVIOURS[0], threshold=0.5, min_cases=3)
    scores = Scores(np.array([0.5, 0.49, 0.9]), np.array([3, 9, 2]), [None] * 3)
    assert behaviour.found(scores).tolist() == [True, False, False]
