import pytest

from clearhead.explain.evidence import Text, read_evidence
from clearhead.explain.rules import Attribute, Condition, Rule, fit_rule, kind_of, word_of


def text(*tokens, start=0):
    return Text(tokens, (0.0,) * len(tokens), start)


@pytest.fixture(scope="module")
def rules(planted):
    return [fit_rule(one.written) for one in read_evidence(planted, [f"lorsa.3.{i}" for i in range(5)])]


def test_each_planted_unit_gets_its_rule(rules):
    token, back, place, repeat, chance = ([one.attribute for one in rule.conditions] for rule in rules)
    assert token == [Attribute("word")] and set(rules[0].conditions[0].allowed) == {"the", "of"}
    assert back == [Attribute("back", 1)] and rules[1].conditions[0].allowed == ("cat",)
    assert place == [Attribute("place")]
    assert rules[2].holds(text(*"abcde", start=0)) == [False, True, True, True, False]
    assert set(repeat) >= {Attribute("word")} and {one.name for one in repeat} & {"repeat", "earlier"}
    assert chance != token and len(chance) < 3


@pytest.mark.parametrize(
    ("attribute", "values"),
    [
        (Attribute("token"), [" A", "b", " A", "b", " A"]),
        (Attribute("word"), ["a", "b", "a", "b", "a"]),
        (Attribute("back", 2), ["", "", "a", "b", "a"]),
        (Attribute("back", 9), [""] * 5),
        (Attribute("repeat", 1), ["", "", "yes", "yes", "yes"]),
        (Attribute("repeat", 2), ["", "", "", "yes", "yes"]),
        (Attribute("earlier", word="b"), ["", "", "yes", "yes", "yes"]),
        (Attribute("earlier", word="z"), [""] * 5),
        (Attribute("place"), ["2 to 3", "2 to 3", "4 to 7", "4 to 7", "4 to 7"]),
    ],
)
def test_attributes(attribute, values):
    assert attribute.values(text(" A", "b", " A", "b", " A", start=2)) == values


def test_conditions_hold_together_and_no_condition_never_holds():
    both = Rule((Condition(Attribute("word"), ("a",)), Condition(Attribute("repeat", 1), ("yes",))))
    assert both.holds(text(" a", "b", " a")) == [False, False, True]
    assert Rule().holds(text(" a", "b")) == [False, False]


def test_a_value_of_one_block_alone_is_not_learned(planted):
    (one,) = read_evidence(planted, ["lorsa.3.1"])
    active = tuple(example._replace(block=0) for example in one.written.active)
    assert fit_rule(one.written._replace(active=active)) == Rule()


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        (" 1,000", "numbers"),
        ("\n\n", "line breaks"),
        ("  ", "white space"),
        (" (", "punctuation"),
        (" NATO", "capitals"),
        (" Paris", "capitalised words"),
        (" cat", "words in lower case"),
        ("ing", "word endings"),
        ("²x", "other signs"),
    ],
)
def test_kinds(token, kind):
    assert kind_of(token) == kind


def test_words():
    assert word_of(" The") == "the" and word_of(" \n") == " \n"
