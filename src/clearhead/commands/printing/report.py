"""The report of a benchmark: one markdown file with its settings, numbers, machine and command."""

import datetime
from collections.abc import Mapping
from pathlib import Path

from clearhead.runs import environment, written_aside


def write_report(
    folder: Path, name: str, title: str, sizes: Mapping[str, object], measured: str, numbers: Mapping[str, float]
) -> Path:
    """Write DATE-NAME.md with settings, numbers, machine and command, and return its path.

    `measured` says what the numbers are: medians or means, of CPU or wall time, of what.
    """
    env = environment()
    report = [
        f"# {title}",
        "",
        ", ".join(f"{option} = {value}" for option, value in sizes.items()) + f". {measured}.",
        "",
        "| number | value |",
        "|---|---|",
        *(f"| {number} | {value:.4g} |" for number, value in numbers.items()),
        "",
        f"Machine: {env['processor']}, {env['cores']} cores; torch {env['versions']['torch']}; commit {env['commit']}; "
        f"{datetime.datetime.now().astimezone().isoformat(timespec='minutes')}.",
        "",
        "Command: `" + " ".join(["clearhead", *env["command"][1:]]) + "`",
        "",
    ]
    path = folder / f"{datetime.date.today().isoformat()}-{name}.md"
    with written_aside(path) as aside:
        aside.write_text("\n".join(report), encoding="utf-8")
    return path
