"""What `train transcoder`, `train sae` and `train clt` print: the plan before, the numbers after.

The plan needs the model's configuration only, no weights. Its memory is that of the model, 16 bytes for every
parameter of the dictionary (weight, gradient, two moments of Adam) and 4 arrays of batch tokens x features of a step.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from clearhead.commands.opening.structure import BYTES, without_weights
from clearhead.commands.opening.training_time import count, predicted_time
from clearhead.commands.printing.table import duration, say, show, size
from clearhead.commands.printing.train_layers import plan_layers, run_layers
from clearhead.config import TrainClt, TrainSae, TrainTranscoder
from clearhead.training.train_dictionary import Recipe

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


def run_features(config: TrainTranscoder | TrainSae, recipe: Recipe, train: Callable[[Any], dict[str, Any]]) -> None:
    """Train one layer and print its summary, or several and print their table."""
    if isinstance(config.layer, str):
        run_layers(config, recipe)
    else:
        show_trained(config, train(config))


def plan_features(config: Features, recipe: Recipe) -> dict[str, Any]:
    """Derived values, parameters, memory and time of a training, none of which is begun."""
    if not isinstance(config, TrainClt) and isinstance(config.layer, str):
        return plan_layers(config, recipe, lambda one: sizes(one, recipe))
    rows, memory = sizes(config, recipe)
    return rows | {"time": predicted_time(config, recipe, memory)}


def sizes(config: Features, recipe: Recipe) -> tuple[dict[str, Any], int]:
    """Derived values, parameters and memory of a training; and the bytes of memory in all."""
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
    rows = {
        "model": f"{config.model}: {model.n_layers} layers, width {model.d_model}",
        **recipe.sizes(config),
        "parameters": count(module),
        "tokens": config.tokens,
        **({"of it repeated tokens": f"{config.repeat_share:.3g}"} if config.repeat_share else {}),
        "steps": f"{config.steps():,} of {config.batch_tokens} tokens",
        "directory": config.directory(),
    }
    return rows | {name: size(bytes_) for name, bytes_ in memory.items()} | {"memory, estimated": size(total)}, total
