"""`clearhead train lorsa`: trains, then prints the numbers of the run and what to do with it.

Its plan needs the model's configuration only, no weights: sizes come from a model without storage. The memory is

    model: parameters x bytes of its dtype      Lorsa: parameters x 16 bytes (weight, gradient, two moments of Adam)
    step: 4 arrays of batch tokens x heads in float32 (values, pre-activations and their gradients)

and, when that fits into what is free, the time is extrapolated from a few real steps in a temporary directory.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from clearhead.commands.opening.structure import BYTES, without_weights
from clearhead.commands.opening.training_time import count, predicted_time
from clearhead.commands.printing.table import duration, say, show, size
from clearhead.commands.printing.train_layers import plan_layers, run_layers
from clearhead.config import TrainLorsa
from clearhead.dictionaries.init import lorsa_config
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.model.geometry import AttentionGeometry
from clearhead.training.train import LORSA, train_lorsa


def run(config: TrainLorsa) -> None:
    """Train, and print the summary, or the table of several layers."""
    if isinstance(config.layer, str):
        run_layers(config, LORSA)
        return
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
    if isinstance(config.layer, str):
        return plan_layers(config, LORSA, sizes)
    rows, memory = sizes(config)
    return rows | {"time": predicted_time(config, LORSA, memory)}


def sizes(config: TrainLorsa) -> tuple[dict[str, Any], int]:
    """Derived values, parameters and memory of a training; and the bytes of memory in all."""
    model = without_weights(config.model)
    config = config.resolved(n_layers=model.n_layers, d_model=model.d_model, d_head=model.d_head, n_heads=model.n_heads)
    heads, groups, layer = int(config.heads or 0), int(config.groups or 0), int(config.layer or 0)
    shape = lorsa_config(
        _without_frequencies(model.geometry(layer), config.qk_width),
        model.d_model,
        heads=heads,
        groups=groups,
        k=config.k,
        activation=config.activation,
        patterns_per_group=config.patterns_per_group,
        sink=config.sink,
    )
    with torch.device("meta"):
        parameters = count(Lorsa(shape))
    memory = {
        "memory of the model": count(model.hf) * BYTES[config.dtype],
        "memory of the Lorsa, gradients and optimiser": parameters * 16,
        "memory of a step": 4 * config.batch_tokens * heads * 4,
    }
    total = sum(memory.values())
    rows = {
        "model": f"{config.model}: {model.n_layers} layers, width {model.d_model}, {model.n_heads} heads",
        "layer": layer,
        "heads": heads,
        "QK groups": f"{groups} of {heads // groups} heads, {shape.d_qk} wide",
        "patterns": f"{shape.n_patterns}, {shape.pattern_size} heads each",
        "active per token": config.k,
        "parameters": parameters,
        "tokens": config.tokens,
        **({"of it repeated tokens": f"{config.repeat_share:.3g}"} if config.repeat_share else {}),
        "steps": f"{config.steps():,} of {config.batch_tokens} tokens",
        "directory": config.directory(),
    }
    rows |= {name: size(bytes_) for name, bytes_ in memory.items()} | {"memory, estimated": size(total)}
    return rows, total


def _without_frequencies(geometry: AttentionGeometry, width: int | None) -> AttentionGeometry:
    """The same shape: the rotation has no parameters, and a model without storage has no frequencies to copy."""
    width, rope = width or geometry.d_head, geometry.rope
    if rope is not None:
        turning = min(rope.rotary_dim, width // 2 * 2)
        rope = dataclasses.replace(rope, inv_freq=torch.zeros(turning // 2), rotary_dim=turning)
    return dataclasses.replace(geometry, d_head=width, rope=rope)
