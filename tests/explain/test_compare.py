import numpy as np
import pytest

from clearhead.errors import ClearheadError
from clearhead.explain.compare import compare_scores, compare_units, count_results, scores_in
from clearhead.explain.explain import Explained, write_explanations
from clearhead.explain.questions import Score
from clearhead.explain.template import Explanation


def draws(n, mean, seed):
    return np.random.default_rng(seed).normal(mean, 0.1, n).clip(0, 1).tolist()


def test_who_is_better_wins_and_who_is_worse_loses():
    good, bad = draws(60, 0.8, 0), draws(40, 0.6, 1)
    assert compare_scores(good, bad)[0] == "win" and compare_scores(bad, good)[0] == "loss"
    result, first, second, p = compare_scores(good, bad)
    assert len(first) == len(second) == 40 and p < 1e-6
    assert set(first) <= set(good) and sorted(second) == sorted(bad)


def test_equals_tie_as_often_as_alpha_says():
    results = [compare_scores(draws(30, 0.7, 2 * i), draws(30, 0.7, 2 * i + 1))[0] for i in range(200)]
    assert 0.9 <= results.count("tie") / 200 <= 0.99
    assert compare_scores([0.5] * 9, [0.5] * 9)[0] == "tie"


def test_the_choice_depends_on_the_seed_alone():
    one, other = draws(60, 0.8, 0), draws(20, 0.8, 1)
    assert (compare_scores(one, other, seed=3)[1] == compare_scores(one, other, seed=3)[1]).all()
    assert not (compare_scores(one, other, seed=3)[1] == compare_scores(one, other, seed=4)[1]).all()


def test_layers_and_scorers_apart():
    ours = {(1, "fuzzing"): draws(30, 0.9, 0), (1, "detection"): draws(30, 0.5, 1), (2, "detection"): draws(30, 0.7, 2)}
    others = {(1, "fuzzing"): draws(30, 0.7, 3), (1, "detection"): draws(30, 0.7, 4), (3, "detection"): [0.5]}
    others[2, "detection"] = [0.5] * 4
    found = compare_units(ours, others)
    assert [(one.layer, one.scorer, one.result) for one in found] == [(1, "detection", "loss"), (1, "fuzzing", "win")]
    assert found[1].low < found[1].difference < found[1].high and found[1].low > 0
    assert found[1].difference == pytest.approx(found[1].mean - found[1].other_mean)
    assert count_results(found) == {"win": 1, "loss": 1, "tie": 0}


def test_too_few_scores_are_refused():
    with pytest.raises(ClearheadError, match="5 units on each side; there are 4 and 9"):
        compare_scores([0.5] * 4, [0.5] * 9)


def test_scores_of_an_atlas(write_planted, tmp_path):
    from tests.explain.conftest import PLANTED

    atlas = write_planted(tmp_path / "atlas", PLANTED[:1])
    with pytest.raises(ClearheadError, match="it holds none at all"):
        scores_in(atlas, "template", "template")
    one = Explained("lorsa.3.0", Explanation("x"), {"detection": Score(0.75, 0.5, 1.0, 8)}, 0)
    atlas = write_explanations(atlas, "template", "template", [one])
    assert scores_in(atlas, "template", "template") == {(3, "detection"): [0.75]}
    with pytest.raises(ClearheadError, match="template judged by template"):
        scores_in(atlas, "template", "gpt")
    with pytest.raises(ClearheadError):
        scores_in(atlas, "template", "template", kind="sae")
