"""`clearhead sparsify`: post-trains a model, prints the run's numbers and where the sparse model lies.

Its plan loads the model and takes a few real steps on random tokens in memory. The memory is

    weights (and those of the frozen base, when everything is trained): parameters x 4 bytes
    gradients and two moments of Adam, and the best state kept: trained parameters x 16 bytes
    a step: batch tokens x (layers x 24 widths + 4 vocabularies) in float32 (what the backward pass keeps; logits)
"""

from typing import Any

from clearhead.commands.printing.table import duration, say, show, size
from clearhead.config import Sparsify
from clearhead.sparsify.posttrain import posttrain, time_steps

MEASURED_STEPS = 3
HIDDEN = ("text_sha256", "edges_by_head")


def run(config: Sparsify) -> None:
    """Train, and print the summary."""
    summarise(config, posttrain(config))


def summarise(config: Sparsify, summary: dict[str, Any]) -> None:
    """Print the numbers of a finished run, and what to do next."""
    directory = config.directory()
    shown = {name: value for name, value in summary.items() if name not in HIDDEN}
    shown["train_seconds"] = duration(summary["train_seconds"])
    shown["peak_memory_bytes"] = size(summary["peak_memory_bytes"])
    show(shown, f"trained in {directory}")
    if config.control != "none":
        say(f"a control; measure it with: clearhead evaluate {directory}")
        return
    if not summary["within_tolerance"]:
        say(
            f"no measured state kept the loss within {config.tolerance} nats of the base; the best one "
            "was kept. Train longer, lower --lr, or allow a larger --tolerance"
        )
    say(f"the model is {directory / 'model'}; measure it with: clearhead evaluate {directory}")


def plan(config: Sparsify) -> dict[str, Any]:
    """Derived values, parameters, memory and time of a post-training, none of which is begun."""
    config = config.resolved()
    sizes, rate = time_steps(config, MEASURED_STEPS)
    parameters, trained = sizes["parameters"], sizes["trained"]
    copies = 1 if config.lora else 2
    memory = {
        "memory of weights": copies * parameters * 4,
        "memory of gradients, optimiser and best state": trained * 16,
        "memory of a step": config.batch_tokens * (24 * sizes["layers"] * sizes["width"] + 4 * sizes["vocabulary"]) * 4,
    }
    seconds = config.tokens / rate
    return {
        "model": config.model,
        "text": config.text,
        "parameters": parameters,
        "trained parameters": trained,
        "gates": f"{sizes['gates']} heads in {sizes['gated layers']} layers",
        "learning rate": config.lr,
        "tokens": config.tokens,
        "steps": f"{config.steps():,} of {config.batch_tokens} tokens",
        "directory": config.directory(),
        **{name: size(bytes_) for name, bytes_ in memory.items()},
        "memory, estimated": size(sum(memory.values())),
        "time": f"about {duration(seconds)} at {rate:,.0f} tokens/s, measured on {MEASURED_STEPS} steps",
    }
