"""The page of inclusion curves, of one run of `clearhead circuit curve` or of several together; no model is needed."""

from collections.abc import Sequence
from pathlib import Path

from clearhead.config import CircuitCurve
from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.runs import read_json
from clearhead.view.curve_page import CurveRun, write_curve_page

SUMMARY = "summary.json"


def is_curve_run(run: Path) -> bool:
    """Whether a directory is of `clearhead circuit curve`."""
    if not (run / "config.json").exists():
        return False
    config = read_json(run / "config.json")
    return isinstance(config, dict) and config.get("verb") == CircuitCurve.verb


def curves_of(run: Path, *, named: bool = False) -> list[CurveRun]:
    """What a run measured, per model; `named` puts the directory before the model's name.

    Raises `ClearheadError` for a run that is not finished, `CorruptFileError` for a summary that lacks an entry.
    """
    if not is_curve_run(run):
        raise ClearheadError(f"{run} holds no curves; `clearhead circuit curve` writes them")
    if not (run / SUMMARY).exists():
        raise ClearheadError(f"{run} is not finished; type: clearhead circuit curve --from {run} --out {run}")
    summary = read_json(run / SUMMARY)
    found = []
    for each in summary.get("runs", ()):
        missing = {"name", "protocol", "curves", "scores"} - set(each)
        if missing:
            raise CorruptFileError(f"{run / SUMMARY} lacks {', '.join(sorted(missing))}; measure again")
        name = f"{run.name}, {each['name']}" if named else each["name"]
        found.append(CurveRun(name, each["protocol"], each["curves"], each["scores"]))
    if not found:
        raise CorruptFileError(f"{run / SUMMARY} holds no runs; measure again")
    return found


def write_page(runs: Sequence[Path], page: Path) -> Path:
    """One page of all curves of `runs`; returns its path.

    Raises `ClearheadError` for runs of other tasks or levels, whose counts cannot be compared.
    """
    found = [curve for run in runs for curve in curves_of(run, named=len(runs) > 1)]
    for entry in ("task", "level"):
        values = list(dict.fromkeys(str(run.protocol[entry]) for run in found))
        if len(values) > 1:
            raise ClearheadError(
                f"these runs differ in their {entry}: {values[0]} and {values[1]}; compare runs of one {entry}, and "
                "view others on pages of their own"
            )
    return write_curve_page(page, found)
