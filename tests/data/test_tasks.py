import json
import re
from dataclasses import replace

import pytest
import torch

from clearhead.data.generators import ioi
from clearhead.data.tasks import Task, TaskItem, logit_difference, measure, task
from clearhead.errors import ClearheadError, CorruptFileError, NonFiniteError, UnknownNameError
from tests.data.word_model import word_model

ITEM = TaskItem(
    clean="When Clara and Tom came, Tom gave a ring to",
    corrupt="When Karen and Lisa came, Mary gave a ring to",
    answers=(" Clara",),
    wrong_answers=(" Tom",),
    template="by hand",
    labels={"IO": 1, "S2": 6},
    label_tokens={"IO": " Clara", "S2": " Tom"},
)


@pytest.fixture(scope="module")
def words():
    return word_model()


@pytest.fixture(scope="module")
def beginning():
    """The same model with a tokenizer that puts a beginning-of-sequence token in front."""
    return word_model(begin=True)


@pytest.mark.parametrize("corrupt", ioi.CORRUPTIONS)
def test_every_ioi_prompt_names_two_people_and_one_of_them_again(words, corrupt):
    made = task("ioi", words, 80, seed=3, corrupt=corrupt)
    names = set(ioi.NAMES.split())
    assert len(made) == 80 and not made.refused
    for item in made.items:
        io, s = item.answers[0].strip(), item.wrong_answers[0].strip()
        people = [word for word in re.findall(r"\w+", item.clean) if word in names]
        changed = [word for word in re.findall(r"\w+", item.corrupt) if word in names]
        order = item.template.split()[-1]
        assert people == ([io, s, s] if order == "ABBA" else [s, io, s])
        if corrupt == "resample":
            assert len({*people, *changed}) == 5
        else:
            assert changed == [*people[:2], io]


def test_ioi_takes_every_template_in_both_orders(words):
    made = task("ioi", words, 2 * len(ioi.TEMPLATES))
    assert len({item.template for item in made.items}) == len(made) == 2 * len(ioi.TEMPLATES)
    assert len(ioi.TEMPLATES) >= 15


@pytest.mark.parametrize("begin", [False, True])
def test_labels_are_indices_into_the_tokens_of_the_model(begin, words, beginning):
    model = beginning if begin else words
    for item in task("ioi", model, 40).items:
        strings = model.token_strings(model.tokenize(item.clean)[0])
        io, s = item.answers[0], item.wrong_answers[0]
        labels = item.labels
        assert strings[0] == ("<s>" if begin else item.clean.split()[0])
        assert strings[labels["IO"]] == io and strings[labels["S1"]] == strings[labels["S2"]] == s
        assert labels["S1"] < labels["S2"] and labels["S1+1"] == labels["S1"] + 1
        assert labels["end"] == len(strings) - 1 and strings[-1] == " to"


def test_prompts_depend_on_seed_and_index_alone(words):
    few, many, other = task("ioi", words, 10, seed=5), task("ioi", words, 30, seed=5), task("ioi", words, 10, seed=6)
    assert few.items == many.items[:10]
    assert all(a != b for a, b in zip(few.items, other.items, strict=True))


def test_ioi_refuses_a_tokenizer_that_splits_names(model):
    with pytest.raises(ClearheadError, match=r"0 of \d+ names.*larger vocabulary"):
        task("ioi", model, 4)


def test_unknown_names_are_refused(words):
    with pytest.raises(UnknownNameError, match="did you mean 'ioi'"):
        task("io", words, 4)
    with pytest.raises(UnknownNameError, match="did you mean 's2_flip'"):
        task("ioi", words, 4, corrupt="s2flip")
    with pytest.raises(ClearheadError, match="at least 1 prompt"):
        task("ioi", words, 0)


def test_batches_hold_each_item_once_in_rows_of_one_length(words):
    made = task("ioi", words, 50)
    seen = []
    for rows in made.batches(8):
        assert rows.clean.shape == rows.corrupt.shape and len(rows.items) == len(rows.clean) <= 8
        for row, index in enumerate(rows.items):
            item = made.items[index]
            assert torch.equal(rows.clean[row], words.tokenize(item.clean)[0])
            assert torch.equal(rows.corrupt[row], words.tokenize(item.corrupt)[0])
            assert words.token_strings(rows.answers[row]) == list(item.answers)
            assert words.token_strings(rows.wrong_answers[row]) == list(item.wrong_answers)
            assert {name: int(place[row]) for name, place in rows.labels.items()} == item.labels
        seen += rows.items
    assert sorted(seen) == list(range(50))


def test_labels_of_a_batch_are_those_that_all_rows_have(words):
    other = replace(ITEM, labels={"IO": 1}, label_tokens={})
    (rows,) = Task.of_items("mixed", words, (ITEM, other)).batches()
    assert {name: place.tolist() for name, place in rows.labels.items()} == {"IO": [1, 1]}


