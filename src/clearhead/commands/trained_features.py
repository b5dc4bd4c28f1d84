"""What `train transcoder`, `train sae` and `train clt` print: the plan before, the numbers after.

The plan needs the model's configuration only, no weights. Its memory is that of the model, 16 bytes for every
parameter of the dictionary (weight, gradient, two moments of Adam) and 4 arrays of batch tokens x features of a step.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch

from clearhead.commands.structure import BYTES, without_weights
from clearhead.commands.table import duration, say, show, size
from clearhead.commands.train_lorsa import MEASURED_STEPS, count, free_memory
from clearhead.config import TrainClt, TrainSae, TrainTranscoder
from clearhead.training.train_dictionary import Recipe, train_dictionary

Features = TrainTranscoder | TrainSae | TrainClt


def show_trained(config: Features, summary: dict[str, Any]) -> None:
    """Print the summary of a finished training and the next command."""
    derived = {name: summary[name] for name in ("layer", "features") if name in summary}
    directory = dataclasses.replace(config, **derived).directory()
    shown = {name: value for name, value in summary.items() if name != "text_sha256"}
    shown["train_seconds"] = duration(summary["train_seconds"])
    shown["peak_memory_bytes"] = size(summary["peak_memory_bytes"])
    show(shown, f"trained in {directory}")
    say(f"next: clearhead evaluate {directory}")


def plan_features(config: Features, recipe: Recipe) -> dict[str, Any]:
    """Derived values, parameters, memory and time of a training, none of which is begun."""
    model = without_weights(config.model)
    config = recipe.resolve(config, model)
    with torch.device("meta"):
        module = recipe.empty(model, config)
    memory = {
        "memory of the model": count(model.hf) * BYTES[config.dtype],
        "memory of the dictionary, gradients and optimiser": count(module) * 16,
        "memory of a step": 4 * config.batch_tokens * module.n_units * 4,
    }
    total = sum(memory.values())
    fits = config.device not in ("auto", "cpu") or total < free_memory()
    rows = {
        "model": f"{config.model}: {model.n_layers} layers, width {model.d_model}",
        **recipe.sizes(config),
        "parameters": count(module),
        "tokens": config.tokens,
        "steps": f"{config.steps():,} of {config.batch_tokens} tokens",
        "directory": config.directory(),
    }
    rows |= {name: size(bytes_) for name, bytes_ in memory.items()} | {"memory, estimated": size(total)}
    return rows | {
        "time": predicted_time(config, recipe) if fits else f"not measured: only {size(free_memory())} are free"
    }


def predicted_time(config: Features, recipe: Recipe) -> str:
    """The time of the whole training at the speed of a few real steps, thrown away afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"store": None} if "store" in config.to_dict() else {}
        short = dataclasses.replace(
            config,
            tokens=MEASURED_STEPS * config.batch_tokens,
            tracker="none",
            out=Path(folder) / "steps",
            **given,
        )
        rate = train_dictionary(short, recipe)["tokens_per_second"]
    return f"about {duration(config.tokens / rate)} at {rate:,.0f} tokens/s, measured on {MEASURED_STEPS} steps"
