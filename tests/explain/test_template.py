import pytest

from clearhead.errors import ClearheadError
from clearhead.explain.evidence import Text, read_evidence
from clearhead.explain.questions import Case, Question
from clearhead.explain.rules import Attribute, Condition, Rule
from clearhead.explain.template import Explanation, TemplateExplainer, TemplateJudge

SEVEN = Explanation("on 7", Rule((Condition(Attribute("word"), ("7",)),)))


def case(words, at, truth=True):
    tokens = tuple(words.split())
    return Case(Text(tokens, (0.0,) * len(tokens), 0), at, truth, 0)


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        (0, "It reads 80% from the token itself."),
        (1, "Active where the word before is “cat”. It reads 80% from the token before, 80% from “cat”."),
        (2, "Active at places 1 to 3 of the context."),
        (3, "from an earlier copy of the token"),
    ],
)
def test_sentences(planted, unit, said):
    (evidence,) = read_evidence(planted, [f"lorsa.3.{unit}"])
    assert said in TemplateExplainer().explain(evidence).text


def test_a_unit_without_regularity_is_not_given_one(planted):
    (evidence,) = read_evidence(planted, ["lorsa.3.0"])
    active = tuple(example._replace(block=0, sources=()) for example in evidence.written.active)
    explanation = TemplateExplainer().explain(evidence._replace(written=evidence.written._replace(active=active)))
    assert explanation.text == "No statistic of tokens tells where it is active." and explanation.rule == Rule()


def test_the_judge_applies_the_rule():
    judge = TemplateJudge()
    cases = (case("a 7 b", 1), case("a b c", 1), case("7 b c", 1))
    assert judge.judge(Question("detection", cases), SEVEN) == (True, False, True)
    assert judge.judge(Question("fuzzing", cases), SEVEN) == (True, False, False)
    assert judge.judge(Question("intruder", cases), SEVEN) == (True, False, True)
    all_hold = (case("7", 0), case("7", 0))
    assert judge.judge(Question("intruder", all_hold), SEVEN) == (False, True)


def test_words_alone_are_no_rule():
    with pytest.raises(ClearheadError, match="have a rule to judge by"):
        TemplateJudge().judge(Question("detection", (case("a", 0),)), Explanation("on a"))
