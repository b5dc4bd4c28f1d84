"""`clearhead bench lorsa`: times one training step; the benchmark itself prints and writes its report."""

from typing import Any

from clearhead.bench.lorsa import bench_lorsa
from clearhead.commands.printing.table import size
from clearhead.config import BenchLorsa


def plan(config: BenchLorsa) -> dict[str, Any]:
    """What will be timed against what."""
    parameters = 2 * config.heads * config.d_model + 2 * config.groups * config.d_qk * config.d_model
    return {
        "implementations": ["ours", "dense"] + (["reference"] if config.reference_python else []),
        "tokens per step": config.batch * config.context,
        "weights": parameters,
        "pre-activations": size(4 * config.batch * config.context * config.heads),
        "steps of each": config.repeats,
        "threads": config.threads,
        "report in": config.out,
    }


def run(config: BenchLorsa) -> None:
    """Time, print and write."""
    bench_lorsa(config)
