"""Task files of clearhead and of four other projects, recognised by their columns and read as items of one kind.

    clearhead      JSON lines: clean, corrupt, answers, wrong_answers, template, labels (task_item.py)
    AutoCircuit    one JSON object: prompts (clean, corrupt, answers, wrong_answers), word_idxs, seq_labels
    EAP            CSV: clean, corrupted, and correct_idx, incorrect_idx (token ids), or label, or correct_idx alone
                   (YY of a year)
    Edge-Pruning   rows: clean and corrupted with <predict>...</predict>; or prefix, corr_prefix and pronoun,
                   corr_pronoun or digits (YY); or ioi_sentences (also text) and corr_ioi_sentences, whose last word is
                   the answer
    MIB            rows: prompt, *_counterfactual, and metadata, or choices and answerKey, or label

Layouts as read in the projects' own loaders (UFO-101/auto-circuit, hannamw/EAP-IG, princeton-nlp/Edge-Pruning,
hannamw/MIB-circuit-track). Rows come from JSON lines, a JSON document, CSV or parquet alike (task_rows.py). A row that
makes no item, for want of a corrupt prompt or of a wrong answer, is counted under its reason.

What the files do not say: token ids belong to a tokenizer that no file names. An id outside the vocabulary is refused,
another tokenizer's id inside it is not noticed here; `clearhead task FILE` shows the words and the accuracy.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clearhead.data.generators.greater_than import endings, split_at
from clearhead.data.task_item import KEYS, TaskItem, item_of
from clearhead.data.task_rows import Row, read_rows
from clearhead.data.task_tokens import continuation, token_ids
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError
from clearhead.model.access import Model

PREDICT = re.compile("(.*?)<predict>(.*?)</predict>", re.DOTALL)
PREFERRED = ("s2_io_flip_counterfactual", "symbol_counterfactual", "random_counterfactual")
"""The counterfactuals that MIB's circuit track takes, by task."""
NO_CORRUPT = "a row without a corrupt prompt"
NO_WRONG = "a row without a wrong answer"
NO_YEAR = "a year that no greater or no smaller one can follow"


@dataclass(frozen=True)
class Imported:
    """The items of a file."""

    items: tuple[TaskItem, ...]
    left_out: Mapping[str, int]
    """Reason -> how many rows make no item for it."""
    layout: str


class _LeftOutError(Exception):
    """A row that makes no item; the text is the reason."""


@dataclass(frozen=True)
class _Source:
    """What a conversion may need beside the row."""

    model: Model
    template: str
    corrupt: str | None
    endings: dict[str, list[str]] = field(default_factory=dict)
    """Last word of a prompt -> what can end it (generators/greater_than.py)."""


def read_task(path: Path, model: Model, corrupt: str | None = None) -> Imported:
    """The items of a task file, its format recognised.

    corrupt: the column of the corrupt prompt where a format has several (EAP: corrupted, corrupted_hard, ...; MIB: the
        counterfactuals), None for the first, or for MIB's own choice.

    Raises `ClearheadError` naming the formats where none fits, for a file without rows and for token ids outside the
    model's vocabulary, `CorruptFileError` naming the row where a value is of a wrong kind, `UnknownNameError` for a
    corruption that the file does not have.
    """
    found = read_rows(path)
    rows, header = found
    keys = rows[0].value.keys()
    source = _Source(model, path.stem, corrupt)
    if header is not None:
        _single(corrupt, "corrupt")
        return Imported(_auto_circuit(source, rows, header), {}, "AutoCircuit")
    layout = next((name for name, (fits, _) in LAYOUTS.items() if fits(rows[0].value)), None)
    if layout is None:
        raise ClearheadError(
            f"{path} is no task file that is known: its rows have {', '.join(map(str, keys))}. Known are clearhead "
            f"({', '.join(KEYS)}), AutoCircuit (one object with prompts), EAP (clean, corrupted and correct_idx, "
            "incorrect_idx or label), Edge-Pruning (clean, corrupted with <predict>; prefix, corr_prefix and pronoun, "
            "corr_pronoun or digits; ioi_sentences, corr_ioi_sentences) and MIB (prompt, *_counterfactual and choices, "
            "answerKey, label or metadata)"
        )
    convert = LAYOUTS[layout][1]
    items: list[TaskItem] = []
    left_out: Counter[str] = Counter()
    for row in rows:
        try:
            items.append(convert(source, row))
        except _LeftOutError as reason:
            left_out[str(reason)] += 1
    return Imported(tuple(items), dict(left_out), layout)


def _own(source: _Source, row: Row) -> TaskItem:
    _single(source.corrupt, "corrupt")
    return item_of(row.value, row.where)


