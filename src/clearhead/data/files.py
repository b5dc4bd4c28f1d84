"""Text from the user's own files: a folder, or one file.

| file | a document is |
|---|---|
| .txt .md .rst and anything else | the file, or a passage of about 16 kB cut at a blank line where the file is longer |
| .jsonl | a line: an object with a string under "text", or a string |
| .json | an element of the list, as in .jsonl |
| .parquet | a row's "text" column |

A folder holds out about one file in ten, at least one, by a hash of its relative path, so a file never changes sides
when others are added; a single file holds out its last tenth. Files of a folder take turns, so any beginning of the
text is varied. Text is UTF-8; other bytes are an error that names the file and the offset, never a replacement sign.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from clearhead.data.document import HELD_OUT_ONE_IN, Document, Split, stable_hash, take_turns
from clearhead.errors import ClearheadError, CorruptFileError

PLAIN = (".txt", ".md", ".rst")
ROWS = (".jsonl", ".json", ".parquet")
PASSAGE_BYTES = 16_384
FIELD = "text"
LINES = (b"\n", b" ")
PARAGRAPHS = (b"\n\n", b"\r\n\r\n", *LINES)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def documents(path: Path, split: Split) -> Iterator[Document]:
    """The documents of one split of a folder or file.

    Raises `ClearheadError` when a folder has no text file or bytes are not UTF-8; `CorruptFileError`
    when a .jsonl, .json or .parquet file does not parse.
    """
    if path.is_dir():
        files = text_files(path)
        if len(files) > 1:
            chosen = _files_of(split, path, files)
            return take_turns(_whole(file, file.relative_to(path).as_posix()) for file in chosen)
        path = files[0]
    return _part(path, split)


def text_files(folder: Path) -> list[Path]:
    """The text files below `folder`, hidden ones left out, in the order of their relative paths."""
    found = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in PLAIN + ROWS
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not found:
        raise ClearheadError(f"{folder} holds no text: no file ends in {' '.join(PLAIN + ROWS)}")
    return found


def _files_of(split: Split, folder: Path, files: list[Path]) -> list[Path]:
    ordered = sorted(files, key=lambda file: stable_hash(file.relative_to(folder).as_posix()))
    held_out = [f for f in ordered if stable_hash(f.relative_to(folder).as_posix()) % HELD_OUT_ONE_IN == 0]
    held_out = (held_out or ordered[:1])[: len(files) - 1]
    return held_out if split == "held_out" else [file for file in ordered if file not in held_out]


def _whole(path: Path, name: str) -> Iterator[Document]:
    if path.suffix.lower() in ROWS:
        return _rows(path, name, 0, None)
    return _passages(path, name, 0, path.stat().st_size)


def _part(path: Path, split: Split) -> Iterator[Document]:
    if path.suffix.lower() in ROWS:
        n_rows = _count_rows(path)
        first_held_out = n_rows - max(1, n_rows // HELD_OUT_ONE_IN)
        bounds = (0, first_held_out) if split == "train" else (first_held_out, n_rows)
        return _rows(path, path.name, *bounds)
    size = path.stat().st_size
    near = size - max(1, size // HELD_OUT_ONE_IN)
    before = max(0, near - PASSAGE_BYTES)
    with path.open("rb") as file:
        file.seek(before)
        boundary = before + _last_break(file.read(near - before), gaps=LINES)
    return _passages(path, path.name, *((0, boundary) if split == "train" else (boundary, size)))


def _passages(path: Path, name: str, start: int, stop: int) -> Iterator[Document]:
    """Passages of bytes start..stop; the file is open only while one is read, however many files take turns."""
    number = 0
    single = stop - start <= PASSAGE_BYTES
    while start < stop:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(min(PASSAGE_BYTES, stop - start))
        if not data:
            raise CorruptFileError(f"{path} became shorter while it was read; run again when it no longer changes")
        if start + len(data) < stop:
            data = data[: _last_break(data)]
        text = _decode(data, path, start)
        if text.strip():
            yield Document(name if single else f"{name}:{number}", text)
            number += 1
        start += len(data)


def _last_break(data: bytes, gaps: tuple[bytes, ...] = PARAGRAPHS) -> int:
    """Where to cut: after the last of the gaps, the first kind found; else before the last character that is begun."""
    for gap in gaps:
        at = data.rfind(gap)
        if at > 0:
            return at + len(gap)
    at = len(data) - 1
    while at > 0 and data[at] & 0xC0 == 0x80:
        at -= 1
    return at if at > 0 else len(data)


def _decode(data: bytes, path: Path, offset: int) -> str:
    if offset == 0 and data.startswith(BYTE_ORDER_MARK):
        data, offset = data[len(BYTE_ORDER_MARK) :], len(BYTE_ORDER_MARK)
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ClearheadError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start} ({error.reason}). "
            f"Convert it, for example: iconv -f latin1 -t utf-8 {path.name}"
        ) from error


def _count_rows(path: Path) -> int:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        n_rows = _open_parquet(path).metadata.num_rows
    elif suffix == ".json":
        n_rows = len(_read_list(path))
    else:
        with path.open("rb") as file:
            n_rows = sum(1 for line in file if line.strip())
    if n_rows < 2:
        raise ClearheadError(f"{path} holds {n_rows} documents; at least 2 are needed, one of them to hold out")
    return n_rows


def _rows(path: Path, name: str, start: int, stop: int | None) -> Iterator[Document]:
    suffix = path.suffix.lower()
    reader = {".parquet": _parquet_rows, ".json": _json_rows, ".jsonl": _jsonl_rows}[suffix]
    for number, (where, row) in enumerate(reader(path)):
        if stop is not None and number >= stop:
            return
        if number < start:
            continue
        text = row.get(FIELD) if isinstance(row, dict) else row
        if not isinstance(text, str):
            fields = f"has the fields {', '.join(map(repr, row))}" if isinstance(row, dict) else "is not an object"
            raise ClearheadError(f"{path} {where} {fields}; each needs a string under {FIELD!r}")
        if text.strip():
            yield Document(f"{name}:{number}", text)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                text = _decode(line, path, offset)
                try:
                    yield f"line {number}", json.loads(text)
                except json.JSONDecodeError as error:
                    raise CorruptFileError(f"{path} line {number} is not JSON ({error.msg}); mend the line") from error
            offset += len(line)


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(_read_list(path)):
        yield f"element {number}", row


def _read_list(path: Path) -> list[Any]:
    text = _decode(path.read_bytes(), path, 0)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CorruptFileError(f"{path} is not JSON ({error}); mend it, or write .jsonl") from error
    if not isinstance(value, list):
        raise ClearheadError(f"{path} holds a JSON {type(value).__name__}; expected a list of texts or of objects")
    return value


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    file = _open_parquet(path)
    columns = file.schema_arrow.names
    if FIELD not in columns:
        raise ClearheadError(f"{path} has the columns {', '.join(columns)}; expected a column {FIELD!r}")
    number = 0
    try:
        for batch in file.iter_batches(batch_size=256, columns=[FIELD]):
            for row in batch.to_pylist():
                yield f"row {number}", row
                number += 1
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise CorruptFileError(f"{path} cannot be read from row {number} on ({error}); write it again") from error
    except UnicodeDecodeError as error:
        raise ClearheadError(f"{path}: a text after row {number} is not UTF-8 ({error.reason})") from error


def _open_parquet(path: Path) -> pyarrow.parquet.ParquetFile:
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise CorruptFileError(f"{path} is not a whole parquet file ({error}); write or download it again") from error
