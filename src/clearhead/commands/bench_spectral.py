"""`clearhead bench spectral`: times decomposition and census, and keeps the result."""

import dataclasses
from typing import Any

from clearhead.bench.spectral import time_spectral
from clearhead.commands.printing.report import write_report
from clearhead.commands.printing.table import say, show
from clearhead.config import BenchSpectral

MEASURED = "Medians of passes that take turns"


def plan(config: BenchSpectral) -> dict[str, Any]:
    """What will be timed."""
    return {
        "model": config.model,
        "tokens": config.blocks * config.context,
        "passes": config.repeats,
        "threads": config.threads,
        "report in": config.out,
    }


def run(config: BenchSpectral) -> None:
    """Time, print, and write benchmarks/DATE-spectral.md."""
    numbers = time_spectral(
        config.model, context=config.context, blocks=config.blocks, repeats=config.repeats, threads=config.threads
    )
    show(numbers, f"spectral lens on {config.model}, medians:")
    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name != "out"}
    title = "The spectral lens: decomposing every head, and a census of firings"
    say(f"written to {write_report(config.out, 'spectral', title, sizes, MEASURED, numbers)}")
