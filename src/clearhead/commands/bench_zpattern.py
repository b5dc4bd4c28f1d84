"""`clearhead bench zpattern`: times the exact split of activations over source tokens, and keeps the result."""

import dataclasses
from typing import Any

from clearhead.analysis.patterns import time_z_pattern
from clearhead.commands.printing.report import write_report
from clearhead.commands.printing.table import say, show
from clearhead.config import BenchZPattern

MEASURED = "Medians of wall time, attention included"


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
    say(f"written to {write_report(config.out, 'zpattern', title, sizes, MEASURED, numbers)}")
