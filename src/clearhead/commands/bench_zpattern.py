"""`clearhead bench zpattern`: times the exact split of activations over source tokens."""

from typing import Any

from clearhead.bench.zpattern import bench_zpattern
from clearhead.config import BenchZPattern


def plan(config: BenchZPattern) -> dict[str, Any]:
    """What will be timed."""
    return {
        "tokens": config.blocks * config.context,
        "heads": config.heads,
        "activations": config.blocks * config.context * config.k,
        "passes": config.repeats,
        "threads": config.threads,
        "report in": config.out,
    }


def run(config: BenchZPattern) -> None:
    """Time, print and write."""
    bench_zpattern(config)
