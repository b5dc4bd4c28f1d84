"""Where the thresholds come from: every detector on planted units, and on the same units reading shuffled text.

    precision        of the units found, the share that were planted with the behaviour
    recall           of the units planted with it, the share found
    by chance        of all planted units, the share found on shuffled text

    threshold        the middle of the interval in which precision is at least 0.95, at most 1 % are found by chance and
                     recall is at least what it is at the interval's beginning, less 5 points; rounded to 0.05

Detectors do not see what a unit was planted as. Nothing here looks at a model's heads; the model gives the tokenizer,
the probes' texts and the logit directions. Behaviours of words and digits, whose prompts clearhead-tiny cuts into
pieces, are planted in the tokens of a model that has these words (word_model.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from clearhead.analysis.behaviours.behaviour import Behaviour, Scores
from clearhead.analysis.behaviours.catalogue import build_probes, same_text, score_all
from clearhead.analysis.behaviours.planted import PlantedUnit, PlantedUnits, plant_units
from clearhead.model.access import Model

PRECISION, CHANCE = 0.95, 0.01
OF_WORDS = ("successor", "name_mover", "operand")
"""Behaviours whose probes are prompts of certain words and digits."""
GRID = np.arange(1, 20) * 0.05


@dataclass(frozen=True, eq=False)
class Calibration:
    """All detectors on one set of planted units."""

    tokenizer: str
    """Name of the model whose tokens the probes are in."""
    behaviours: tuple[Behaviour, ...]
    units: list[PlantedUnit]
    scores: dict[str, Scores]
    """By behaviour, on its probe."""
    shuffled: dict[str, Scores]
    """The same on the shuffled probe."""

    def rates(self, behaviour: Behaviour, threshold: float | None = None) -> tuple[float, float, float]:
        """(precision, recall, share found by chance) at this threshold, or at the behaviour's own.

        Precision is 1 where nothing is found, recall 0 where nothing was planted.
        """
        threshold = behaviour.threshold if threshold is None else threshold
        found, chance = (
            (one[behaviour.name].score >= threshold) & (one[behaviour.name].cases >= behaviour.min_cases)
            for one in (self.scores, self.shuffled)
        )
        has = np.array([unit.shows == behaviour.name for unit in self.units])
        right = int((found & has).sum())
        return (
            right / max(int(found.sum()), right, 1) if found.any() else 1.0,
            right / max(int(has.sum()), 1),
            float(chance.mean()),
        )

    def tested(self, behaviour: Behaviour) -> int:
        """Units planted with the behaviour that have cases enough to be found."""
        has = np.array([unit.shows == behaviour.name for unit in self.units])
        return int((has & (self.scores[behaviour.name].cases >= behaviour.min_cases)).sum())

    def choose_threshold(self, behaviour: Behaviour) -> float | None:
        """As the module's docstring says; None where no threshold meets the requirements."""
        rates = [self.rates(behaviour, float(threshold)) for threshold in GRID]
        good = [precision >= PRECISION and chance <= CHANCE for precision, _, chance in rates]
        if not any(good):
            return None
        low = good.index(True)
        recall = rates[low][1]
        high = max(i for i in range(low, len(GRID)) if good[i] and rates[i][1] >= recall - 0.05)
        return float(round((GRID[low] + GRID[high]) / 2 / 0.05) * 0.05)

    def confusion(self) -> tuple[list[str], Int64[np.ndarray, "kinds detectors"], Int64[np.ndarray, " kinds"]]:
        """Kinds of units, how many of each every detector finds, and how many there are.

        Units that hardly follow a behaviour are a kind of their own, all in one, as are those of all stray habits.
        """
        names = [behaviour.name for behaviour in self.behaviours]
        kinds = [*names, "hardly any", "stray"]
        of = [unit.shows or ("hardly any" if unit.kind in names else "stray") for unit in self.units]
        row = np.array([kinds.index(kind) for kind in of])
        table = np.zeros((len(kinds), len(names)), dtype=np.int64)
        for column, behaviour in enumerate(self.behaviours):
            np.add.at(table[:, column], row, behaviour.found(self.scores[behaviour.name]))
        return kinds, table, np.bincount(row, minlength=len(kinds))

    def lowest_and_highest(self, behaviour: Behaviour) -> tuple[Float64[np.ndarray, " p"], Float64[np.ndarray, " o"]]:
        """Scores of the units that have the behaviour, ascending, and of the others, descending."""
        has = np.array([unit.shows == behaviour.name for unit in self.units])
        score = self.scores[behaviour.name].score
        return np.sort(score[has]), np.sort(score[~has])[::-1]


def calibrate_all(
    behaviours: Sequence[Behaviour], text: Model, words: Model, *, per_kind: int = 20, seed: int = 0
) -> list[Calibration]:
    """Behaviours on text in the tokens of `text`, those of `OF_WORDS` in the tokens of `words`."""
    calibrations = []
    for model, of_words in ((text, False), (words, True)):
        chosen = [behaviour for behaviour in behaviours if (behaviour.name in OF_WORDS) is of_words]
        calibrations.append(calibrate(chosen, model, per_kind=per_kind, seed=seed))
    return calibrations


def calibrate(behaviours: Sequence[Behaviour], model: Model, *, per_kind: int = 20, seed: int = 0) -> Calibration:
    """Plant `per_kind` units of each behaviour and others beside them, and score them all."""
    units = plant_units(behaviours, model, per_kind, seed)
    population = PlantedUnits(units, model.d_model)
    probes = build_probes(behaviours, model, seed)
    scores: dict[str, Scores] = {}
    shuffled: dict[str, Scores] = {}
    for text in same_text(behaviours, probes):
        own = {one.name: probes[one.name] for one in text}
        dealt = {name: probe.shuffled(seed) for name, probe in own.items()}
        scores |= {name: value for (_, name), value in score_all([population], text, own).items()}
        shuffled |= {name: value for (_, name), value in score_all([population], text, dealt).items()}
    return Calibration(model.name, tuple(behaviours), units, scores, shuffled)
