import pytest
import torch

from clearhead.data.hidden_fact import HiddenFact, nearest_break, prompt
from clearhead.errors import ClearheadError
from tests.data.word_model import word_model

HIDDEN = HiddenFact("Tom came.", " Clara gave a ring.", " Clara gave a", " ring to Tom")


@pytest.fixture(scope="module")
def words():
    return word_model(begin=True)


@pytest.fixture(scope="module")
def text(words):
    return words.tokenize(" Mary came to Tom." * 8, special_tokens=False)[0]


@pytest.mark.parametrize(("depth", "before"), [(0.0, 0), (0.3, 2), (0.4, 7), (1.0, 12)])
def test_a_prompt_is_its_pieces_in_order_and_has_the_length_asked_for(words, text, depth, before):
    length = 4 + 5 + 12 + 6  # <s> Tom came . | fact | text | question and answer
    tokens, answer = prompt(words, HIDDEN, text, length, depth)
    strings = words.token_strings(tokens)
    fact = [" Clara", " gave", " a", " ring", "."]
    rest = words.token_strings(text[-12:])
    assert len(tokens) == length and answer == 3
    assert strings[:4] == ["<s>", "Tom", " came", "."]
    assert strings[4:-6] == [*rest[:before], *fact, *rest[before:]]
    assert strings[-6:] == [" Clara", " gave", " a", " ring", " to", " Tom"]


def test_the_fact_stands_at_the_end_of_a_sentence_or_line():
    strings = ["np", ".", "array", " is", " one", ".", " It", "\n", "ends", ".", " A"]
    assert [nearest_break(strings, depth) for depth in (0, 0.2, 0.3, 0.5, 0.7, 0.9, 1)] == [0, 0, 6, 6, 8, 10, 11]
    assert nearest_break([], 0.5) == 0


def test_a_space_that_is_a_token_belongs_to_the_question(model):
    """clearhead-tiny cuts " 52817" into a space and five digits."""
    text = model.tokenize(" The sea." * 30, special_tokens=False)[0]
    tokens, answer = prompt(model, HiddenFact("One.", " It is 52817.", " It is", " 52817"), text, 60, 0.5)
    assert model.token_strings(tokens[-answer:]) == list("52817")
    assert model.token_strings(tokens[-answer - 2 : -answer]) == [" is", " "]


def test_prompts_that_cannot_be_made_are_refused(words, text):
    tokens, _ = prompt(words, HIDDEN, text, 15, 0.5)  # no room for any text
    assert len(tokens) == 15
    with pytest.raises(ClearheadError, match=r"14 tokens cannot hold.*15 tokens of words"):
        prompt(words, HIDDEN, text, 14, 0.5)
    joined = HiddenFact("Tom", " a", " gave to T", "om")
    with pytest.raises(ClearheadError, match="cuts ' gave to T' otherwise where the answer follows"):
        prompt(words, joined, text, 20, 0.5)


def test_texts_longer_than_the_prompt_lose_their_beginning(words, text):
    short, long = (prompt(words, HIDDEN, text[-n:], 20, 1.0)[0] for n in (5, 40))
    assert torch.equal(short, long)