def _auto_circuit(source: _Source, rows: list[Row], header: dict[str, Any]) -> tuple[TaskItem, ...]:
    """Labels are kept for prompts with as many tokens as `seq_labels`, else `end`, count, or all alike."""
    items = tuple(
        TaskItem(
            _text(row, "clean"),
            _text(row, "corrupt"),
            _texts(row, "answers"),
            _texts(row, "wrong_answers"),
            source.template,
            {},
        )
        for row in rows
    )
    labels, names = header.get("word_idxs") or {}, header.get("seq_labels")
    if not isinstance(labels, dict) or not all(type(index) is int and index >= 0 for index in labels.values()):
        raise CorruptFileError(f"word_idxs: expected an object of token indices from 0, got {labels!r}")
    if not labels:
        return items
    model = source.model
    front = model.tokenize("a").shape[1] - model.tokenize("a", special_tokens=False).shape[1]
    lengths = [len(token_ids(model, item.clean)) - front for item in items]
    if isinstance(names, list) or "end" in labels:
        expected = len(names) if isinstance(names, list) else labels["end"] + 1
    else:
        expected = lengths[0] if len(set(lengths)) == 1 else 0
    if max(labels.values()) >= expected:
        return items
    places = {name: index + front for name, index in labels.items()}
    return tuple(
        _labelled(model, item, places) if length == expected else item
        for item, length in zip(items, lengths, strict=True)
    )


def _labelled(model: Model, item: TaskItem, places: dict[str, int]) -> TaskItem:
    """The item with its labels, and what stands there."""
    ids = token_ids(model, item.clean)
    strings = model.token_strings(ids[place] for place in places.values())
    return TaskItem(
        item.clean,
        item.corrupt,
        item.answers,
        item.wrong_answers,
        item.template,
        places,
        dict(zip(places, strings, strict=True)),
    )


def _eap(source: _Source, row: Row) -> TaskItem:
    columns = [name for name in row.value if name is not None and name.startswith("corrupted")]
    column = _column(source, "corrupted", columns)
    clean, corrupt = _text(row, "clean"), _text(row, column)
    if "incorrect_idx" in row.value:
        answers, wrong = (
            tuple(source.model.token_strings([_id(source.model, row, key)])) for key in ("correct_idx", "incorrect_idx")
        )
        return TaskItem(clean, corrupt, answers, wrong, source.template, {})
    key = "label" if "label" in row.value else "correct_idx"
    return _year(source, clean, corrupt, _number(row, key), row.where)


def _edge_pruning_marked(source: _Source, row: Row) -> TaskItem:
    _single(source.corrupt, "corrupted")
    clean, corrupt = (PREDICT.match(_text(row, key)) for key in ("clean", "corrupted"))
    if clean is None:
        raise CorruptFileError(f"{row.where}: clean: expected <predict>...</predict> around the answer")
    if corrupt is None:
        raise _LeftOutError(NO_WRONG)
    return _answered(source, clean[1], corrupt[1], clean[2], corrupt[2])


def _edge_pruning_pronoun(source: _Source, row: Row) -> TaskItem:
    _single(source.corrupt, "corr_prefix")
    answer, wrong = (_text(row, key) for key in ("pronoun", "corr_pronoun"))
    return TaskItem(
        _text(row, "prefix"), _text(row, "corr_prefix"), (f" {answer}",), (f" {wrong}",), source.template, {}
    )


def _edge_pruning_year(source: _Source, row: Row) -> TaskItem:
    _single(source.corrupt, "corr_prefix")
    return _year(source, _text(row, "prefix"), _text(row, "corr_prefix"), _number(row, "digits"), row.where)


def _edge_pruning_ioi(source: _Source, row: Row) -> TaskItem:
    """The last word is the answer; the wrong one is the last capitalised word that is named twice before it."""
    key = "ioi_sentences" if "ioi_sentences" in row.value else "text"
    _single(source.corrupt, f"corr_{key}")
    clean, _, answer = _text(row, key).strip().rpartition(" ")
    corrupt = _text(row, f"corr_{key}").strip().rpartition(" ")[0]
    names = [word for word in re.findall(r"\b[A-Z]\w+", clean) if word != answer]
    repeated = [name for name in names if names.count(name) > 1]
    if not repeated:
        raise _LeftOutError(NO_WRONG)
    return TaskItem(clean, corrupt, (f" {answer}",), (f" {repeated[-1]}",), source.template, {})


def _mib(source: _Source, row: Row) -> TaskItem:
    columns = [name for name in row.value if name.endswith("_counterfactual")]
    column = _column(source, next((name for name in PREFERRED if name in columns), columns[0]), columns)
    other = row.value[column]
    if not isinstance(other, dict) or not other.get("prompt"):
        raise _LeftOutError(NO_CORRUPT)
    changed = Row(other, f"{row.where}, {column}")
    metadata = row.value.get("metadata")
    if isinstance(metadata, dict) and "indirect_object" in metadata:
        answer, wrong = (_text(Row(metadata, row.where), key) for key in ("indirect_object", "subject"))
    else:
        answer, wrong = _choice(row), _choice(changed)
        if answer == wrong:
            raise _LeftOutError(NO_WRONG)
    return _answered(source, _text(row, "prompt"), _text(changed, "prompt"), f" {answer}", f" {wrong}")


