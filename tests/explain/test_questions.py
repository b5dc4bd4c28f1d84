import numpy as np
import pytest

from clearhead.explain.evidence import Side, read_evidence
from clearhead.explain.questions import AMONG, CHANCE, SCORERS, TEXTS, Case, Question, draw_questions, score_answers


@pytest.fixture(scope="module")
def evidence(planted):
    return next(iter(read_evidence(planted, ["lorsa.3.1"])))


def answers(questions, judge):
    return [tuple(judge(case) for case in question.cases) for question in questions]


@pytest.mark.parametrize("scorer", SCORERS)
def test_who_knows_scores_one_and_who_says_the_same_always_scores_chance(evidence, scorer):
    questions = draw_questions(evidence, scorer, seed=0)
    right = score_answers(questions, answers(questions, lambda case: case.truth))
    assert (right.value, right.low, right.high) == (1.0, 1.0, 1.0)
    if scorer == "intruder":
        drawn = [question for seed in range(150) for question in draw_questions(evidence, scorer, seed)]
        blind = [tuple(place != i % AMONG for place in range(AMONG)) for i in range(len(drawn))]
        assert abs(score_answers(drawn, blind).value - CHANCE[scorer]) < 0.06
        return
    for constant in (True, False):
        assert (
            score_answers(questions, answers(questions, lambda _, constant=constant: constant)).value == CHANCE[scorer]
        )
    wrong = score_answers(questions, answers(questions, lambda case: not case.truth))
    assert wrong.value == 0


@pytest.mark.parametrize("scorer", SCORERS)
def test_draws_depend_on_seed_and_unit_alone(evidence, scorer):
    assert draw_questions(evidence, scorer, 1) == draw_questions(evidence, scorer, 1)
    assert draw_questions(evidence, scorer, 1) != draw_questions(evidence, scorer, 2)
    assert draw_questions(evidence, scorer, 1) != draw_questions(evidence._replace(unit_id="lorsa.3.9"), scorer, 1)


@pytest.mark.parametrize("scorer", SCORERS)
def test_only_what_no_explanation_was_written_from_is_asked_about(evidence, scorer):
    judged = {example.number for example in evidence.judged.active}
    judged |= {example.number for example, _ in evidence.judged.inactive}
    assert {case.example for q in draw_questions(evidence, scorer, 0) for case in q.cases} <= judged


def test_classes_are_balanced_and_questions_short(evidence):
    for scorer in ("detection", "fuzzing"):
        questions = draw_questions(evidence, scorer, 0)
        truths = [case.truth for question in questions for case in question.cases]
        assert sum(truths) * 2 == len(truths) > 6
        assert all(len(question.cases) <= TEXTS for question in questions)


def test_a_wrong_mark_is_on_an_inactive_token_and_no_question_shows_both_marks(evidence):
    for question in draw_questions(evidence, "fuzzing", 0):
        assert len({case.example for case in question.cases}) == len(question.cases)
        for case in question.cases:
            assert (case.text.activations[case.at] != 0) == case.truth


def test_one_text_in_five_is_silent(evidence):
    questions = draw_questions(evidence, "intruder", 0)
    assert len(questions) >= 2
    for question in questions:
        assert len({case.example for case in question.cases}) == AMONG
        assert [any(case.text.activations) for case in question.cases] == [case.truth for case in question.cases]
        assert sum(case.truth for case in question.cases) == AMONG - 1
    assert len({q.cases.index(next(c for c in q.cases if not c.truth)) for q in questions}) > 1


def test_too_few_examples_make_no_question_and_no_score(evidence):
    silent = evidence._replace(judged=Side(evidence.judged.active, ()))
    for scorer in ("detection", "intruder"):
        assert draw_questions(silent, scorer, 0) == []
    assert score_answers([], []) is None


def test_unanswered_questions_are_left_out(evidence):
    questions = draw_questions(evidence, "detection", 0)
    known = answers(questions, lambda case: case.truth)
    score = score_answers(questions, [known[0], *[None] * (len(questions) - 1)])
    assert score.value == 1 and score.cases == len(questions[0].cases)
    assert score_answers(questions, [None] * len(questions)) is None


def test_the_interval_is_that_of_resampled_examples():
    text = (("a",), (0.0,), 0)
    cases = tuple(Case(text, 0, i < 100, i) for i in range(200))  # pyright: ignore[reportArgumentType]
    answer = tuple(i < 80 or 100 <= i < 110 for i in range(200))  # 80 % and 90 %
    score = score_answers([Question("detection", cases)], [answer])
    assert score.value == pytest.approx(0.85)
    spread = np.sqrt((0.8 * 0.2 + 0.9 * 0.1) / 100) / 2
    assert score.low == pytest.approx(0.85 - 1.96 * spread, abs=0.01)
    assert score.high == pytest.approx(0.85 + 1.96 * spread, abs=0.01)
