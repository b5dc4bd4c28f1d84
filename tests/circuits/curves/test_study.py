"""A study end to end on the planted circuit: who is used for what, and what both models share."""

import pytest
import torch

from clearhead.circuits.curves.node_level import NodeLevel
from clearhead.circuits.curves.study import Settings, Studied, compare_circuits, split_items, study
from clearhead.data.tasks import Task, TaskItem, TokenIds
from clearhead.errors import ClearheadError
from clearhead.model import Model
from tests.circuits.planted import CIRCUIT, planted_model, planted_rows

SETTINGS = Settings(
    rank="exact",
    policies=("signed", "absolute"),
    ablation="corrupt",
    metric="logit_difference",
    threshold=0.9,
    min_effect=0.5,
    controls=2,
    seed=0,
)


def planted_task(n: int = 12, *, wrong: tuple[int, ...] = (), weak: tuple[int, ...] = ()) -> Task:
    """Items of three templates; `wrong` ones have their answers exchanged, `weak` ones are their own corrupt prompt."""
    rows = planted_rows(n)
    tokens, items = {}, []
    for item in range(n):
        answers, others = rows.answers[item], rows.wrong_answers[item]
        if item in wrong:
            answers, others = others, answers
        corrupt = (rows.clean if item in weak else rows.corrupt)[item].tolist()
        tokens[item] = TokenIds(rows.clean[item].tolist(), corrupt, answers, others)
        items.append(TaskItem("clean", "corrupt", ("a",), ("b",), f"template {item % 3}", {}))
    return Task("planted", tuple(items), tokens, {n: "an answer of several tokens"})


def run_study(models: list[Model], tasks: list[Task], settings: Settings = SETTINGS) -> list[Studied]:
    return study(models, tasks, lambda model, rows: NodeLevel.open(model, "heads", "corrupt", reference=rows), settings)


def test_halves_hold_all_templates_and_no_wrong_prompt():
    split = split_items([planted_model()], [planted_task(12, wrong=(4,))])
    assert split.wrong == [4]
    assert split.accuracy == [pytest.approx(11 / 12)]
    assert set(split.ranked) & set(split.evaluated) == set()
    assert sorted(split.ranked + split.evaluated + split.wrong) == list(range(12))
    for half in (split.ranked, split.evaluated):
        assert {item % 3 for item in half} == {0, 1, 2}


def test_the_planted_circuit_with_everything_that_was_left_out():
    (found,) = run_study([planted_model()], [planted_task(12, wrong=(4,), weak=(6,))])
    assert found.protocol.wrong == (4,)
    assert found.protocol.dropped == (6,)
    assert found.protocol.refused == {"an answer of several tokens": 1}
    assert set(found.protocol.ranked_on) | set(found.protocol.evaluated_on) == set(range(12)) - {4, 6}
    signed, absolute, *random = found.curves
    assert (signed.policy, absolute.policy) == ("signed", "absolute")
    for curve in (signed, absolute):
        assert (curve.first, curve.stable) == (2, 2)
        assert set(curve.circuit) == set(CIRCUIT)
        assert curve.items == found.protocol.evaluated_on
    assert [curve.method for curve in random] == ["random", "random"]
    assert min(float(signed.f.mean() - curve.f.mean()) for curve in random) > 0.2
    scores = found.named_scores()
    assert sorted(scores, key=lambda name: -scores[name])[:2] == list(signed.circuit)
    assert set(found.seconds) == {"scores", "curve, signed", "curve, absolute", "random rankings"}
    assert found.protocol.lines()["evaluated on"] == len(signed.items)


def test_two_models_are_measured_on_what_both_get_right():
    other = planted_model()
    with torch.no_grad():  # the second model confuses its own copy of one token
        other.hf.lm_head.weight[5] *= -1
    dense, changed = run_study([planted_model(), other], [planted_task(12), planted_task(12)])
    assert dense.protocol.evaluated_on == changed.protocol.evaluated_on
    assert dense.protocol.wrong == changed.protocol.wrong == (2, 10)  # the items whose answer is token 5
    assert dense.accuracy == 1
    assert changed.accuracy == pytest.approx(10 / 12)
    assert compare_circuits(dense.curves[0], changed.curves[0], (1, 2, 5)) == {
        "stable circuits": 1.0,
        "first 1": 1.0,
        "first 2": 1.0,
    }


def test_tasks_that_a_model_cannot_do_are_refused():
    with pytest.raises(ClearheadError, match=r"1 of 12 prompts .* \(accuracy: planted 8%"):
        run_study([planted_model()], [planted_task(12, wrong=tuple(range(11)))])
    with pytest.raises(ClearheadError, match="by less than 0.5 on 12 of 12 prompts, which leaves none"):
        run_study([planted_model()], [planted_task(12, weak=tuple(range(12)))])


def test_a_prompt_that_comes_twice_is_in_one_half():
    task = planted_task(12)  # items 8 to 11 are 0 to 3 again
    split = split_items([planted_model()], [task])
    assert sorted(split.ranked + split.evaluated) == list(range(12))
    ranked, evaluated = ({tuple(task.tokens[item].clean) for item in half} for half in split[:2])
    assert not ranked & evaluated
    assert len(ranked) == len(evaluated) == 4
