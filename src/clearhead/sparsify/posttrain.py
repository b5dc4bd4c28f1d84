"""`clearhead sparsify`: one post-training from a pretrained model to a Hugging Face folder that attends through gates.

Base loss and gate biases are measured first (calibrate.py), then the loop trains (task.py), watched on held-out text
(best.py). A run directory holds `model/` at the end; `checkpoints/` belongs to the loop, for resuming, exactly: the
multiplier, the kept state and all counters are in them. A larger --tokens continues a finished run.
"""

import contextlib
import functools
import math
import time
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from clearhead.config import Sparsify
from clearhead.data.repeats import alphabet_of
from clearhead.data.text import Split, TokenBlocks, token_blocks
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.runs import RunDirectory, read_json
from clearhead.sparsify.adapters import merge_adapters
from clearhead.sparsify.best import Best, Watch, edges_per_query, measure_hard
from clearhead.sparsify.calibrate import mean_loss, opening_bias
from clearhead.sparsify.export import export_model
from clearhead.sparsify.geco import Geco, GecoSettings
from clearhead.sparsify.task import Prepared, Sparsification, prepare
from clearhead.training.checkpoint import list_checkpoints
from clearhead.training.language_model import TextAndRepeats
from clearhead.training.loop import LoopSettings, check_source, fit
from clearhead.training.optim import RateSchedule, adam
from clearhead.training.session import open_accelerator, peak_memory, refuse_other_run

HELD_OUT_TOKENS = 8192
SPREAD = 8
"""The held-out blocks are every eighth of a text, as neighbours are of one document; the others are for evaluation."""
CALIBRATION_BLOCKS = 4
MEASUREMENTS = 40
"""Of the loss on held-out text, at most; fewer where they would see more than half as many tokens as the training."""
CHECKPOINTS = 20
LEAST_SLACK = 0.005
"""Nats in which a violation is measured where the tolerance is smaller."""
MULTIPLIER = 10.0
"""Where the multiplier begins: with nearly all edges open, a hundredth of a nat buys about a tenth of them."""
AVERAGE = 0.9
"""Of what the constraint measured; a longer memory would let the multiplier overshoot."""
BETAS = (0.9, 0.98)
GRAD_CLIP = 1.0
IMMATERIAL = ("out", "resume", "device", "tokens")


