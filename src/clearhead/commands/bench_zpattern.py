"""`clearhead bench zpattern`: times the exact split of activations over source tokens, and keeps the result."""

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clearhead.analysis.patterns import time_z_pattern
from clearhead.commands.table import say, show
from clearhead.config import BenchZPattern
from clearhead.runs import environment, written_aside


def plan(config: BenchZPattern) -> dict[str, Any]:
    """What will be timed."""
    return {
        "tokens": config.blocks * config.context,
        "heads": config.heads,
        "activations, at most": config.blocks * config.context * config.k,
        "passes": config.repeats,
        "threads": config.threads,
        "report in": config.out,
    }


def run(config: BenchZPattern) -> None:
    """Time, print, and write benchmarks/DATE-zpattern.md."""
    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name != "out"}
    numbers = time_z_pattern(**sizes)
    show(numbers, f"z patterns of {config.blocks * config.context:,} tokens and {config.heads:,} heads, medians:")
    title = "z pattern: the exact split of every activation over its source tokens"
    say(f"written to {write_report(config.out, 'zpattern', title, sizes, numbers)}")


def write_report(
    folder: Path, name: str, title: str, sizes: Mapping[str, object], numbers: Mapping[str, float]
) -> Path:
    """Write DATE-NAME.md with settings, numbers, machine and command, and return its path."""
    env = environment()
    report = [
        f"# {title}",
        "",
        ", ".join(f"{option} = {value}" for option, value in sizes.items()) + ". Medians.",
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
