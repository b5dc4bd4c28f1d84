import pytest
import torch

from clearhead.data import needle
from clearhead.data.hidden_fact import prompt
from clearhead.data.text import documents
from clearhead.errors import ClearheadError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "texts"
    path.mkdir()
    for number in range(40):
        (path / f"{number}.txt").write_text(f"Document {number} tells of the sea. It was a long day. " * 20)
    return str(path)


def test_the_answer_is_in_the_fact_and_not_in_the_question():
    facts = needle.needles(300, seed=1)
    for fact in facts:
        name = fact.fact.split()[0]
        assert name in needle.NAMES.split() and fact.question.count(name) == 2
        assert fact.answer in fact.fact
        assert not any(word in fact.question.split() for word in fact.answer.split() if word not in ("in", "the"))
    assert len({fact.answer for fact in facts}) > 250


def test_by_chance_one_in_2880_is_right():
    lists = [words.split() for words in (needle.COLOURS, needle.THINGS, needle.ROOMS)]
    assert all(len(set(words)) == len(words) for words in lists)
    assert len(lists[0]) * len(lists[1]) * len(lists[2]) == 2880


def test_facts_depend_on_seed_and_index_alone():
    assert needle.needles(5, 3) == needle.needles(50, 3)[:5]
    assert needle.needles(50, 3) != needle.needles(50, 4)


def test_haystacks_are_different_stretches_of_held_out_text(model, folder):
    rows = needle.haystacks(model, 6, 100, folder)
    assert rows.shape == (6, 100) and len({tuple(row.tolist()) for row in rows}) == 6
    text = "".join(model.token_strings(rows.flatten()))
    held_out, training = (
        {document.text[:12] for document in documents(folder, side)} for side in ("held_out", "train")
    )
    assert any(start in text for start in held_out) and not any(f"{start} " in text for start in training)
    with pytest.raises(ClearheadError, match="held-out text of .* fewer than"):
        needle.haystacks(model, 10_000, 100, folder)


def test_a_prompt_holds_the_fact_between_sentences_of_the_haystack(model, folder):
    row = needle.haystacks(model, 1, 128, folder)[0]
    (fact,) = needle.needles(1, 0)
    tokens, answer = prompt(model, fact, row, 128, 0.5)
    text = "".join(model.token_strings(tokens))
    before, after = text.split(fact.fact)
    assert before.startswith(needle.INTRO) and (before.endswith(".") or before == needle.INTRO)
    assert after.endswith(fact.question + fact.answer)
    assert "".join(model.token_strings(tokens[-answer:])) == fact.answer
    assert torch.equal(tokens, prompt(model, fact, row, 128, 0.5)[0])
