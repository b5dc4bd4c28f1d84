"""The requirements on detectors of attention patterns; those of what units write are tested beside their decoys."""

import numpy as np
import pytest

from clearhead.analysis.behaviours import probe_text
from clearhead.analysis.behaviours.attention import ATTENTION
from clearhead.analysis.behaviours.calibration import CHANCE, PRECISION, calibrate
from clearhead.model.access import Model


@pytest.fixture(scope="module")
def calibration():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_text, "NATURAL", 2)
        patch.setattr(probe_text, "AGAIN", 2)
        return calibrate(ATTENTION, Model.load("clearhead-tiny"), per_kind=3, seed=0)


@pytest.mark.parametrize("behaviour", ATTENTION, ids=lambda behaviour: behaviour.name)
def test_every_detector_meets_the_requirements(calibration, behaviour):
    precision, recall, chance = calibration.rates(behaviour)
    assert precision >= PRECISION
    assert chance <= CHANCE
    assert recall >= 0.5


def test_no_kind_is_taken_for_another(calibration):
    kinds, table, counts = calibration.confusion()
    assert kinds[: len(ATTENTION)] == [behaviour.name for behaviour in ATTENTION]
    assert (np.diag(table) >= 1).all() and counts.sum() == len(calibration.units)
    np.fill_diagonal(table, 0)
    assert not table.any()


def test_the_chosen_threshold_lies_between_the_others_and_the_planted(calibration):
    behaviour = ATTENTION[0]
    chosen = calibration.choose_threshold(behaviour)
    has, others = calibration.lowest_and_highest(behaviour)
    assert others[0] < chosen <= np.median(has)
    assert calibration.rates(behaviour, 1.01)[:2] == (1.0, 0.0)