def posttrain(config: Sparsify) -> dict[str, Any]:
    """Train (or finish, or continue) one model; returns the summary that the run directory also holds.

    Raises `ClearheadError` for models, texts and settings that cannot be, and when the directory holds another run;
    whatever was computed stays in the run directory.
    """
    accelerator = open_accelerator(config.device, bf16=config.precision == "bfloat16")
    config = config.resolved()
    run = RunDirectory(config.directory())
    main = accelerator.is_main_process
    with run if main else contextlib.nullcontext():
        refuse_other_run(run.path, config, resume=config.resume, immaterial=IMMATERIAL)
        done = [int(folder.name.removeprefix("step-")) for folder in list_checkpoints(run.path)]
        if max(done, default=0) > config.steps():
            raise ClearheadError(
                f"{run.path} has been trained for more than --tokens {config.tokens}; give more, or another --out"
            )
        prepared = prepare(config, str(accelerator.device))
        source, blocks = open_text(config, prepared.model)
        check_source(source, config.batch_tokens // config.context, accelerator.num_processes)
        held_out = open_held_out(config, prepared.model)
        rates = rates_of(config)
        fresh = not done
        if main:
            run.write_config(config.to_dict())
        start = begin(config, prepared, source, held_out, fresh=fresh)
        geco, task = build(config, prepared, start, rates, accelerator.process_index, accelerator.num_processes)
        watch = Watch(
            prepared.model,
            functools.partial(final_gates, config, prepared, rates),
            held_out,
            task.best,
            every=max(1, config.steps() // MEASUREMENTS, 2 * held_out.numel() // config.batch_tokens),
            steps=config.steps(),
            geco=geco if config.control == "none" else None,
        )
        if main and fresh:
            run.truncate_metrics(-1)
            run.log(step=0, tokens=0, base_ce=start["base_ce"], **watch(0))
        result = fit(task, source, rate_schedule(config), loop_settings(config), run, accelerator, observe=watch)
        task.best.restore()
        if config.lora is not None:
            merge_adapters(prepared.model.hf)
        ce, shares = measure_hard(prepared.model, functools.partial(final_gates, config, prepared, rates), held_out)
        if rates is not None:
            shares = torch.stack(list(rates.values()))
        summary = summarise(config, prepared, blocks, start, task, ce, shares) | {
            **{key: result[key] for key in ("tokens_per_second", "train_seconds")},
            "peak_memory_bytes": peak_memory(),
        }
        if main:
            origin = {"tolerance": config.tolerance, "control": config.control, "seed": config.seed}
            export_model(prepared.model, run.path / "model", origin, rates)
            run.write_summary(summary)
        return summary


def begin(
    config: Sparsify, prepared: Prepared, source: TextAndRepeats, held_out: Int64[Tensor, "n t"], *, fresh: bool
) -> dict[str, float]:
    """Loss of the dense base on held-out and on training text; in a fresh run the gates' biases are set as well."""
    model, gates = prepared.model, prepared.gates
    apart = max(1, len(source) // len(held_out))
    sample = source.batch(torch.arange(0, len(source), apart)[: len(held_out)])
    if fresh and config.gate_bias is None and config.control == "none":
        gates.set_bias(opening_bias(model, gates, held_out[:CALIBRATION_BLOCKS], config.open_mass))
    with gates.opened():
        return {"base_ce": mean_loss(model, held_out), "base_train_ce": mean_loss(model, sample)}


def build(
    config: Sparsify,
    prepared: Prepared,
    start: dict[str, float],
    rates: dict[int, Float[Tensor, " h"]] | None,
    rank: int,
    world: int,
) -> tuple[Geco, Sparsification]:
    """Multiplier and task of a run."""
    settings = GecoSettings(
        rule=config.rule,
        rate=config.multiplier_rate,
        average=AVERAGE,
        initial=MULTIPLIER,
        freeze=round(config.warmup_share * config.steps()),
    )
    target = config.tolerance
    if config.constraint == "ce":
        target += start["base_train_ce"] if config.target is None else config.target
    geco = Geco(settings, target, max(config.tolerance, LEAST_SLACK))
    named = {name: part for name, part in prepared.model.hf.named_parameters() if part.requires_grad}
    # a control has no edges to save: its best state is the one with the smallest loss
    best = Best(named, allowed_loss(config, start) if config.control == "none" else -math.inf)
    return geco, Sparsification(prepared, config, geco, best, rates, rank, world)


def allowed_loss(config: Sparsify, start: dict[str, float]) -> float:
    """The largest loss on held-out text (nats) that a finished model may have."""
    return config.tolerance + (start["base_ce"] if config.target is None else config.target)


def final_gates(config: Sparsify, prepared: Prepared, rates: dict[int, Float[Tensor, " h"]] | None):
    """The gates that the finished model has."""
    if config.control == "dense":
        return prepared.gates.opened()
    if config.control == "random":
        assert rates is not None
        return prepared.gates.random(rates)
    return prepared.gates.hard()


def rates_of(config: Sparsify) -> dict[int, Float[Tensor, " h"]] | None:
    """The edge shares by layer and head that `--like` names. Raises `ClearheadError` where it holds none."""
    if config.like is None:
        return None
    path = config.like / "summary.json"
    if not path.exists():
        raise ClearheadError(f"--like {config.like} is no finished run of `clearhead sparsify`: it has no summary.json")
    summary = read_json(path)
    if "edges_by_head" not in summary:
        raise ClearheadError(f"--like {config.like}: its summary names no edges by head; give a run of `sparsify`")
    return {int(layer): torch.tensor(row) for layer, row in summary["edges_by_head"].items()}


def rate_schedule(config: Sparsify) -> RateSchedule:
    """Up over the warm-up, down over the steps with hard gates."""
    steps = config.steps()
    warmup, decay = round(config.warmup_share * steps), round(config.settle_share * steps)
    return RateSchedule(steps=steps, peak_lr=config.lr or 0.0, warmup=warmup, decay=decay)


def loop_settings(config: Sparsify) -> LoopSettings:
    """What the loop needs."""
    return LoopSettings(
        batch_blocks=config.batch_tokens // config.context,
        seed=config.seed,
        grad_clip=GRAD_CLIP,
        checkpoint_every=max(1, config.steps() // CHECKPOINTS),
        betas=BETAS,
    )


def open_text(config: Sparsify, model: Model) -> tuple[TextAndRepeats, TokenBlocks]:
    """Every sequence of the run, and the text they are taken from."""
    tokenizer = model._tokenizer()
    total = config.steps() * config.batch_tokens // config.context
    repeats = int(config.repeat_share * total)
    blocks = token_blocks(
        tokenizer,
        config.text,
        split="train",
        n_tokens=(total - repeats) * config.context,
        context=config.context,
        at_most=True,
    )
    alphabet = alphabet_of(tokenizer)
    return TextAndRepeats(blocks.tokens, config.context, total, repeats, config.seed, alphabet), blocks


def open_held_out(config: Sparsify, model: Model) -> Int64[Tensor, "n t"]:
    """The blocks that a run is watched on."""
    wanted = -(-HELD_OUT_TOKENS // config.context) * SPREAD * config.context
    blocks = token_blocks(model, config.text, split="held_out", n_tokens=wanted, context=config.context, at_most=True)
    return blocks.tokens[::SPREAD]


def open_unwatched(
    model: Model, text: str, *, context: int, tokens: int, split: Split = "held_out"
) -> tuple[Int64[Tensor, "n t"], TokenBlocks]:
    """Blocks for evaluation, none of which a run is watched on, `tokens` in all or what there is; and their text.

    Raises `ClearheadError` for a text of one block, which is the watched one, and what `token_blocks` raises.
    """
    wanted = -(-tokens // context)
    total = wanted + -(-wanted // (SPREAD - 1))
    blocks = token_blocks(model, text, split=split, n_tokens=total * context, context=context, at_most=True)
    others = blocks.tokens[torch.arange(len(blocks)) % SPREAD != 0][:wanted]
    if not len(others):
        raise ClearheadError(
            f"the {split.replace('_', '-')} text of {text!r} has one block of {context} tokens, on which runs are "
            "watched, and none for evaluation; name a longer text with --text"
        )
    return others, blocks


def summarise(
    config: Sparsify,
    prepared: Prepared,
    blocks: TokenBlocks,
    start: dict[str, float],
    task: Sparsification,
    ce: float,
    shares: Float[Tensor, "l h"],
) -> dict[str, Any]:
    """The final numbers, on the held-out blocks that the run was watched on."""
    share = float(shares.mean())
    layers = prepared.gates.layers
    return {
        "model": config.model,
        "model_note": prepared.model.note,
        "text": blocks.source,
        "text_sha256": blocks.sha256,
        "control": config.control,
        "tolerance": config.tolerance,
        "context": config.context,
        "tokens": config.steps() * config.batch_tokens,
        "steps": config.steps(),
        "seed": config.seed,
        "trained_parameters": sum(part.numel() for part in prepared.trained),
        **start,
        "hard_ce": ce,
        "rise": ce - start["base_ce"],
        "within_tolerance": ce <= allowed_loss(config, start),
        "kept_step": task.best.step,
        "edge_share": share,
        "edges_per_query": edges_per_query(prepared.model, shares, config.context),
        "multiplier": task.geco.multiplier,
        "edges_by_head": {str(layer): row for layer, row in zip(layers, shares.tolist(), strict=True)},
    }


def time_steps(config: Sparsify, steps: int) -> tuple[dict[str, int], float]:
    """Sizes of the model, and tokens per second over a few real steps on random tokens; nothing is kept.

    Raises `ClearheadError` as `posttrain` does for a model that cannot be gated.
    """
    accelerator = open_accelerator(config.device, bf16=config.precision == "bfloat16")
    prepared = prepare(config, str(accelerator.device))
    model, settings = prepared.model, loop_settings(config)
    rates = rates_of(config)
    _, task = build(config, prepared, {"base_ce": 0.0, "base_train_ce": 0.0}, rates, 0, 1)
    optimizer = adam(task.groups(), config.lr or 0.0, BETAS)
    draw = torch.Generator().manual_seed(config.seed)
    shape = (settings.batch_blocks, config.context)
    begun = 0.0
    for step in range(steps + 1):
        batch = torch.randint(model.d_vocab, shape, generator=draw).to(model.device)
        loss, _ = task.loss(model.hf, batch, rate_schedule(config), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        begun = begun or time.monotonic()  # the first step builds what the others use
    rate = steps * config.batch_tokens / (time.monotonic() - begun)
    sizes = {
        "parameters": sum(part.numel() for part in model.hf.parameters()),
        "trained": sum(part.numel() for part in prepared.trained),
        "gates": sum(gate.bias.numel() for gate in prepared.gates.layers.values()),
        "gated layers": len(prepared.gates.layers),
        "layers": model.n_layers,
        "width": model.d_model,
        "vocabulary": model.d_vocab,
    }
    return sizes, rate
