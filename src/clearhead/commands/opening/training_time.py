"""How long a training will take and whether it fits: real steps from weights that are thrown away."""

import dataclasses
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from clearhead.commands.printing.table import duration, size
from clearhead.training.train_dictionary import Recipe, train_dictionary

MEASURED_STEPS = 6


def predicted_time(config: Any, recipe: Recipe, memory: int) -> str:
    """The time of the whole training in words; not measured where its `memory`, in bytes, is not free."""
    if not fits(config, memory):
        return f"not measured: only {size(free_memory())} are free"
    rate = training_rate(config, recipe)
    return f"about {duration(config.tokens / rate)} at {rate:,.0f} tokens/s, measured on {MEASURED_STEPS} steps"


def training_rate(config: Any, recipe: Recipe) -> float:
    """Tokens per second of a few real steps in a temporary directory, a Lorsa's from random weights."""
    values = config.to_dict()
    given = {"store": None} if "store" in values else {}
    given |= {"init": "random"} if "init" in values else {}
    with tempfile.TemporaryDirectory() as folder:
        short = dataclasses.replace(
            config,
            tokens=MEASURED_STEPS * config.batch_tokens,
            tracker="none",
            out=Path(folder) / "steps",
            **given,
        )
        return train_dictionary(short, recipe)["tokens_per_second"]


def fits(config: Any, memory: int) -> bool:
    """Whether these bytes are free; of an accelerator nothing is known before it is used."""
    return config.device not in ("auto", "cpu") or memory < free_memory()


def count(module: torch.nn.Module) -> int:
    """Number of parameters, shared ones once."""
    return sum(math.prod(parameter.shape) for parameter in module.parameters())


def free_memory() -> int:
    """Bytes of main memory that new processes can have."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
