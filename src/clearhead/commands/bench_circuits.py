"""`clearhead bench circuits`: times patches of every head against plain forwards, and keeps the result."""

import dataclasses
from typing import Any

from clearhead.bench.circuits import time_circuits
from clearhead.commands.printing.report import write_report
from clearhead.commands.printing.table import say, show
from clearhead.config import BenchCircuits

MEASURED = "Medians of passes that take turns"


def plan(config: BenchCircuits) -> dict[str, Any]:
    """What will be timed."""
    return {
        "model": config.model,
        "tokens": config.tokens,
        "passes": config.repeats,
        "threads": config.threads,
        "report in": config.out,
    }


def run(config: BenchCircuits) -> None:
    """Time, print, and write benchmarks/DATE-circuits.md."""
    numbers = time_circuits(config.model, tokens=config.tokens, repeats=config.repeats, threads=config.threads)
    show(numbers, f"circuits on {config.model}, medians:")
    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name != "out"}
    title = "Circuits: exact patches from shared prefixes, scores of attention edges"
    say(f"written to {write_report(config.out, 'circuits', title, sizes, MEASURED, numbers)}")
