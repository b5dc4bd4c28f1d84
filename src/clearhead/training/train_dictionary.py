"""Train a dictionary of any kind: from a configuration to a directory with the trained module.

The driver opens model and run directory, asks the kind's `Recipe` for activations, module and task, hands them to the
loop, folds the scales into the weights and writes the module and `summary.json`. A directory that already holds a
checkpoint of the same configuration is continued; one with another configuration is refused. What a Lorsa, a transcoder
or a cross-layer transcoder adds is in train.py, transcoder.py and clt.py.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clearhead.config import TrainDictionary
from clearhead.data.harvest import Activations, LiveActivations
from clearhead.data.repeats import mixed_blocks
from clearhead.data.store import ActivationStore, store_of_layer
from clearhead.data.text import TokenBlocks
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.runs import RunDirectory
from clearhead.training.checkpoint import list_checkpoints
from clearhead.training.dictionary_task import DictionaryTask, Scales
from clearhead.training.loop import LoopSettings, Source, check_source, fit
from clearhead.training.optim import Schedule
from clearhead.training.session import open_accelerator, peak_memory, refuse_other_run
from clearhead.training.trackers import open_tracker

SAMPLE_BLOCKS = 96  # for scales and initial weights; about 25k tokens at context 256
# changing these does not change what is trained
IMMATERIAL = ("out", "resume", "checkpoint_every", "tracker", "device", "store")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What one kind of dictionary brings to its training."""

    kind: str
    """Name of the kind, and of the module's folder in the run directory."""
    resolve: Callable[[Any, Model], Any]
    """The configuration with every derived field filled in."""
    open_source: Callable[[Model, Any], tuple[Source[Activations], TokenBlocks]]
    """The activations to train on, and the text they come from."""
    empty: Callable[[Model, Any], Any]
    """The module of the configured size, not initialised."""
    initialise: Callable[..., Scales]
    """(module, model, config, source, blocks) -> fills the initial weights, in place; returns the scales."""
    task: Callable[[Any, Scales, Any], DictionaryTask]
    """The loop's task, from module, scales and configuration."""
    sizes: Callable[[Any], dict[str, Any]]
    """What the summary says of layer and sizes."""
    sites: Callable[[Any, Model], dict[str, Any]]
    """Layer and sites, for the module's provenance."""


def train_dictionary(config: TrainDictionary, recipe: Recipe, model: Model | None = None) -> dict[str, Any]:
    """Train (or finish training) one dictionary; returns the summary that the run directory also holds.

    `model` is the one that `config` names, where it is loaded already.

    Raises `ClearheadError` when the directory holds another configuration, when the text is too short for one batch,
    or when the kind cannot imitate the layer; whatever was computed stays in the run directory.
    """
    accelerator = open_accelerator(config.device, bf16=config.bf16)
    model = model or Model.load(config.model, dtype=config.dtype, device=str(accelerator.device))
    config = recipe.resolve(config, model)
    run = RunDirectory(Path(str(config.out)))
    with run if accelerator.is_main_process else contextlib.nullcontext():
        refuse_other_run(run.path, config, resume=config.resume, immaterial=IMMATERIAL)
        if accelerator.is_main_process:
            run.write_config(config.to_dict())
        tracker = open_tracker(config.tracker, run.path, config.to_dict(), accelerator.is_main_process)
        source, blocks = recipe.open_source(model, config)
        batch_blocks = config.batch_tokens // config.context
        check_source(source, batch_blocks, accelerator.num_processes)
        module, scales = recipe.empty(model, config).train(), Scales(1.0, 1.0)
        if not list_checkpoints(run.path):  # else the checkpoint fills both
            scales = recipe.initialise(module, model, config, source, blocks)
        if module.config.activation == "batchtopk" and accelerator.num_processes > 1:
            raise ClearheadError("batchtopk ranks a whole batch; train it in one process, or use --activation topk")
        task = recipe.task(module.to(accelerator.device), scales, config)
        settings = LoopSettings(
            batch_blocks=batch_blocks,
            seed=config.seed,
            grad_clip=config.grad_clip,
            checkpoint_every=config.checkpoint_every,
        )
        schedule = plan(config, module.config.k, largest=module.n_units)
        result = fit(task, source, schedule, settings, run, accelerator, tracker)
        module.fold_scales(task.scales.input, task.scales.output).eval()
        summary = {
            "model": config.model,
            "model_note": model.note,
            "text": blocks.source,
            "text_sha256": blocks.sha256,
            "repeat_share": blocks.repeat_share,
            **recipe.sizes(config),
            "tokens": config.steps() * config.batch_tokens,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "final_batch_fvu": result["batch_fvu"],
            "final_batch_l0": result["l0"],
            **{key: result[key] for key in ("tokens_per_second", "train_seconds")},
            "peak_memory_bytes": peak_memory(),
        }
        if accelerator.is_main_process:
            module.provenance = provenance(config, model, blocks, recipe.sites(config, model))
            module.save_pretrained(run.path / recipe.kind)
            run.write_summary(summary)
        return summary


def plan(config: TrainDictionary, k: int, *, largest: int) -> Schedule:
    """The schedule a configuration means, in steps; `largest` is the number of units K can start from."""
    steps = config.steps()
    return Schedule(
        steps=steps,
        peak_lr=config.lr,
        warmup=round(config.warmup_share * steps),
        decay=round(config.decay_share * steps),
        k=k,
        k_start=min(largest, round(k * config.k_start_factor)),
        k_anneal=round(config.k_anneal_share * steps),
    )


def provenance(config: TrainDictionary, model: Model, blocks: TokenBlocks, sites: dict[str, Any]) -> dict[str, Any]:
    """Where a dictionary belongs and what it was trained on; kept in its config.json."""
    return {
        "model": config.model,
        "model_note": model.note,
        **sites,
        "text": blocks.source,
        "text_sha256": blocks.sha256,
        "tokens": config.steps() * config.batch_tokens,
        "training": dataclasses.asdict(config) | {"out": None, "store": None},
    }


def open_layer(model: Model, config: Any, sites: tuple[str, str]) -> tuple[Source[Activations], TokenBlocks]:
    """The activations of one layer's `sites` to train on: read from a store, or computed from the text as needed."""
    layer = layer_of(config)
    store = ActivationStore(store_of_layer(config.store, layer)) if config.store else None
    # a store is read as a whole, whatever the number of training tokens: fewer are a part of an epoch, more are several
    n_tokens = len(store) * store.context if store else config.tokens
    blocks = train_blocks(model, config, n_tokens)
    if store is None:
        return LiveActivations(model, blocks, layer, sites=sites), blocks
    store.check(
        model=config.model,
        layer=layer,
        sites=sites,
        repeat_share=blocks.repeat_share,
        text_sha256=blocks.sha256,
        dtype=model.dtype,
        revision=model.revision,
    )
    return store, blocks


def train_blocks(model: Model, config: TrainDictionary, n_tokens: int | None = None) -> TokenBlocks:
    """What a training reads: text, and random tokens repeated where asked for; all that it trains on, or `n_tokens`."""
    return mixed_blocks(
        model,
        config.text,
        split="train",
        n_tokens=n_tokens or config.tokens,
        context=config.context,
        repeat_share=config.repeat_share,
    )


def layer_of(config: Any) -> int:
    """The layer of a resolved configuration."""
    if not isinstance(config.layer, int):
        raise ClearheadError(f"layer {config.layer} is not one layer; resolve the configuration with the model's shape")
    return config.layer
