"""A directory with one run per layer: which runs it holds, and one table for all of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clearhead.commands.table import say, spelled
from clearhead.errors import ClearheadError


def runs_in(path: Path) -> list[Path]:
    """The runs in a directory of several layers, by layer; the path itself where it is a run, or holds none."""
    if (path / "config.json").exists():
        return [path]
    numbered = [folder for folder in path.glob("*") if folder.name.isdecimal() and (folder / "config.json").exists()]
    return sorted(numbered, key=lambda folder: int(folder.name)) or [path]


def refuse_several(path: Path) -> None:
    """Raise `ClearheadError` for a directory of several layers, where a verb takes the run of one."""
    runs = runs_in(path)
    if runs != [path]:
        raise ClearheadError(f"{path} holds a run for each of {len(runs)} layers; name one, as {runs[0]}")


def show_layers(
    rows: Mapping[int, Mapping[str, Any]], columns: Mapping[str, str], left_out: Mapping[int, str], title: str
) -> None:
    """Print one line per layer and the mean over layers; `columns` gives the heading of each key of a row.

    A number that a layer does not have is a dash, and the mean is over the others.
    """
    say(title)
    lines = [["layer", *columns.values()]]
    for layer, row in rows.items():
        lines.append([str(layer), *(spelled(row.get(key)) for key in columns)])
    if len(rows) > 1:
        lines.append(["mean", *(spelled(_mean([row.get(key) for row in rows.values()])) for key in columns)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        say("  " + "  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True)))
    for layer, reason in left_out.items():
        say(f"layer {layer} left out: {reason}")


def _mean(values: list[Any]) -> float | None:
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return sum(numbers) / len(numbers) if numbers else None
