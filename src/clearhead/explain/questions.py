"""What a judge is asked, drawn at random from the examples that no explanation was written from, and the score.

    detection   which of these texts are active anywhere? As many silent texts as active ones.
    fuzzing     is the marked token the activating one? Every active example once marked rightly, once at a token on
                which the unit is inactive, never both in one question.
    intruder    four active examples, marked, and a silent text with a token marked: which one does not belong?

The score of the first two is the balanced accuracy (mean of the accuracies on either class, chance 1/2), that of the
third the share of intruders found (chance 1/5). Intervals: examples are drawn anew with replacement, each with all its
answers, active and silent ones apart, 1,000 times; 2.5 and 97.5 % quantiles. With few examples they are coarse, and
empty where every answer was right. Draws depend on seed and unit alone.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clearhead.explain.evidence import Evidence, Example, Side, Text
from clearhead.ops.bootstrap import RESAMPLES, bounds

Scorer = Literal["detection", "fuzzing", "intruder"]
SCORERS: tuple[Scorer, ...] = ("detection", "fuzzing", "intruder")
CHANCE: Mapping[Scorer, float] = {"detection": 0.5, "fuzzing": 0.5, "intruder": 0.2}
TEXTS = 8
"""Texts of one question of detection or fuzzing, at most."""
AMONG = 5
"""Examples of a question about an intruder."""


class Case(NamedTuple):
    """A text to judge: the marked token (the activating one, or the one it was cut around), and the right answer."""

    text: Text
    at: int
    truth: bool
    example: int


class Question(NamedTuple):
    """Texts that are judged together."""

    scorer: Scorer
    cases: tuple[Case, ...]


class Score(NamedTuple):
    """A score in [0, 1] with its 95 % interval, and the number of cases judged."""

    value: float
    low: float
    high: float
    cases: int


def draw_questions(evidence: Evidence, scorer: Scorer, seed: int) -> list[Question]:
    """The questions of one scorer about a unit; none where either class lacks examples."""
    words = np.frombuffer(f"{evidence.unit_id}/{scorer}".encode(), dtype=np.uint8)
    rng = np.random.default_rng([seed, *words.tolist()])
    side = evidence.judged
    if scorer == "detection":
        return _together(scorer, _detection(side, rng))
    if scorer == "fuzzing":
        return [question for half in _fuzzing(side, rng) for question in _together(scorer, half)]
    return _intruders(side, rng)


def score_answers(
    questions: Sequence[Question], answers: Sequence[tuple[bool, ...] | None], seed: int = 0
) -> Score | None:
    """The score of what a judge answered; None where it answered no question, or none of one class.

    An answer is as long as the question has cases; None is an answer that could not be had and is left out.
    """
    right: list[tuple[int, bool, bool]] = []
    for question, answer in zip(questions, answers, strict=True):
        if answer is None:
            continue
        if question.scorer == "intruder":
            found = answer.index(False) == [case.truth for case in question.cases].index(False)
            right.append((len(right), True, found))
        else:
            pairs = zip(question.cases, answer, strict=True)
            right += [(case.example, case.truth, case.truth == given) for case, given in pairs]
    one_class = bool(questions) and questions[0].scorer == "intruder"
    if len({truth for _, truth, _ in right}) < (1 if one_class else 2):
        return None
    counts = _counts(right)
    rng = np.random.default_rng([seed, 1])
    strata = np.unique(counts[:, 1::2] > 0, axis=0, return_inverse=True)[1].reshape(-1)
    totals = np.zeros((RESAMPLES, 4), dtype=np.int64)
    for stratum in range(strata.max() + 1):
        rows = counts[strata == stratum]
        totals += rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), RESAMPLES) @ rows
    drawn = _accuracy(totals)
    low, high = bounds(drawn)
    return Score(float(_accuracy(counts.sum(0, keepdims=True))[0]), float(low), float(high), len(right))


def _counts(right: Sequence[tuple[int, bool, bool]]) -> NDArray[np.int64]:
    """Per example: right answers and answers of the active class, the same of the silent class."""
    held: dict[int, list[int]] = {}
    for example, truth, correct in right:
        row = held.setdefault(example, [0, 0, 0, 0])
        row[0 if truth else 2] += correct
        row[1 if truth else 3] += 1
    return np.asarray(list(held.values()), dtype=np.int64)


def _accuracy(totals: NDArray[np.int64]) -> NDArray[np.float64]:
    """Balanced accuracy of each row of counts; the classes asked about are the same in all rows."""
    classes = [(right, asked) for right, asked in (totals.T[:2], totals.T[2:]) if asked.any()]
    return np.mean([right / asked for right, asked in classes], axis=0)


def _detection(side: Side, rng: np.random.Generator) -> list[Case]:
    n = min(len(side.active), len(side.inactive))
    active = [side.active[i] for i in rng.permutation(len(side.active))[:n]]
    silent = [side.inactive[i] for i in rng.permutation(len(side.inactive))[:n]]
    cases = [_active(example) for example in active] + [_silent(example, text) for example, text in silent]
    return [cases[i] for i in rng.permutation(len(cases))]


def _fuzzing(side: Side, rng: np.random.Generator) -> tuple[list[Case], list[Case]]:
    """Two halves: each example is marked rightly in one and wrongly in the other."""
    halves: tuple[list[Case], list[Case]] = ([], [])
    for place, number in enumerate(rng.permutation(len(side.active))):
        case = _active(side.active[number])
        silent = [i for i, activation in enumerate(case.text.activations) if activation == 0]
        if silent:
            halves[place % 2].append(case)
            halves[1 - place % 2].append(case._replace(at=int(rng.choice(silent)), truth=False))
    shuffled = [[half[i] for i in rng.permutation(len(half))] for half in halves]
    return shuffled[0], shuffled[1]


def _intruders(side: Side, rng: np.random.Generator) -> list[Question]:
    """A question for every four active examples, while there is a silent text from another document for each."""
    questions = []
    known = AMONG - 1
    silent = [side.inactive[i] for i in rng.permutation(len(side.inactive))]
    # every active example is used about twice, so that few of them still make some questions
    order = [i for _ in range(2) for i in rng.permutation(len(side.active)).tolist()]
    for low in range(0, len(order) - known + 1, known):
        chosen = list(dict.fromkeys(order[low : low + known]))
        if len(chosen) < known or not silent:
            continue
        cases = [_active(side.active[i]) for i in chosen] + [_silent(*silent.pop())]
        questions.append(Question("intruder", tuple(cases[i] for i in rng.permutation(AMONG))))
    return questions


def _active(example: Example) -> Case:
    text, at = example.cut()
    return Case(text, at, True, example.number)


def _silent(example: Example, text: Text) -> Case:
    """A silent text; what counts as marked is the token the example is of, or the same place in another cut of it."""
    at = example.at + example.text.start - text.start
    _, place = example.cut()
    return Case(text, at if 0 <= at < len(text.tokens) else min(place, len(text.tokens) - 1), False, example.number)


def _together(scorer: Scorer, cases: Sequence[Case]) -> list[Question]:
    """The cases in as few questions as `TEXTS` allows, as even as possible."""
    if not any(case.truth for case in cases) or all(case.truth for case in cases):
        return []
    n = -(-len(cases) // TEXTS)
    bounds = [len(cases) * i // n for i in range(n + 1)]
    return [Question(scorer, tuple(cases[a:b])) for a, b in zip(bounds, bounds[1:], strict=False)]