def _choice(row: Row) -> str:
    """The answer of a row of MIB: its label, or the choice (the letter, where choices have letters) of its key."""
    if "choices" not in row.value:
        return str(_filled(row, "label"))
    choices, key = row.value["choices"], _filled(row, "answerKey")
    options = choices.get("label") if isinstance(choices, dict) else choices
    if not isinstance(options, list):
        raise CorruptFileError(f"{row.where}: choices: expected a list, or an object with the list label")
    if isinstance(key, str) and key in options:
        return key
    if not str(key).isdecimal() or int(key) >= len(options):
        raise CorruptFileError(f"{row.where}: answerKey: expected 0 to {len(options) - 1}, got {key!r}")
    return str(options[int(key)])


def _answered(source: _Source, clean: str, corrupt: str, answer: str, wrong: str) -> TaskItem:
    """The item; the space between prompt and answer goes to the answer, or to the prompt where only that works."""
    space = clean.endswith(" ") or answer.startswith(" ")
    clean, corrupt, answer, wrong = clean.rstrip(" "), corrupt.rstrip(" "), answer.strip(" "), wrong.strip(" ")
    forms = (("", " "), (" ", "")) if space else (("", ""),)
    for ending, lead in forms:
        ids = token_ids(source.model, clean + ending)
        if all(continuation(source.model, clean + ending, ids, lead + text) is not None for text in (answer, wrong)):
            break
    else:
        ending, lead = forms[0]
    return TaskItem(clean + ending, corrupt + ending, (lead + answer,), (lead + wrong,), source.template, {})


def _year(source: _Source, clean: str, corrupt: str, start: int, where: str) -> TaskItem:
    """A span of years as in generators/greater_than.py, from the year YY on."""
    if not 0 <= start <= 99:
        raise CorruptFileError(f"{where}: expected the last two digits of a year, 0 to 99, got {start}")
    word = clean.rpartition(" ")[2]
    if word not in source.endings:
        years = [f"{year:02}" for year in range(100)]
        source.endings[word] = endings(source.model, clean) or years
    right, wrong = split_at(source.endings[word], f"{start:02}")
    if not right or not wrong:
        raise _LeftOutError(NO_YEAR)
    return TaskItem(clean, corrupt, right, wrong, source.template, {})


def _column(source: _Source, default: str, columns: Sequence[str]) -> str:
    if source.corrupt is None:
        return default
    if source.corrupt not in columns:
        raise UnknownNameError("corruption of the file", source.corrupt, columns)
    return source.corrupt


def _single(given: str | None, column: str) -> None:
    """Refuse the choice of a corruption where a format has one."""
    if given is not None and given != column:
        raise UnknownNameError("corruption of the file", given, [column])


def _id(model: Model, row: Row, key: str) -> int:
    number = _number(row, key)
    if not 0 <= number < model.d_vocab:
        raise ClearheadError(
            f"{row.where}: {key}: token {number} is outside the vocabulary of {model.name} (0 to {model.d_vocab - 1}); "
            "the file was made with another tokenizer, use it with that model"
        )
    return number


def _number(row: Row, key: str) -> int:
    value = _filled(row, key)
    if isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal()):
        return int(value)
    raise CorruptFileError(f"{row.where}: {key}: expected a whole number, got {value!r}")


def _text(row: Row, key: str) -> str:
    value = _filled(row, key)
    if isinstance(value, str) and value:
        return value
    raise CorruptFileError(f"{row.where}: {key}: expected text, got {value!r}"[:200])


def _texts(row: Row, key: str) -> tuple[str, ...]:
    value = _filled(row, key)
    if isinstance(value, list) and value and all(isinstance(text, str) and text for text in value):
        return tuple(value)
    raise CorruptFileError(f"{row.where}: {key}: expected a list of at least one text, got {value!r}"[:200])


def _filled(row: Row, key: str) -> Any:
    if key not in row.value:
        raise CorruptFileError(f"{row.where}: lacks {key}")
    return row.value[key]


def _has(*keys: str) -> Callable[[dict[str, Any]], bool]:
    return lambda row: all(key in row for key in keys)


LAYOUTS: dict[str, tuple[Callable[[dict[str, Any]], bool], Callable[[_Source, Row], TaskItem]]] = {
    "clearhead": (_has("clean", "corrupt"), _own),
    "Edge-Pruning, marked": (
        lambda row: _has("clean", "corrupted")(row) and "<predict>" in str(row["clean"]),
        _edge_pruning_marked,
    ),
    "EAP": (lambda row: _has("clean", "corrupted")(row) and ("label" in row or "correct_idx" in row), _eap),
    "Edge-Pruning, pronouns": (_has("prefix", "corr_prefix", "pronoun", "corr_pronoun"), _edge_pruning_pronoun),
    "Edge-Pruning, years": (_has("prefix", "corr_prefix", "digits"), _edge_pruning_year),
    "Edge-Pruning, ioi": (
        lambda row: _has("ioi_sentences", "corr_ioi_sentences")(row) or _has("text", "corr_text")(row),
        _edge_pruning_ioi,
    ),
    "MIB": (lambda row: "prompt" in row and any(str(key).endswith("_counterfactual") for key in row), _mib),
}
"""Format -> whether a row has it, and how the row becomes an item."""
