"""The rows of a file, whatever holds them: JSON lines, one JSON document, CSV, or parquet.

A row is an object with named values, and `where` it stands is kept for messages. A JSON document is a list of rows, or
one object with a list of rows under `prompts`, whose other keys are the header. Which task format the rows have is not
decided here (task_import.py).
"""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.errors import ClearheadError, CorruptFileError

FILLED = re.compile(r"\S")


class Row(NamedTuple):
    """One row and its place in the file."""

    value: dict[str, Any]
    where: str


class Rows(NamedTuple):
    """All rows of a file, at least one."""

    rows: list[Row]
    header: dict[str, Any] | None
    """What stands beside `prompts`, where the file is one such object."""


def read_rows(path: Path) -> Rows:
    """The rows of a file by its ending, JSON where that is neither csv nor parquet.

    Raises `ClearheadError` where there is no such file or it has no row, `CorruptFileError` where it cannot be read.
    """
    if path.is_dir():
        raise ClearheadError(
            f"{path} is a folder; give a file of rows. A dataset saved to a folder writes one with "
            "datasets.load_from_disk(FOLDER)[SPLIT].to_json(FILE)"
        )
    if not path.exists():
        raise ClearheadError(f"there is no task file {path}")
    if path.suffix == ".parquet":
        found = Rows(_numbered(path, _parquet(path)), None)
    elif path.suffix == ".csv":
        found = Rows(_numbered(path, list(csv.DictReader(io.StringIO(_text(path), newline="")))), None)
    else:
        found = _json(path)
    if not found.rows:
        raise ClearheadError(f"the task file {path} has no items: expected one JSON object per line, or rows")
    return found


def _json(path: Path) -> Rows:
    values = _json_values(path)
    if len(values) == 1 and isinstance(values[0][0], list):
        return Rows(_numbered(path, values[0][0]), None)
    if len(values) == 1 and isinstance(values[0][0], dict) and isinstance(values[0][0].get("prompts"), list):
        header = {key: value for key, value in values[0][0].items() if key != "prompts"}
        return Rows(_numbered(path, values[0][0]["prompts"]), header)
    return Rows([Row(_object(value, where), where) for value, where in values], None)


def _json_values(path: Path) -> list[tuple[Any, str]]:
    """The values that stand one behind the other in a file, on a line each or not, and the line where each begins."""
    text = _text(path)
    decoder = json.JSONDecoder()
    found: list[tuple[Any, str]] = []
    end, line = 0, 1
    while (first := FILLED.search(text, end)) is not None:
        line += text.count("\n", end, first.start())
        where = f"{path}, line {line}"
        try:
            value, end = decoder.raw_decode(text, first.start())
        except json.JSONDecodeError as error:
            raise CorruptFileError(f"{where}: not JSON ({error})") from error
        found.append((value, where))
        line += text.count("\n", first.start(), end)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{path} is not UTF-8 text ({error})") from error


def _parquet(path: Path) -> list[Any]:
    from pyarrow import ArrowInvalid, parquet  # slow to import, and only these files need it

    try:
        return parquet.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise CorruptFileError(f"{path} is not a parquet file ({error})") from error


def _numbered(path: Path, values: list[Any]) -> list[Row]:
    return [
        Row(_object(value, f"{path}, row {number}"), f"{path}, row {number}") for number, value in enumerate(values, 1)
    ]


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CorruptFileError(f"{where}: expected an object of named values, got {json.dumps(value)[:80]}")
    return value
