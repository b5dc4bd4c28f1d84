"""Rows of other projects' layouts, written here by hand, become items; rows that cannot are counted or named."""

import csv
import json
import re

import pyarrow
import pytest
from pyarrow import parquet

from clearhead.data.task_import import read_task
from clearhead.data.tasks import Task, measure
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError

IOI = "When {} and {} came, {} gave a ring to"
CLEAN, CORRUPT = IOI.format("Clara", "Tom", "Tom"), IOI.format("Karen", "Lisa", "Mary")


@pytest.fixture(scope="module")
def words():
    from tests.data.word_model import word_model

    return word_model()


@pytest.fixture
def written(tmp_path):
    """Writes rows, or a text, or a document, and returns the file."""

    def write(content: object, name: str = "made.jsonl"):
        path = tmp_path / name
        if name.endswith(".csv"):
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, content[0].keys())
                writer.writeheader()
                writer.writerows(content)
        elif name.endswith(".parquet"):
            parquet.write_table(pyarrow.Table.from_pylist(content), path)
        elif name.endswith(".jsonl"):
            path.write_text("\n".join(json.dumps(row) for row in content))
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_auto_circuit_keeps_labels_where_the_tokens_are_those_it_counts(words, written):
    short = {"clean": "Tom gave to", "corrupt": "Lisa gave to", "answers": [" Clara"], "wrong_answers": [" Tom"]}
    whole = {"clean": CLEAN, "corrupt": CORRUPT, "answers": [" Clara"], "wrong_answers": [" Tom", " Mary"]}
    made = Task.load(written({"word_idxs": {"IO": 1, "S2": 6, "end": 10}, "prompts": [whole, short]}, "x.json"), words)
    first, second = made.items
    assert first.answers == (" Clara",) and first.wrong_answers == (" Tom", " Mary") and first.template == "x"
    assert first.labels == {"IO": 1, "S2": 6, "end": 10} and first.label_tokens["S2"] == " Tom"
    assert second.labels == {} and len(made) == 2
    names = {"seq_labels": ["a"] * 9, "word_idxs": {"IO": 1}, "prompts": [whole]}
    assert Task.load(written(names, "y.json"), words).items[0].labels == {}


def test_auto_circuit_labels_count_from_the_first_token_of_the_text(written):
    from tests.data.word_model import word_model

    rows = [{"clean": CLEAN, "corrupt": CORRUPT, "answers": [" Clara"], "wrong_answers": [" Tom"]}]
    made = Task.load(written({"word_idxs": {"IO": 1}, "prompts": rows}, "x.json"), word_model(begin=True))
    assert made.items[0].labels == {"IO": 2} and made.items[0].label_tokens == {"IO": " Clara"}


def test_eap_ids_are_tokens_and_corruptions_are_columns(words, written):
    clara, tom = (int(words.tokenize(f"a {name}")[0, -1]) for name in ("Clara", "Tom"))
    flip = IOI.format("Clara", "Tom", "Clara")
    row = {"clean": CLEAN, "corrupted": CORRUPT, "corrupted_hard": flip, "correct_idx": clara, "incorrect_idx": tom}
    path = written([{"": 470} | row], "ioi.csv")
    (item,) = Task.load(path, words).items
    assert (item.clean, item.corrupt, item.answers, item.wrong_answers) == (CLEAN, CORRUPT, (" Clara",), (" Tom",))
    assert Task.load(path, words, corrupt="corrupted_hard").items[0].corrupt == flip
    with pytest.raises(UnknownNameError, match="corruption of the file 'hard'.*corrupted_hard"):
        Task.load(path, words, corrupt="hard")
    with pytest.raises(ClearheadError, match="row 1: correct_idx: token 99999 is outside.*another tokenizer"):
        Task.load(written([row | {"correct_idx": 99999}], "b.csv"), words)


def test_years_are_asked_for_as_the_tokenizer_cuts_them(model, written):
    prompt = "The war lasted from the year 16{} to the year 16"
    rows = [{"clean": prompt.format(y), "corrupted": prompt.format("01"), "label": y} for y in ("32", "95", "40")]
    made = Task.load(written(rows, "gt.csv"), model)
    assert [item.answers for item in made.items] == [tuple("456789"), tuple("56789")]
    assert made.items[0].wrong_answers == tuple("012")
    assert measure(model, made).refused == {"a year that no greater or no smaller one can follow": 1}
    other = [{"prefix": prompt.format(32), "corr_prefix": prompt.format("01"), "digits": "32"}]
    assert Task.load(written(other), model).items[0].answers == tuple("456789")
    with pytest.raises(CorruptFileError, match="line 1: expected the last two digits of a year, 0 to 99, got 1632"):
        Task.load(written([other[0] | {"digits": 1632}]), model)


