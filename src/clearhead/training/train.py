"""`clearhead train lorsa`: from a configuration to a run directory with a trained Lorsa.

Derives geometry and sizes from the model, draws a sample for scales and initial weights, hands a `LorsaTask` to the
loop, folds the scales into the weights and writes `lorsa/` and `summary.json`. A directory that already holds a
checkpoint of the same configuration is continued; one with another configuration is refused.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from clearhead.config import TrainLorsa
from clearhead.data.harvest import Activations, LiveActivations
from clearhead.data.order import indices
from clearhead.data.store import ActivationStore
from clearhead.data.text import TokenBlocks, token_blocks
from clearhead.dictionaries.init import draw_sample, initialise, lorsa_config
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.geometry import attention_geometry, verify_scores
from clearhead.model.weights import attention_weights
from clearhead.runs import RunDirectory
from clearhead.training.checkpoint import list_checkpoints
from clearhead.training.loop import LoopSettings, Source, check_source, fit
from clearhead.training.lorsa import LorsaTask, Scales, measure_scales
from clearhead.training.optim import Schedule
from clearhead.training.session import open_accelerator, peak_memory, refuse_other_run
from clearhead.training.trackers import open_tracker

SAMPLE_BLOCKS = 96  # for scales, means and the clusters of head outputs; about 25k tokens at context 256
# changing these does not change what is trained
IMMATERIAL = ("out", "resume", "checkpoint_every", "tracker", "device", "store")


def train_lorsa(config: TrainLorsa) -> dict[str, Any]:
    """Train (or finish training) one Lorsa; returns the summary that the run directory also holds.

    Raises `ClearheadError` when the directory holds another configuration, when the text is too short for one batch,
    or when a Lorsa cannot imitate the layer; whatever was computed stays in the run directory.
    """
    accelerator = open_accelerator(config.device, bf16=config.bf16)
    model = Model.load(config.model, dtype=config.dtype, device=str(accelerator.device))
    config = config.resolved(n_layers=model.n_layers, d_model=model.d_model, d_head=model.d_head, n_heads=model.n_heads)
    run = RunDirectory(Path(str(config.out)))
    with run if accelerator.is_main_process else contextlib.nullcontext():
        refuse_other_run(run.path, config, resume=config.resume, immaterial=IMMATERIAL)
        if accelerator.is_main_process:
            run.write_config(config.to_dict())
        tracker = open_tracker(config.tracker, run.path, config.to_dict(), accelerator.is_main_process)
        source, blocks = open_source(model, config)
        batch_blocks = config.batch_tokens // config.context
        check_source(source, batch_blocks, accelerator.num_processes)
        if config.activation == "batchtopk" and accelerator.num_processes > 1:
            raise ClearheadError("batchtopk ranks a whole batch; train it in one process, or use --activation topk")
        fresh = not list_checkpoints(run.path)
        lorsa, scales = build_lorsa(model, config, blocks, fresh=fresh)
        task = LorsaTask(
            lorsa.to(accelerator.device),
            scales,
            aux_k=config.aux_k,
            dead_after_tokens=config.dead_after_tokens,
            qk_lr_factor=config.qk_lr_factor,
            l0_weight=config.l0_weight,
        )
        settings = LoopSettings(
            batch_blocks=batch_blocks,
            seed=config.seed,
            grad_clip=config.grad_clip,
            checkpoint_every=config.checkpoint_every,
        )
        result = fit(task, source, plan(config), settings, run, accelerator, tracker)
        lorsa.fold_scales(task.scales.input, task.scales.output).eval()
        summary = {
            "model": config.model,
            "model_note": model.note,
            "layer": config.layer,
            "text": blocks.source,
            "text_sha256": blocks.sha256,
            "heads": config.heads,
            "groups": config.groups,
            "k": config.k,
            "tokens": config.steps() * config.batch_tokens,
            "parameters": sum(parameter.numel() for parameter in lorsa.parameters()),
            "final_batch_fvu": result["batch_fvu"],
            **{key: result[key] for key in ("tokens_per_second", "train_seconds")},
            "peak_memory_bytes": peak_memory(),
        }
        if accelerator.is_main_process:
            lorsa.provenance = provenance(config, model, blocks)
            lorsa.save_pretrained(run.path / "lorsa")
            run.write_summary(summary)
        return summary


def plan(config: TrainLorsa) -> Schedule:
    """The schedule a configuration means, in steps."""
    steps = config.steps()
    heads = config.heads or config.k
    return Schedule(
        steps=steps,
        peak_lr=config.lr,
        warmup=round(config.warmup_share * steps),
        decay=round(config.decay_share * steps),
        k=config.k,
        k_start=min(heads, round(config.k * config.k_start_factor)),
        k_anneal=round(config.k_anneal_share * steps),
    )


def open_source(model: Model, config: TrainLorsa) -> tuple[Source[Activations], TokenBlocks]:
    """The activations to train on: read from a store, or computed from the text as they are needed."""
    store = ActivationStore(config.store) if config.store else None
    # a store is read as a whole, whatever the number of training tokens: fewer are a part of an epoch, more are several
    n_tokens = len(store) * store.context if store else config.tokens
    blocks = token_blocks(model, config.text, split="train", n_tokens=n_tokens, context=config.context, at_most=True)
    layer = layer_of(config)
    if store is None:
        return LiveActivations(model, blocks, layer), blocks
    store.check(
        model=config.model,
        layer=layer,
        text_sha256=blocks.sha256,
        dtype=model.dtype,
        revision=model.revision,
    )
    return store, blocks


def layer_of(config: TrainLorsa) -> int:
    """The layer of a resolved configuration."""
    if config.layer is None:
        raise ClearheadError("the configuration names no layer; resolve it with the model's shape first")
    return config.layer


def build_lorsa(model: Model, config: TrainLorsa, blocks: TokenBlocks, *, fresh: bool) -> tuple[Lorsa, Scales]:
    """A Lorsa of the configured size with initial weights; `fresh=False` leaves them to the checkpoint.

    Whatever starts from the model's own queries and keys first rebuilds the model's scores from them: a rotation or
    norm read wrongly would otherwise start, and stay, as a quietly wrong pattern.
    """
    layer = layer_of(config)
    geometry = attention_geometry(model, layer)
    shape = lorsa_config(
        geometry,
        model.d_model,
        heads=int(config.heads or 0),
        groups=int(config.groups or 0),
        k=config.k,
        activation=config.activation,
    )
    lorsa = Lorsa(shape)
    if not fresh:
        return lorsa, Scales(1.0, 1.0)
    if config.init != "random":
        verify_scores(model, layer)
    chosen = indices(config.seed, 0, min(SAMPLE_BLOCKS, len(blocks)), len(blocks))
    sample = draw_sample(model, layer, blocks.tokens[chosen])
    scales = measure_scales(sample)
    weights = attention_weights(model, layer)
    initialise(lorsa, config.init, weights, sample, scales.input, scales.output, config.seed)
    return lorsa.train(), scales


def provenance(config: TrainLorsa, model: Model, blocks: TokenBlocks) -> dict[str, Any]:
    """Where a Lorsa belongs and what it was trained on; kept in its config.json."""
    return {
        "model": config.model,
        "model_note": model.note,
        "layer": config.layer,
        "input_site": f"attn_in.{config.layer}",
        "output_site": f"attn_out.{config.layer}",
        "text": blocks.source,
        "text_sha256": blocks.sha256,
        "tokens": config.steps() * config.batch_tokens,
        "training": dataclasses.asdict(config) | {"out": None, "store": None},
    }
