"""What a verb prints: lines and two-column tables on stdout, numbers with the digits they deserve."""

import sys
from collections.abc import Mapping


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
