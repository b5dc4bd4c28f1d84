"""An explanation that needs no model: the rule of rules.py in words, and where the activation comes from.

The judge of this kind knows nothing but the rule: a text is active where the rule holds at one of its tokens, a marked
token is right where it holds there, and the intruder is the example at whose marked token it fails.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from clearhead.errors import ClearheadError
from clearhead.explain.evidence import Evidence, Example
from clearhead.explain.marks import shown
from clearhead.explain.questions import Question
from clearhead.explain.rules import BACK, Attribute, Condition, Rule, fit_rule, word_of

TEMPLATE = "template"
WORTH_SAYING = 0.2
"""Least share of the activation that a kind of source token is named for."""


class Explanation(NamedTuple):
    """What a unit does in words; from the template explainer also as a rule."""

    text: str
    rule: Rule | None = None


class TemplateExplainer:
    """Explains by counting."""

    name = TEMPLATE

    def explain(self, evidence: Evidence) -> Explanation:
        """The rule that fits the written side best, in words."""
        rule = fit_rule(evidence.written)
        words = [_condition(one) for one in rule.conditions]
        active = "Active " + ", ".join(words) if words else "No statistic of tokens tells where it is active"
        return Explanation(f"{active}.{_sources(evidence.written.active)}", rule)


class TemplateJudge:
    """Judges by the rule of an explanation."""

    name = TEMPLATE

    def judge(self, question: Question, explanation: Explanation) -> tuple[bool, ...]:
        """Whether each text is active, its mark right, or it belongs; raises `ClearheadError` without a rule."""
        rule = explanation.rule
        if rule is None:
            raise ClearheadError("only explanations of the template have a rule to judge by; name another judge")
        if question.scorer == "detection":
            return tuple(any(rule.holds(case.text)) for case in question.cases)
        marks = tuple(rule.holds(case.text)[case.at] for case in question.cases)
        if question.scorer == "fuzzing":
            return marks
        # the examples come in random order, so the first that fails is a random one of them
        intruder = marks.index(False) if False in marks else 0
        return tuple(place != intruder for place in range(len(marks)))


def _condition(condition: Condition) -> str:
    attribute, allowed = condition
    if attribute.name == "place":
        return f"at {_places(allowed)} of the context"
    if attribute.name == "kind":
        return f"on {' or '.join(allowed)}"
    if attribute.name == "repeat":
        what = "the token has" if attribute.back == 1 else f"the last {attribute.back} tokens have"
        return f"where {what} occurred before in the text"
    if attribute.name == "earlier":
        return f"where “{shown(attribute.word)}” stands anywhere before"
    quoted = _either([f"“{shown(value)}”" for value in allowed])
    if attribute.name == "back":
        return f"where the word {_back(attribute)} is {quoted}"
    return f"on the {attribute.name}{'s' if len(allowed) > 1 else ''} {quoted}"


def _places(bands: Sequence[str]) -> str:
    """Bands of places, neighbouring ones joined."""
    ends = sorted([int(number) for number in (band.split(" to ") * 2)[:2]] for band in bands)
    joined = ends[:1]
    for low, high in ends[1:]:
        if joined[-1][1] + 1 == low:
            joined[-1][1] = high
        else:
            joined.append([low, high])
    told = [str(low) if low == high else f"{low} to {high}" for low, high in joined]
    return f"place{'s' if ends[0][0] < ends[-1][1] else ''} {_either(told)}"


def _back(attribute: Attribute) -> str:
    return "before" if attribute.back == 1 else f"{attribute.back} places back"


def _either(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"


def _largest_first(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(shares.items(), key=lambda entry: -entry[1])


def _sources(examples: Sequence[Example]) -> str:
    """Where the activation comes from: shares of the kinds of source token, mean over the examples with a z pattern."""
    share: dict[str, float] = defaultdict(float)
    words: dict[str, float] = defaultdict(float)
    seen = [example for example in examples if example.sources]
    for example in seen:
        for source in example.sources:
            for kind in _kinds(example, source.place):
                share[kind] += source.share / len(seen)
            if 0 <= source.place < example.at:
                words[shown(word_of(example.text.tokens[source.place]))] += source.share / len(seen)
    named = [(kind, part) for kind, part in _largest_first(share) if part >= WORTH_SAYING][:2]
    told = [f"{part:.0%} from {kind}" for kind, part in named]
    told += [f"{part:.0%} from “{word}”" for word, part in _largest_first(words)[:1] if part >= WORTH_SAYING]
    return f" It reads {', '.join(told)}." if told else ""


def _kinds(example: Example, place: int) -> list[str]:
    """What a source token is to the activating one; several may be true."""
    tokens, at = example.text.tokens, example.at
    if place == at:
        return ["the token itself"]
    found = [f"the token {_back(Attribute('back', at - place))}"] if at - place <= BACK else []
    if place + example.text.start == 0:
        found.append("the first token of the context")
    if place >= 0 and tokens[place] == tokens[at]:
        found.append("an earlier copy of the token")
    if place >= 1 and tokens[place - 1] == tokens[at]:
        found.append("the token that followed an earlier copy")
    return found
