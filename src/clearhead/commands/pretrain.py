"""`clearhead pretrain`: trains a model, prints the run's numbers and where the kept models lie.

Its plan builds the model without storage. The memory is

    weights, gradients and two moments of AdamW: parameters x 16 bytes
    a step: batch tokens x (layers x 20 widths + 3 vocabularies) in float32 (what the backward pass keeps; logits)

and the time is extrapolated from a few real steps on random tokens in a temporary directory.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from clearhead.commands.printing.table import duration, say, show, size
from clearhead.commands.sparsify import summarise
from clearhead.config import Pretrain
from clearhead.sparsify.scratch import gated_settings, pretrain_gated
from clearhead.training.pretrain import model_of_size, open_tokenizer, pretrain, time_steps

MEASURED_STEPS = 6


def run(config: Pretrain) -> None:
    """Train, and print the summary."""
    if config.gates:
        summarise(gated_settings(config, config.directory() / "start"), pretrain_gated(config))
        return
    summary = pretrain(config)
    directory = config.directory()
    shown = {name: value for name, value in summary.items() if name not in ("text_sha256", "snapshots")}
    shown["train_seconds"] = duration(summary["train_seconds"])
    shown["peak_memory_bytes"] = size(summary["peak_memory_bytes"])
    shown["models kept"] = f"{len(summary['snapshots'])} in {directory / 'snapshots'}"
    show(shown, f"trained in {directory}")
    say(f"the model is {directory / 'model'}; use it as --model in any other verb")


def plan(config: Pretrain) -> dict[str, Any]:
    """Derived values, parameters, memory and time of a training, none of which is begun."""
    config = config.resolved()
    vocabulary = config.vocabulary or len(open_tokenizer(config))
    with torch.device("meta"):
        parameters = model_of_size(config, vocabulary).num_parameters()
    kept = config.checkpoint_steps()
    memory = {
        "memory of weights, gradients and optimiser": parameters * 16,
        "memory of a step": config.batch_tokens * (20 * config.layers * config.width + 3 * vocabulary) * 4,
    }
    with tempfile.TemporaryDirectory() as folder:
        rate = time_steps(config, vocabulary, MEASURED_STEPS, Path(folder))
    seconds = config.tokens / rate
    return {
        "architecture": f"{config.architecture}: {config.layers} layers, width {config.width}, {config.heads} heads",
        "vocabulary": vocabulary,
        "tokenizer": config.tokenizer or "byte-level BPE, to be trained on the text",
        "parameters": parameters,
        "text": config.text,
        "tokens": config.tokens,
        "steps": f"{config.steps():,} of {config.batch_tokens} tokens",
        "repeated sequences": config.repeat_share,
        "models kept": f"{len(kept)}, after steps {', '.join(map(str, kept))}",
        "models kept, on disk": size(len(kept) * parameters * 4),
        "directory": config.directory(),
        **{name: size(bytes_) for name, bytes_ in memory.items()},
        "memory, estimated": size(sum(memory.values())),
        "time": f"about {duration(seconds)} at {rate:,.0f} tokens/s, measured on {MEASURED_STEPS} steps",
    }
