"""`clearhead train lorsa`: trains, then prints the numbers of the run and what to do with it.

Its plan needs the model's configuration only, no weights: sizes come from a model without storage. The memory is

    model: parameters x bytes of its dtype      Lorsa: parameters x 16 bytes (weight, gradient, two moments of Adam)
    step: 4 arrays of batch tokens x heads in float32 (values, pre-activations and their gradients)

and, when that fits into what is free, the time is extrapolated from a few real steps in a temporary directory.
"""

import dataclasses
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from clearhead.commands.structure import BYTES, without_weights
from clearhead.commands.table import duration, say, show, size
from clearhead.config import TrainLorsa
from clearhead.dictionaries.init import lorsa_config
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.training.train import train_lorsa

MEASURED_STEPS = 6


def run(config: TrainLorsa) -> None:
    """Train, and print the summary."""
    summary = train_lorsa(config)
    directory = directory_of(config, summary)
    shown = {name: value for name, value in summary.items() if name != "text_sha256"}
    shown["train_seconds"] = duration(summary["train_seconds"])
    shown["peak_memory_bytes"] = size(summary["peak_memory_bytes"])
    show(shown, f"trained in {directory}")
    say(f"next: clearhead evaluate {directory}; clearhead analyze {directory}; clearhead view {directory}")


def directory_of(config: TrainLorsa, summary: dict[str, Any]) -> Path:
    """Where the run that returned `summary` lies."""
    derived = {name: summary[name] for name in ("layer", "heads", "groups")}
    return dataclasses.replace(config, **derived).directory()


def plan(config: TrainLorsa) -> dict[str, Any]:
    """Derived values, parameters, memory and time of a training, none of which is begun."""
    model = without_weights(config.model)
    config = config.resolved(n_layers=model.n_layers, d_model=model.d_model, d_head=model.d_head, n_heads=model.n_heads)
    heads, groups, layer = int(config.heads or 0), int(config.groups or 0), int(config.layer or 0)
    # the rotation has no parameters, and a model without storage has no frequencies to copy
    geometry = dataclasses.replace(model.geometry(layer), rope=None)
    shape = lorsa_config(geometry, model.d_model, heads=heads, groups=groups, k=config.k, activation=config.activation)
    with torch.device("meta"):
        parameters = count(Lorsa(shape))
    memory = {
        "memory of the model": count(model.hf) * BYTES[config.dtype],
        "memory of the Lorsa, gradients and optimiser": parameters * 16,
        "memory of a step": 4 * config.batch_tokens * heads * 4,
    }
    total = sum(memory.values())
    fits = config.device not in ("auto", "cpu") or total < free_memory()
    rows = {
        "model": f"{config.model}: {model.n_layers} layers, width {model.d_model}, {model.n_heads} heads",
        "layer": layer,
        "heads": heads,
        "QK groups": f"{groups} of {heads // groups} heads, {geometry.d_head} wide",
        "active per token": config.k,
        "parameters": parameters,
        "tokens": config.tokens,
        "steps": f"{config.steps():,} of {config.batch_tokens} tokens",
        "directory": config.directory(),
    }
    rows |= {name: size(bytes_) for name, bytes_ in memory.items()} | {"memory, estimated": size(total)}
    return rows | {"time": predicted_time(config) if fits else f"not measured: only {size(free_memory())} are free"}


def predicted_time(config: TrainLorsa) -> str:
    """The time of the whole training at the speed of a few real steps from random weights, thrown away afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        short = dataclasses.replace(
            config,
            tokens=MEASURED_STEPS * config.batch_tokens,
            init="random",
            tracker="none",
            store=None,
            out=Path(folder) / "steps",
        )
        rate = train_lorsa(short)["tokens_per_second"]
    return f"about {duration(config.tokens / rate)} at {rate:,.0f} tokens/s, measured on {MEASURED_STEPS} steps"


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
