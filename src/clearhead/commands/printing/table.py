"""What a verb prints: lines and tables on stdout, numbers with the digits they deserve."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any


def say(text: str) -> None:
    """Print one line on stdout, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show(rows: Mapping[str, object], title: str = "") -> None:
    """Print `rows` as an aligned table, names on the left."""
    if title:
        say(title)
    width = max((len(name) for name in rows), default=0)
    for name, value in rows.items():
        say(f"  {name:<{width}}  {spelled(value)}")


def show_layers(
    rows: Mapping[int, Mapping[str, Any]], columns: Mapping[str, str], left_out: Mapping[int, str], title: str
) -> None:
    """Print one line per layer and the mean over layers; `columns` gives the heading of each key of a row.

    A number that a layer does not have is a dash, and the mean is over the others.
    """
    say(title)
    lines = [["layer", *columns.values()]]
    for layer, row in rows.items():
        lines.append([f"{layer:>5}", *(spelled(row.get(key)) for key in columns)])
    if len(rows) > 1:
        lines.append([" mean", *(spelled(_mean([row.get(key) for row in rows.values()])) for key in columns)])
    show_columns(lines)
    for layer, reason in left_out.items():
        say(f"layer {layer} left out: {reason}")


def show_columns(lines: Sequence[Sequence[str]]) -> None:
    """Print rows of cells, the headings among them, in columns: the first at the left, numbers at the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *cells in lines:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        say("  " + "  ".join((name.ljust(widths[0]), *numbers)))


def spelled(value: object) -> str:
    """A value as a reader wants it: 3 decimals for fractions, thousands apart, lists joined, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value == 0 or 0.001 <= abs(value) < 1000:
            return f"{value:.3f}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2e}"
    if isinstance(value, list | tuple):
        return ", ".join(spelled(item) for item in value)
    return str(value)


def size(n_bytes: float) -> str:
    """Bytes in the unit that leaves 1 to 1000 of it."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"


def duration(seconds: float) -> str:
    """Seconds as `42 s`, `3 min 20 s` or `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _mean(values: list[Any]) -> float | None:
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return sum(numbers) / len(numbers) if numbers else None