def test_edge_pruning_rows(words, model, written):
    marked = {"clean": f"{CLEAN} <predict>Clara</predict>.", "corrupted": f"{CORRUPT} <predict>Karen</predict>."}
    bare = {"clean": marked["clean"], "corrupted": CORRUPT}
    found = read_task(written([marked, bare]), words)
    assert found.left_out == {"a row without a wrong answer": 1}
    assert found.items[0].clean == CLEAN and found.items[0].corrupt == CORRUPT
    assert (found.items[0].answers, found.items[0].wrong_answers) == ((" Clara",), (" Karen",))
    sums = {"clean": "1 + 2 = <predict>3</predict>", "corrupted": "1 + 4 = <predict>5</predict>"}
    (item,) = read_task(written("{0}\n{0}".format(json.dumps(sums, indent=1)), "x.json"), model).items[:1]
    assert (item.clean, item.answers, item.wrong_answers) == ("1 + 2 = ", ("3",), ("5",))  # a digit has no space here
    whole = {"ioi_sentences": f"{CLEAN} Clara", "corr_ioi_sentences": f"{CORRUPT} Karen"}
    nobody = {"ioi_sentences": f"{CORRUPT} Karen", "corr_ioi_sentences": f"{CORRUPT} Karen"}
    found = read_task(written([whole, nobody], "x.parquet"), words)
    assert (found.items[0].clean, found.items[0].corrupt) == (CLEAN, CORRUPT)
    assert (found.items[0].answers, found.items[0].wrong_answers) == ((" Clara",), (" Tom",))
    assert found.left_out == {"a row without a wrong answer": 1}
    person = {"prefix": "So Tom isn't", "corr_prefix": "So Ann isn't", "pronoun": "he", "corr_pronoun": "she"}
    assert read_task(written([person]), words).items[0].wrong_answers == (" she",)


def test_mib_rows(words, written):
    def row(prompt, choices, key, **other):
        return {"prompt": prompt, "choices": choices, "answerKey": key} | other

    flip = {"prompt": IOI.format("Clara", "Tom", "Clara"), "choices": ["Clara", "Tom"], "answerKey": 1}
    people = {"subject": "Tom", "indirect_object": "Clara", "random_c": "Mary"}
    abc = {"prompt": CORRUPT, "choices": ["Karen", "Lisa"], "answerKey": 0}
    ioi = row(CLEAN, ["Clara", "Tom"], 0, metadata=people, abc_counterfactual=abc, s2_io_flip_counterfactual=flip)
    path = written([ioi, ioi | {"s2_io_flip_counterfactual": None}], "ioi.parquet")
    made = Task.load(path, words)
    assert made.items[0].corrupt == flip["prompt"] and made.items[0].wrong_answers == (" Tom",)
    assert made.left_out == {"a row without a corrupt prompt": 1} and len(made) == 1
    assert Task.load(path, words, corrupt="abc_counterfactual").items[1].corrupt == CORRUPT
    letters = {"label": ["Tom", "Lisa"], "text": ["red", "blue"]}
    choice = row("Tom gave to", letters, "1", symbol_counterfactual=row("Lisa gave to", letters, "Tom"))
    assert read_task(written([choice]), words).items[0].answers == (" Lisa",)
    with pytest.raises(CorruptFileError, match="answerKey: expected 0 to 1, got 7"):
        read_task(written([choice | {"answerKey": 7}]), words)
    label = {"prompt": "a ring to", "label": "Tom", "random_counterfactual": {"prompt": "a book to", "label": "Lisa"}}
    (item,) = read_task(written([label], "x.json"), words).items
    assert (item.answers, item.wrong_answers) == ((" Tom",), (" Lisa",))


@pytest.mark.parametrize(
    ("content", "name", "says"),
    [
        ([{"question": "a", "answer": "b"}], "x.jsonl", "its rows have question, answer. Known are clearhead.*MIB"),
        ([{"clean": "a", "corrupted": "b"}], "x.csv", "its rows have clean, corrupted. Known are"),
        ({"prompts": [{"clean": [1, 2], "corrupt": "b"}]}, "x.json", "row 1: clean: expected text, got [1, 2]"),
        ({"prompts": [{"clean": "a", "corrupt": "b"}]}, "x.json", "row 1: lacks answers"),
        ([{"clean": "a", "corrupted": "b", "label": "x"}], "x.csv", "row 1: label: expected a whole number, got 'x'"),
        ("PAR1", "x.parquet", "is not a parquet file"),
    ],
)
def test_what_is_no_task_is_named(words, written, tmp_path, content, name, says):
    if content == "PAR1":
        path = tmp_path / name
        path.write_text(content)
    else:
        path = written(content, name)
    with pytest.raises(ClearheadError, match=re.escape(says).replace(r"\.\*", ".*")):
        Task.load(path, words)


def test_a_folder_says_how_to_make_a_file_of_it(words, tmp_path):
    with pytest.raises(ClearheadError, match="is a folder.*to_json"):
        Task.load(tmp_path, words)
