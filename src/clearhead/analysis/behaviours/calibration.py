"""Where the thresholds come from: every detector on planted units, and on the same units reading shuffled text.

    precision        of the units found, the share that were planted with the behaviour
    recall           of the units planted with it, the share found
    by chance        of all planted units, the share found on shuffled text
    interval         Wilson's for a share of n units, 95 %: it is no point where all n are right

    threshold        the middle of the interval in which precision is at least 0.95, at most 1 % are found by chance and
                     recall is at least what it is at the interval's beginning, less 5 points; rounded to 0.05

Detectors do not see what a unit was planted as. Nothing here looks at a model's heads; the model gives the tokenizer,
the probes' texts and the logit directions. Behaviours of words and digits, whose prompts clearhead-tiny cuts into
pieces, are planted in the tokens of a model that has these words (word_model.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from clearhead.analysis.behaviours.behaviour import Behaviour, Scores
from clearhead.analysis.behaviours.catalogue import build_probes, same_text, score_all
from clearhead.analysis.behaviours.planted import STRAY, PlantedUnit, PlantedUnits, plant_units
from clearhead.model.access import Model
from clearhead.runs import progress

PRECISION, CHANCE = 0.95, 0.01
Z = 1.96
"""Standard deviations of a 95 % interval."""
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

    def intervals(self, behaviour: Behaviour) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
        """95 % intervals of the three rates at the behaviour's own threshold."""
        precision, recall, chance = self.rates(behaviour)
        n_found = int(behaviour.found(self.scores[behaviour.name]).sum())
        return (
            wilson(precision, n_found),
            wilson(recall, sum(unit.shows == behaviour.name for unit in self.units)),
            wilson(chance, len(self.units)),
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

        Units that hardly follow a behaviour are a kind of their own, all in one, as are all decoys and the units of
        all stray habits.
        """
        names = [behaviour.name for behaviour in self.behaviours]
        kinds = [*names, "hardly any", "stray", "decoys"]
        others = [("hardly any" if u.kind in names else "stray" if u.kind in STRAY else "decoys") for u in self.units]
        of = [unit.shows or other for unit, other in zip(self.units, others, strict=True)]
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


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of n cases (Wilson 1927); (0, 1) where there are none."""
    if n == 0:
        return 0.0, 1.0
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * (share * (1 - share) / n + Z**2 / (4 * n**2)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def calibrate_all(
    behaviours: Sequence[Behaviour], text: Model, words: Model, *, per_kind: int = 20, seeds: Sequence[int] = (0,)
) -> Iterator[Calibration]:
    """Behaviours on text in the tokens of `text`, those of `OF_WORDS` in the tokens of `words`."""
    for model, of_words in ((text, False), (words, True)):
        chosen = [behaviour for behaviour in behaviours if (behaviour.name in OF_WORDS) is of_words]
        yield calibrate(chosen, model, per_kind=per_kind, seeds=seeds)


def calibrate(
    behaviours: Sequence[Behaviour], model: Model, *, per_kind: int = 20, seeds: Sequence[int] = (0,)
) -> Calibration:
    """Plant `per_kind` units of each behaviour and others beside them with each seed, and score them all."""
    units: list[PlantedUnit] = []
    scores: dict[str, list[Scores]] = {behaviour.name: [] for behaviour in behaviours}
    shuffled: dict[str, list[Scores]] = {behaviour.name: [] for behaviour in behaviours}
    for seed in seeds:
        probes = build_probes(behaviours, model, seed)
        planted = plant_units(behaviours, model, per_kind, seed)
        units += planted
        population = PlantedUnits(planted, model.d_model)
        texts = same_text(behaviours, probes)
        with progress(f"planted units, seed {seed}", 2 * len(texts), "texts") as advance:
            for text in texts:
                own = {one.name: probes[one.name] for one in text}
                dealt = {name: probe.shuffled(seed) for name, probe in own.items()}
                for of_text, into in ((own, scores), (dealt, shuffled)):
                    for (_, name), value in score_all([population], text, of_text).items():
                        into[name].append(value)
                    advance(1)
    return Calibration(
        model.name,
        tuple(behaviours),
        units,
        *({name: _joined(of_seeds) for name, of_seeds in one.items()} for one in (scores, shuffled)),
    )


def _joined(of_seeds: Sequence[Scores]) -> Scores:
    score, cases, best = zip(*of_seeds, strict=True)
    return Scores(np.concatenate(score), np.concatenate(cases), [case for part in best for case in part])
