"""Detectors on real heads that were built or are known to have a behaviour."""

import numpy as np
import pytest
import torch

from clearhead.analysis.behaviours.attention import ATTENTION
from clearhead.analysis.behaviours.behaviour import Probe
from clearhead.analysis.behaviours.catalogue import look_for
from clearhead.analysis.behaviours.matching import elsewhere, induction, previous
from clearhead.analysis.behaviours.reading import OriginalHeads, SharedRun
from clearhead.analysis.behaviours.tally import tally
from clearhead.model.access import Model
from tests.circuits.induction import induction_model

NAMES = {behaviour.name: behaviour for behaviour in ATTENTION}


def test_the_built_heads_are_found():
    model = induction_model()
    tokens = torch.tensor([[1, 3 + n, 4 + n, 5 + n, 3 + n, 4 + n, 5 + n] for n in range(5)])
    shared = SharedRun(model)
    before = Probe("hand", (tokens,), (previous(tokens),), (previous(tokens, 2),), positional=True)
    shares = NAMES["previous_token"].score(before, [OriginalHeads(model, 0, shared).read(tokens)]).score
    assert shares.argmax() == 2 and shares[2] > 0.7 and np.delete(shares, 2).max() < 0.3
    keys = induction(tokens)
    again = Probe("hand", (tokens,), (keys,), (elsewhere(keys),))
    rows = tally(again, [OriginalHeads(model, 1, shared).read(tokens)])
    assert rows.excess().argmax() == 1 and rows.excess()[1] > 0.3


@pytest.fixture(scope="module")
def tiny_heads():
    """Scores of clearhead-tiny's heads by behaviour, two layers of four."""
    model = Model.load("clearhead-tiny")
    shared = SharedRun(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clearhead.analysis.behaviours.probe_text.NATURAL", 1)
        patch.setattr("clearhead.analysis.behaviours.probe_text.AGAIN", 1)
        probes = {behaviour.name: behaviour.probe(model, 0) for behaviour in ATTENTION}
    heads = [OriginalHeads(model, layer, shared) for layer in (0, 1)]
    (found,) = look_for(heads, ATTENTION, probes, by_chance=False)
    return {name: np.stack([one.scores.score for one in found if one.behaviour.name == name]) for name in NAMES}


def test_the_tiny_models_known_heads_stand_out(tiny_heads):
    assert np.unravel_index(tiny_heads["previous_token"].argmax(), (2, 4)) == (0, 1)
    total = sum(tiny_heads[name] for name in ("induction", "token_induction", "subtoken_induction"))
    assert total[0].max() < 0.1 and total[1].min() > 0.15 and total[1, 3] > 0.35
