import dataclasses

import numpy as np
import pytest
import torch

from clearhead.analysis.behaviours.attention import ATTENTION
from clearhead.analysis.behaviours.behaviour import Habit, Probe
from clearhead.analysis.behaviours.catalogue import look_for, rows_of
from clearhead.analysis.behaviours.matching import previous
from clearhead.analysis.behaviours.planted import PlantedUnit, PlantedUnits
from clearhead.atlas.schema import TABLES

PREVIOUS = ATTENTION[0]


class Texts:
    """Stands for the model: tokens as text."""

    def token_strings(self, ids):
        return [f"<{int(token)}>" for token in ids]


@pytest.fixture(scope="module")
def found():
    tokens = tuple(torch.randint(50, (4, 20), generator=torch.Generator().manual_seed(n)) for n in range(2))
    probe = Probe(
        "random", tokens, tuple(map(previous, tokens)), tuple(previous(one, 2) for one in tokens), positional=True
    )
    units = [
        PlantedUnit("previous_token", Habit(previous), 1.0, "anything", False, 0.2, 0.9, 10**6, 1, "previous_token"),
        PlantedUnit("two back", Habit(lambda one: previous(one, 2)), 1.0, "anything", False, 0.2, 0.9, 10**6, 2, None),
    ]
    population = PlantedUnits(units, d_model=6)
    twin = dataclasses.replace(PREVIOUS, name="again")
    (found,) = look_for([population, population], [PREVIOUS, twin], {"previous_token": probe, "again": probe})
    return found


def test_all_behaviours_in_all_populations_in_order(found):
    assert [(one.place, one.behaviour.name) for one in found] == [
        (place, name) for place in (0, 1) for name in ("previous_token", "again")
    ]
    for one in found:
        assert one.found.tolist() == [True, False] and one.by_chance == 0
        assert np.array_equal(one.scores.score, found[0].scores.score)


def test_rows_fit_the_atlas_and_show_the_case(found):
    rows = rows_of(found[0], Texts())
    assert list(rows) == [column.name for column in TABLES["behaviours"]]
    assert rows["unit_id"] == ["planted.0"] and rows["found"] == [True]
    assert rows["keys"][0][0] == rows["query"][0] - 1
    assert rows["threshold"] == [PREVIOUS.threshold] and rows["score"][0] >= PREVIOUS.threshold
    assert len(rows["tokens"][0]) == 20
