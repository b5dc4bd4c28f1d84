import pytest

from clearhead.explain.answers import Stopped
from clearhead.explain.evidence import explainable
from clearhead.explain.explain import explain_units, summarise, write_explanations
from clearhead.explain.questions import SCORERS
from clearhead.explain.template import Explanation, TemplateExplainer, TemplateJudge


@pytest.fixture(scope="module")
def explained(planted):
    units = explainable(planted)
    return explain_units(planted, units, TemplateExplainer(), TemplateJudge(), SCORERS)


def test_planted_units_are_told_from_chance_on_examples_not_seen(explained):
    done, reason = explained
    assert not reason and [one.unit_id for one in done] == [f"lorsa.3.{i}" for i in range(5)]
    for one in done[:3]:
        assert min(one.scores[scorer].value for scorer in SCORERS) >= 0.9
    assert done[3].scores["detection"].value >= 0.75 and done[3].scores["fuzzing"].value >= 0.9
    assert abs(done[4].scores["fuzzing"].value - 0.5) < 0.2


def test_several_at_once_come_to_the_same(planted, explained):
    units = explainable(planted)
    assert explain_units(planted, units, TemplateExplainer(), TemplateJudge(), SCORERS, parallel=3) == explained


def test_a_limit_ends_it_and_keeps_what_was_explained(planted):
    class Limited(TemplateExplainer):
        left = 2

        def explain(self, evidence):
            if not self.left:
                raise Stopped("enough")
            self.left -= 1
            return super().explain(evidence)

    units = explainable(planted)
    for parallel in (1, 3):
        done, reason = explain_units(planted, units, Limited(), None, (), parallel=parallel)
        assert reason == "enough" and len(done) == 2


def test_an_exception_of_a_worker_is_raised(planted):
    class Broken(TemplateExplainer):
        def explain(self, evidence):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        explain_units(planted, explainable(planted), Broken(), None, (), parallel=3)


def test_rows_replace_those_of_the_same_explainer_and_judge_alone(write_planted, tmp_path, explained):
    from tests.explain.conftest import PLANTED

    done, _ = explained
    atlas = write_planted(tmp_path / "atlas", PLANTED[:2])
    first = [done[0], done[1]._replace(scores={})]
    atlas = write_explanations(atlas, "template", "template", first)
    atlas = write_explanations(atlas, "gpt", "gpt", [done[0]._replace(explanation=Explanation("old"))])
    atlas = write_explanations(
        atlas, "gpt", "gpt", [done[0]._replace(explanation=Explanation("new")), done[1]._replace(explanation=None)]
    )
    rows = atlas.sql("select * from explanations")
    assert sorted((row["unit_id"], row["explainer"], row["scorer"] or "") for row in rows) == [
        *(("lorsa.3.0", who, scorer) for who in ("gpt", "template") for scorer in sorted(SCORERS)),
        ("lorsa.3.1", "template", ""),
    ]
    assert {row["explanation"] for row in rows if row["explainer"] == "gpt"} == {"new"}
    row = next(row for row in rows if row["scorer"] == "detection" and row["explainer"] == "template")
    score = done[0].scores["detection"]
    assert (row["score"], row["low"], row["high"], row["cases"]) == tuple(score)
    assert atlas.about["model"] == "planted" and len(atlas.units()) == 2


def test_the_summary_is_over_units(explained):
    done, _ = explained
    summary = summarise([*done, done[0]._replace(explanation=None, scores={})], SCORERS)
    assert summary["units"] == 6 and summary["explained"] == 5 and summary["without_explanation"] == 1
    values = [one.scores["detection"].value for one in done]
    assert summary["detection_units"] == 5 and summary["detection_mean"] == pytest.approx(sum(values) / 5)
    assert summary["detection_low"] <= summary["detection_mean"] <= summary["detection_high"]
    assert "detection_mean" not in summarise([], SCORERS)
