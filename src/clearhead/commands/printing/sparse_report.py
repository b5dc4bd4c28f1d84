"""The files that an evaluation of a sparse model leaves, and the page that is made of them; no model is needed."""

import contextlib
import json
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.runs import read_json
from clearhead.view.sparse_page import write_sparse_page

Numbers = dict[str, Any]


def is_sparse_run(run: Path) -> bool:
    """Whether a directory is of `clearhead sparsify`, or holds the evaluation of a sparse model."""
    for file, key, value in (("config.json", "verb", "sparsify"), ("evaluation.json", "kind", KIND)):
        if (run / file).exists():
            found = read_json(run / file)
            if isinstance(found, dict) and found.get(key) == value:
                return True
    return False


KIND = "sparse"
"""What evaluation.json says that it is of; that of a Lorsa says nothing."""


def evaluation_of(run: Path) -> Path:
    """The evaluation of a sparse model. Raises `ClearheadError`, saying which verb writes one, when there is none."""
    path = run / "evaluation.json"
    if not path.exists():
        raise ClearheadError(f"{run} has not been evaluated yet; type: clearhead evaluate {run}")
    return path


def sentences_of(evaluation: Path) -> Path:
    """The file of the edges of sentences that lies beside one of numbers."""
    return evaluation.with_name(f"{evaluation.stem}-sentences.json")


def write_page(run: Path, evaluation: Path, page: Path) -> Path:
    """The page of an evaluated sparse model; returns its path. Raises `ClearheadError` for a training control."""
    numbers = read_json(evaluation)
    if numbers["training"]["control"] != "none":
        raise ClearheadError(
            f"{run} is a control, which has no page of its own; type: clearhead frontier SPARSE_RUN {run}"
        )
    return write_sparse_page(page, numbers, read_json(sentences_of(evaluation)), read_metrics(run))


def read_metrics(run: Path) -> list[Numbers]:
    """The lines of a run's metrics.jsonl, none where there is no such file."""
    path = run / "metrics.jsonl"
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        # a kill can cut the last line; whatever does not parse was never a complete record
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows
