"""The requirements on detectors, on units of all kinds and decoys planted together; others are in their own files."""

import numpy as np
import pytest

from clearhead.analysis.behaviours import probe_text
from clearhead.analysis.behaviours.attention import ATTENTION
from clearhead.analysis.behaviours.calibration import CHANCE, OF_WORDS, PRECISION, calibrate_all
from clearhead.analysis.behaviours.registry import BEHAVIOURS
from clearhead.analysis.behaviours.word_model import word_model
from clearhead.model.access import Model

OF_TEXT = {behaviour.name for behaviour in ATTENTION}
OWN_FILES = {"copy_suppression", "thematic_anchor"}
"""Their units do not fit among these: they need the model's expectations, or documents with a theme."""
PLANTED = [behaviour for behaviour in BEHAVIOURS if behaviour.name in OF_TEXT.union(OF_WORDS)]


@pytest.fixture(scope="module")
def calibrations():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_text, "NATURAL", 2)
        patch.setattr(probe_text, "AGAIN", 2)
        return list(calibrate_all(PLANTED, Model.load("clearhead-tiny"), word_model(), per_kind=2))


def test_every_behaviour_is_planted_somewhere(calibrations):
    planted = {behaviour.name for calibration in calibrations for behaviour in calibration.behaviours}
    assert planted | OWN_FILES == {behaviour.name for behaviour in BEHAVIOURS}
    assert [calibration.tokenizer for calibration in calibrations] == ["clearhead-tiny", "words"]


@pytest.mark.parametrize("behaviour", PLANTED, ids=lambda behaviour: behaviour.name)
def test_every_detector_meets_the_requirements(calibrations, behaviour):
    calibration = calibrations[behaviour.name in OF_WORDS]
    precision, recall, chance = calibration.rates(behaviour)
    assert calibration.tested(behaviour) >= 2
    assert precision >= PRECISION
    assert chance <= CHANCE
    assert recall >= 0.5


def test_no_kind_is_taken_for_another(calibrations):
    for calibration in calibrations:
        kinds, table, counts = calibration.confusion()
        names = [behaviour.name for behaviour in calibration.behaviours]
        assert kinds[: len(names)] == names
        assert (np.diag(table) >= 1).all() and counts.sum() == len(calibration.units)
        np.fill_diagonal(table, 0)
        assert not table.any()


def test_the_chosen_threshold_lies_between_the_others_and_the_planted(calibrations):
    calibration, behaviour = calibrations[0], ATTENTION[0]
    chosen = calibration.choose_threshold(behaviour)
    has, others = calibration.lowest_and_highest(behaviour)
    assert others[0] < chosen <= np.median(has)
    assert calibration.rates(behaviour, 1.01)[:2] == (1.0, 0.0)
