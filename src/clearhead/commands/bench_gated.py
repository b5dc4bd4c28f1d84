"""`clearhead bench gated`: times gated attention beside dense attention, and keeps the result."""

import dataclasses
from typing import Any

from clearhead.bench.gated import time_gated
from clearhead.commands.printing.report import write_report
from clearhead.commands.printing.table import say, show
from clearhead.config import BenchGated

MEASURED = "Medians of steps that take turns"


def plan(config: BenchGated) -> dict[str, Any]:
    """What will be timed."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def run(config: BenchGated) -> None:
    """On a GPU check the kernels first; time, print, and write benchmarks/DATE-gated.md."""
    if config.device.startswith("cuda"):
        from clearhead.bench.gated_device import check_on_device

        show(check_on_device(config.device), f"kernels on {config.device}:")
    numbers = time_gated(
        *(config.batch, config.heads, config.context, config.width),
        device=config.device,
        repeats=config.repeats,
        threads=config.threads,
    )
    sizes = plan(config)
    sizes.pop("out")
    show(numbers, "gated attention, medians:")
    say(f"written to {write_report(config.out, 'gated', 'Gated attention beside dense', sizes, MEASURED, numbers)}")
