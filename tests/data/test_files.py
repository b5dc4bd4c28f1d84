import json

import pyarrow
import pyarrow.parquet
import pytest

from clearhead.data import files
from clearhead.data.files import PASSAGE_BYTES, documents
from clearhead.errors import ClearheadError, CorruptFileError


def _texts(path, split):
    return [document.text for document in documents(path, split)]


def _write_rows(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": rows, "other": list(range(len(rows)))}), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps([{"text": row} for row in rows]))
    else:
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path):
    for number in range(30):
        path = tmp_path / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"book {number}")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    return tmp_path


def test_a_folder_is_split_by_file(folder):
    train, held_out = _texts(folder, "train"), _texts(folder, "held_out")
    assert sorted(train + held_out) == sorted(f"book {number}" for number in range(30))
    assert 1 <= len(held_out) <= 9


def test_a_file_keeps_its_side_when_others_are_added(folder):
    before = set(_texts(folder, "held_out"))
    assert before
    for number in range(30, 60):
        (folder / f"{number}.txt").write_text(f"book {number}")
    assert before <= set(_texts(folder, "held_out"))


def test_even_two_files_hold_out_one(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text(f"book {number}")
    assert len(_texts(tmp_path, "train")) == len(_texts(tmp_path, "held_out")) == 1


def test_files_of_a_folder_take_turns_and_lose_nothing(tmp_path):
    paragraphs = {name: [f"{name} {i} " + "word " * 300 for i in range(40)] for name in "abcdef"}
    for name, parts in paragraphs.items():
        (tmp_path / f"{name}.txt").write_text("\n\n".join(parts))
    found = list(documents(tmp_path, "train")) + list(documents(tmp_path, "held_out"))
    for name, parts in paragraphs.items():
        whole = "".join(document.text for document in found if document.name.startswith(name))
        assert whole == "\n\n".join(parts)
    train = list(documents(tmp_path, "train"))
    n_files = len({document.name.split(":")[0] for document in train})
    assert len({document.name.split(":")[0] for document in train[:n_files]}) == n_files
    assert all(len(document.text.encode()) <= PASSAGE_BYTES for document in found)
    # every passage ends where a paragraph does
    assert all(document.text.endswith(("\n\n", "word ")) for document in found)


@pytest.mark.parametrize("text", ["x" * 50_000, "é" * 30_000, "日本語" * 9_000, "a b\r\n" * 9_000])
def test_passages_never_break_a_character(tmp_path, text):
    (tmp_path / "long.txt").write_text(text, newline="")
    joined = "".join(_texts(tmp_path / "long.txt", "train") + _texts(tmp_path / "long.txt", "held_out"))
    assert joined == text.replace("\r\n", "\n")


def test_a_single_file_holds_out_its_last_tenth(tmp_path):
    lines = [f"line {number:04d}\n" for number in range(1000)]
    (tmp_path / "one.txt").write_text("".join(lines))
    held_out = "".join(_texts(tmp_path / "one.txt", "held_out"))
    train = "".join(_texts(tmp_path / "one.txt", "train"))
    assert train + held_out == "".join(lines)
    assert 0.1 <= len(held_out) / len(train + held_out) < 0.12
    # a folder with one file is that file
    assert "".join(_texts(tmp_path, "held_out")) == held_out


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_rows_are_documents_and_the_last_tenth_is_held_out(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    rows = [f"row {number} é" for number in range(20)]
    _write_rows(path, rows)
    assert _texts(path, "train") == rows[:18]
    assert _texts(path, "held_out") == rows[18:]
    assert [document.name for document in documents(path, "held_out")] == [f"{path.name}:18", f"{path.name}:19"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_one_row_cannot_be_split(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    _write_rows(path, ["alone"])
    with pytest.raises(ClearheadError, match="at least 2 are needed"):
        _texts(path, "train")


def test_json_strings_are_documents_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('"one"\n\n"two"\n')
    assert _texts(path, "train") == ["one"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"caf\xe9 au lait", r"a.txt is not UTF-8: byte 0xe9 at offset 3"),
        ("a.txt", b"\xef\xbb\xbfcaf\xff", r"byte 0xff at offset 6"),
        ("a.txt", b"word " * 5000 + b"\xc3", r"byte 0xc3 at offset 25000"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "caf\xe9"}\n', r"a.jsonl is not UTF-8: byte 0xe9 at offset 30"),
    ],
)
def test_bytes_that_are_not_utf8_are_named_with_their_offset(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ClearheadError, match=words):
        _texts(tmp_path / name, "train") + _texts(tmp_path / name, "held_out")


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"word\n" * 40)
    assert _texts(tmp_path / "a.txt", "train")[0].startswith("word")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n{"text": "b"}\n', "a.jsonl line 2 is not JSON"),
        ("a.json", b'[{"text": "a"}, {"te', "a.json is not JSON"),
        ("a.parquet", b"PAR1 cut off", "not a whole parquet file"),
    ],
)
def test_damaged_files_are_corrupt(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorruptFileError, match=words):
        _texts(tmp_path / name, "train")


def test_a_truncated_parquet_file_is_corrupt(tmp_path):
    path = tmp_path / "a.parquet"
    _write_rows(path, [f"row {number}" for number in range(100)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptFileError, match="a.parquet"):
        _texts(path, "train")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"body": "a", "id": 1}\n{"body": "b"}\n', "line 1 has the fields 'body', 'id'.*'text'"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n{"text": "b"}\n', "line 2"),
        ("a.json", b'{"text": "a"}', "holds a JSON dict"),
    ],
)
def test_rows_without_text_are_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ClearheadError, match=words):
        _texts(tmp_path / name, "train")


def test_parquet_without_text_lists_its_columns(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a", "b"], "id": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ClearheadError, match="the columns body, id; expected a column 'text'"):
        _texts(tmp_path / "a.parquet", "train")


def test_a_folder_without_text_says_what_it_looks_for(tmp_path):
    (tmp_path / "a.png").touch()
    with pytest.raises(ClearheadError, match=r"holds no text: no file ends in .txt"):
        documents(tmp_path, "train")


def test_reading_stops_where_the_reader_stops(tmp_path, monkeypatch):
    for number in range(50):
        (tmp_path / f"{number}.txt").write_text(f"book {number}")
    opened = []
    passages = files._passages
    monkeypatch.setattr(files, "_passages", lambda path, *rest: opened.append(path) or passages(path, *rest))
    next(documents(tmp_path, "train"))
    assert len(opened) <= 1