def test_items_that_cannot_be_taken_are_refused_with_their_reason(words):
    cases = {
        "clean and corrupt differ in length": replace(ITEM, corrupt=ITEM.corrupt + " to"),
        "an answer of several tokens": replace(ITEM, answers=(" Clara", " Clara Tom")),
        "a wrong answer of several tokens": replace(ITEM, wrong_answers=(" Tom, Mary",)),
        "an answer that is also a wrong answer": replace(ITEM, wrong_answers=(" Clara",)),
        "a label lies behind the last token": replace(ITEM, labels={"end": 12}, label_tokens={}),
        "labels of another tokenizer": replace(ITEM, labels={"IO": 2}, label_tokens={"IO": " Clara"}),
        "longer than the model's context": replace(ITEM, clean="to" + " to" * 39, corrupt="a" + " a" * 39, labels={}),
    }
    items = (*cases.values(), ITEM)
    items = tuple(replace(item, label_tokens={}) if not item.labels else item for item in items)
    made = Task.of_items("mixed", words, items)
    assert list(made.refused.values()) == list(cases)
    assert list(made.tokens) == [len(cases)]
    found = measure(words, made)
    assert found.items == (len(cases),) and found.refused == dict.fromkeys(cases, 1)


def test_a_task_without_a_usable_item_is_an_error(words, beginning):
    with pytest.raises(ClearheadError, match="no item of the task 'ioi'.*3 × labels of another tokenizer"):
        Task.of_items("ioi", beginning, task("ioi", words, 3).items)


def test_a_saved_task_is_the_same_when_loaded(words, tmp_path):
    made = Task.of_items("mixed", words, (*task("ioi", words, 5).items, replace(ITEM, corrupt="to")))
    made.save(tmp_path / "mixed.jsonl")
    loaded = Task.load(tmp_path / "mixed.jsonl", words)
    assert loaded == made and len(loaded.refused) == 1


def line(**changes: object) -> str:
    value = {
        "clean": "a to",
        "corrupt": "a to",
        "answers": [" to"],
        "wrong_answers": [" a"],
        "template": "",
        "labels": {},
    }
    value |= changes
    return json.dumps({key: item for key, item in value.items() if item is not None})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (line() + "\n{", "line 2: not JSON"),
        ("[3]", "row 1: expected an object"),
        ("3", "line 1: expected an object"),
        (line(answers=None), "lacks answers"),
        (line(corrupted=" to"), "unknown key 'corrupted'"),
        (line(clean=3), "clean: expected text, got 3"),
        (line(answers=" to"), 'answers: expected a list of at least one text, got " to"'),
        (line(wrong_answers=[]), "wrong_answers: expected a list"),
        (line(labels={"end": -1}), "labels: expected an object of token indices"),
        (line(label_tokens={"end": " to"}), "label_tokens: expected an object of texts under names of labels"),
    ],
)
def test_a_line_that_is_no_item_is_named(words, tmp_path, text, message):
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(CorruptFileError, match=re.escape(message)):
        Task.load(path, words)


def test_files_without_items_are_named(words, tmp_path):
    with pytest.raises(ClearheadError, match=r"no task file .*absent\.jsonl"):
        Task.load(tmp_path / "absent.jsonl", words)
    for text in ("\n", "[]", '{"prompts": []}'):
        (tmp_path / "empty.jsonl").write_text(text)
        with pytest.raises(ClearheadError, match="has no items"):
            Task.load(tmp_path / "empty.jsonl", words)
    (tmp_path / "latin.jsonl").write_bytes(b"\xe9")
    with pytest.raises(CorruptFileError, match="not UTF-8"):
        Task.load(tmp_path / "latin.jsonl", words)


def test_measure_is_each_prompt_measured_alone(words):
    made = task("ioi", words, 12)
    found = measure(words, made, batch=5)
    for place, index in enumerate(found.items):
        item = made.items[index]
        logits = words.run(words.tokenize(item.clean)).logits[0, -1]
        answer, wrong = (int(words.tokenize("a" + text)[0, -1]) for text in (item.answers[0], item.wrong_answers[0]))
        assert found.difference[place] == pytest.approx(float(logits[answer] - logits[wrong]), abs=1e-5)
        assert found.right[place] == (logits[answer] > logits[wrong])
        assert found.first[place] == (logits.argmax() == answer)
    assert 0 < found.accuracy < 1  # a random model: some right, some wrong
    assert len(found.wrong) == round(12 * (1 - found.accuracy))
    assert found.mean_difference == pytest.approx(float(found.difference.mean()), abs=1e-6)


def test_several_answers_count_by_their_mean_and_their_best(words):
    item = replace(ITEM, answers=(" Clara", " Mary"), wrong_answers=(" Tom", " Lisa", " Karen"))
    made = Task.of_items("several", words, (item,))
    logits = words.run(words.tokenize(item.clean)).logits[0, -1]
    right, wrong = (
        [int(words.tokenize("a" + t)[0, -1]) for t in texts] for texts in (item.answers, item.wrong_answers)
    )
    found = measure(words, made)
    assert float(found.difference) == pytest.approx(float(logits[right].mean() - logits[wrong].mean()), abs=1e-5)
    assert found.right.tolist() == [bool(logits[right].max() > logits[wrong].max())]


def test_logit_difference_has_gradients(words):
    (rows,) = Task.of_items("one", words, (ITEM,)).batches()
    logits = torch.zeros(1, words.d_vocab, requires_grad=True)
    logit_difference(logits, rows).sum().backward()
    expected = torch.zeros(words.d_vocab)
    expected[rows.answers[0]], expected[rows.wrong_answers[0]] = 1.0, -1.0
    assert torch.equal(logits.grad[0], expected)


def test_logits_that_are_not_finite_are_an_error():
    broken = word_model()
    with torch.no_grad():
        broken.hf.lm_head.weight[0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match="logits of words on the task 'one'"):
        measure(broken, Task.of_items("one", broken, (ITEM,)))
