import pytest
import torch

from clearhead.explain.answers import Answers, Spending, Stopped
from clearhead.explain.endpoint import IN_A_ROW
from clearhead.explain.evidence import Text, read_evidence
from clearhead.explain.local import LETTERS, LocalExplainer, LocalJudge, LocalModel
from clearhead.explain.questions import AMONG, Case, Question
from clearhead.explain.template import Explanation
from clearhead.model.access import Model

WORDS = Explanation("Active on seven.")


@pytest.fixture(scope="module")
def model():
    return Model.load("clearhead-tiny")


@pytest.fixture
def make_local(model, tmp_path):
    def make(**options):
        return LocalModel("tiny", lambda: model, Answers(tmp_path / "answers.jsonl"), Spending(), **options)

    return make


def question(scorer, n, words=("a", " cat", " sat")):
    cases = [Case(Text((*words, f" {i}"), (0.0,) * 4, 0), 1, i > 0, i) for i in range(n)]
    return Question(scorer, tuple(cases))


PROMPTS = ("The big", "The big cat sat", "The", "The small dog ran to the")


@pytest.mark.parametrize("options", [(" the", " cat sat"), (" the", " a")], ids=["many tokens", "one token"])
def test_log_probabilities_are_the_models(options, model, make_local, monkeypatch):
    """Together, in several batches, what they share computed once: as each prompt alone."""
    monkeypatch.setattr("clearhead.explain.local.TOKENS_AT_ONCE", 20)
    prompts = [f"About {prompt}" for prompt in PROMPTS]
    for prompt, found in zip(prompts, make_local().log_probabilities(prompts, options), strict=True):
        for option, value in zip(options, found, strict=True):
            given, ids = model.tokenize(prompt), model.tokenize(option, special_tokens=False)
            whole = torch.cat([given, ids], 1)
            logits = model.run(whole)["logits"][0].double().log_softmax(-1)
            at = range(given.shape[1] - 1, whole.shape[1] - 1)
            assert value == pytest.approx(sum(float(logits[i, whole[0, i + 1]]) for i in at), abs=1e-4)


def test_what_prompts_begin_with_is_computed_once(model, make_local):
    widths = []
    handle = model.places.embedding.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape))
    prompts = ["One and the same beginning of it: a", "One and the same beginning of it: b c d"]
    make_local().log_probabilities(prompts, (" the", " a"))
    handle.remove()
    shared = model.tokenize(prompts[0]).shape[1] - 1
    assert [tuple(width) for width in widths] == [(1, shared), (2, model.tokenize(prompts[1]).shape[1] - shared)]


class Fixed:
    """A local model whose log-probabilities a test gives."""

    name, sending = "fixed", True

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def log_probabilities(self, prompts, options):
        self.asked += prompts
        return [self.answer(prompt, options) for prompt in prompts]


def test_what_is_said_whatever_is_shown_cancels():
    def answer(prompt, options):
        bias = [0.0, -3.0]  # Yes is always likelier
        seven = "seven" in prompt.split("Text:")[1]
        return [bias[0] + (0.1 if seven else -0.1), bias[1]]

    judge = LocalJudge(Fixed(answer))  # pyright: ignore[reportArgumentType]
    cases = (Case(Text(("seven",), (1.0,), 0), 0, True, 0), Case(Text(("b",), (0.0,), 0), 0, False, 1))
    assert judge.judge(Question("detection", cases), WORDS) == (True, False)
    assert judge.judge(Question("fuzzing", cases), WORDS) == (True, False)
    assert "«seven»" in judge.local.asked[-2] and "«" not in judge.local.asked[0]


def test_the_intruder_is_the_letter_that_gains_most():
    def answer(prompt, options):
        prior = [5.0, 1.0, 1.0, 1.0, 1.0]
        return [p + 1.0 * (i == 3 and "cat" in prompt) for i, p in enumerate(prior)]

    judge = LocalJudge(Fixed(answer))  # pyright: ignore[reportArgumentType]
    assert judge.judge(question("intruder", AMONG), WORDS) == (True, True, True, False, True)
    assert all(f"\n{letter}: a« cat» sat" in judge.local.asked[0] for letter in LETTERS)


def test_a_small_model_judges_and_a_second_run_computes_nothing(make_local):
    first = make_local()
    verdicts = LocalJudge(first).judge(question("detection", 3), WORDS)
    assert len(verdicts) == 3 and first.spending.requests == 3
    again = make_local()
    assert LocalJudge(again).judge(question("detection", 3), WORDS) == verdicts
    assert (again.spending.requests, again.spending.cached) == (0, 3)


def test_a_dry_run_loads_no_model_and_counts_every_text(make_local, planted):
    def refuse():
        raise AssertionError("loaded")

    local = make_local(sending=False)
    local._load = refuse
    assert LocalJudge(local).judge(question("detection", 3), WORDS) is None
    assert LocalJudge(local).judge(question("intruder", AMONG), WORDS) is None
    (evidence,) = read_evidence(planted, ["lorsa.3.0"])
    assert LocalExplainer(local).explain(evidence) is None
    assert local.spending.requests == 3 + 2 + 1 and local.spending.failed == 0


def test_a_model_writes_on(make_local, monkeypatch):
    monkeypatch.setattr("clearhead.explain.local.WRITTEN_TOKENS", 5)
    local = make_local()
    text = local.continuation("The cat sat on the")
    assert "\n" not in text and make_local().continuation("The cat sat on the") == text


def test_a_prompt_longer_than_the_context_has_no_answer_and_many_end_the_run(make_local):
    local = make_local()

    def ask():
        return local.log_probabilities(["the cat " * 100], [" Yes"])[0]

    assert [ask() for _ in range(IN_A_ROW - 1)] == [None] * (IN_A_ROW - 1)
    assert local.log_probabilities(["the cat"], [" Yes"]) != [None]
    assert [ask() for _ in range(IN_A_ROW - 1)] == [None] * (IN_A_ROW - 1)
    with pytest.raises(Stopped, match="reads 128 tokens"):
        ask()
    assert local.spending.failed == 2 * IN_A_ROW - 1
