"""Explain units of an atlas and score the explanations: the loop over units, and its rows for the atlas.

For each unit: evidence from the atlas (evidence.py), an explanation from its written side, questions about its judged
side (questions.py), answers of the judge, scores. Explainer and judge are any of the three kinds (template.py,
language_model.py with endpoint.py, or with local.py). A unit whose explanation cannot be had has none, and
the others go on.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol

import numpy as np

from clearhead.atlas import TABLES, Atlas, add_tables
from clearhead.explain.answers import Stopped
from clearhead.explain.evidence import Evidence, read_evidence
from clearhead.explain.questions import CHANCE, Question, Score, Scorer, draw_questions, score_answers
from clearhead.explain.template import Explanation
from clearhead.ops.bootstrap import mean_bounds
from clearhead.runs import progress


class Explainer(Protocol):
    """Writes an explanation from the written side of the evidence; None where none could be had."""

    name: str

    def explain(self, evidence: Evidence) -> Explanation | None:
        """An explanation of the unit."""
        ...


class Judge(Protocol):
    """Answers a question, one truth value per text; None where no answer could be had."""

    name: str

    def judge(self, question: Question, explanation: Explanation) -> tuple[bool, ...] | None:
        """The verdict on every text."""
        ...


class Explained(NamedTuple):
    """What came of one unit. `scores` has an entry for every scorer asked for that could be scored."""

    unit_id: str
    explanation: Explanation | None
    scores: Mapping[Scorer, Score]
    unanswered: int
    """Questions without an answer."""


def explain_units(
    atlas: Atlas,
    unit_ids: Sequence[str],
    explainer: Explainer,
    judge: Judge | None,
    scorers: Sequence[Scorer],
    *,
    seed: int = 0,
    parallel: int = 1,
    unknown: Explanation | None = None,
) -> tuple[list[Explained], str]:
    """Explain these units and score what the explainer wrote; in the order of `unit_ids`.

    Also returned is why it ended before the last unit (a limit was reached), or an empty text. `parallel` units are
    worked on at once. `unknown` stands for explanations that
    are not there, so that a dry run counts what is asked about them. Units without enough examples are left out.
    """

    def one(evidence: Evidence) -> Explained:
        return explain_unit(evidence, explainer, judge, scorers, seed, unknown)

    done: dict[str, Explained] = {}
    reason = ""
    with progress("explain", len(unit_ids), "units") as advance:

        def take(result: Explained) -> None:
            done[result.unit_id] = result
            advance(1)

        try:
            _spread(one, read_evidence(atlas, unit_ids), take, parallel)
        except Stopped as stop:
            reason = str(stop)
    return [done[unit_id] for unit_id in unit_ids if unit_id in done], reason


def explain_unit(
    evidence: Evidence,
    explainer: Explainer,
    judge: Judge | None,
    scorers: Sequence[Scorer],
    seed: int = 0,
    unknown: Explanation | None = None,
) -> Explained:
    """Explain one unit and score the explanation; see `explain_units`."""
    explanation = explainer.explain(evidence) or unknown
    scores: dict[Scorer, Score] = {}
    unanswered = 0
    if explanation is not None and judge is not None:
        for scorer in scorers:
            questions = draw_questions(evidence, scorer, seed)
            answers = [judge.judge(question, explanation) for question in questions]
            unanswered += sum(answer is None for answer in answers)
            score = score_answers(questions, answers, seed)
            if score is not None:
                scores[scorer] = score
    return Explained(evidence.unit_id, explanation, scores, unanswered)


def _spread(
    work: Callable[[Evidence], Explained],
    given: Iterable[Evidence],
    take: Callable[[Explained], None],
    parallel: int,
) -> None:
    """`work` on each of `given`, `parallel` at once, in this thread alone for one; results to `take` as they come.

    An exception or Ctrl-C ends it: what is not begun is not begun, and what was finished by then is taken.
    """
    if parallel == 1:
        for evidence in given:
            take(work(evidence))
        return
    stop = threading.Event()

    def unless_stopped(evidence: Evidence) -> Explained:
        if stop.is_set():
            raise Stopped("stopped")
        return work(evidence)

    running: set[Future[Explained]] = set()

    def collect(least: int) -> None:
        nonlocal running
        while len(running) > least:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            failures = [error for future in finished if (error := future.exception()) is not None]
            for future in finished:
                if future.exception() is None:
                    take(future.result())
            if failures:
                raise failures[0]

    with ThreadPoolExecutor(parallel) as pool:
        try:
            for evidence in given:
                running.add(pool.submit(unless_stopped, evidence))
                collect(parallel)
            collect(0)
        finally:  # after Ctrl-C or a failure, what is under way is waited for and kept, and nothing else begins
            stop.set()
            for future in running:
                future.cancel()
            for future in wait(running).done:
                if not future.cancelled() and future.exception() is None:
                    take(future.result())


def write_explanations(atlas: Atlas, explainer: str, judge: str | None, explained: Sequence[Explained]) -> Atlas:
    """Add what came out to table `explanations` and return the atlas as it then is.

    Rows of these units by this explainer and judge are replaced, and so is a row of this explainer without a score;
    all others stay.
    """
    new = [row for one in explained for row in _rows(one, explainer, judge)]
    units = {row["unit_id"] for row in new}
    kept = [
        row
        for row in atlas.sql("select * from explanations")
        if not (row["unit_id"] in units and row["explainer"] == explainer and row["judge"] in (judge, None))
    ]
    names = [column.name for column in TABLES["explanations"]]
    columns = {name: [row[name] for row in [*kept, *new]] for name in names}
    add_tables(atlas.path, {"explanations": [columns]})
    return Atlas(atlas.path)


def _rows(one: Explained, explainer: str, judge: str | None) -> list[dict[str, Any]]:
    if one.explanation is None:
        return []
    row = {"unit_id": one.unit_id, "explainer": explainer, "explanation": one.explanation.text}
    empty = {"scorer": None, "judge": None, "score": None, "low": None, "high": None, "cases": None}
    return [
        row
        | {"scorer": scorer, "judge": judge}
        | {"score": score.value, "low": score.low, "high": score.high, "cases": score.cases}
        for scorer, score in one.scores.items()
    ] or [row | empty]


def summarise(explained: Sequence[Explained], scorers: Sequence[Scorer], seed: int = 0) -> dict[str, Any]:
    """Numbers over all units: how many were explained, and each scorer's mean with its 95 % interval over units."""
    summary: dict[str, Any] = {
        "units": len(explained),
        "explained": sum(one.explanation is not None for one in explained),
        "without_explanation": sum(one.explanation is None for one in explained),
        "questions_unanswered": sum(one.unanswered for one in explained),
    }
    for scorer in scorers:
        values = np.asarray([one.scores[scorer].value for one in explained if scorer in one.scores])
        summary[f"{scorer}_units"] = len(values)
        if len(values):
            low, high = mean_bounds(values, [seed, 2])
            summary |= {f"{scorer}_mean": float(values.mean()), f"{scorer}_low": low}
            summary |= {f"{scorer}_high": high, f"{scorer}_chance": CHANCE[scorer]}
    return summary
