"""The addition toy: a dense model trained from scratch on sums of two digits, then made sparse, beside random gates.

    dense     mean CE of the three digits of the sum                        all edges open, GPT-2's architecture
    sparse    min E + λ (KL(dense ‖ sparse) − tolerance)                    task.py, started from the dense model
    random    mean CE of the digits, edges open by lot                      as many per head as the sparse model has

E is the expected share of open edges (arXiv 2512.05865), λ follows GECO. Only predictions of digits of the sum count.
The state that is kept has the fewest open edges of all whose accuracy on training sums, with hard gates, is high
enough; held-out sums decide nothing. Each training has a directory of its own, `model/` in it once it is finished, and
is resumed exactly by the loop.

Not here: what the open edges read (addition_edges.py, addition_reading.py).
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

from clearhead.config import Sparsify, SparsifyToy
from clearhead.data.addition import ANSWER, PLACES, TOKENS, Addition, addition
from clearhead.model.gates import Gates
from clearhead.runs import RunDirectory, read_json
from clearhead.sparsify.best import Best
from clearhead.sparsify.calibrate import opening_bias
from clearhead.sparsify.export import export_model
from clearhead.sparsify.geco import Geco, GecoSettings
from clearhead.sparsify.objective import cross_entropy
from clearhead.sparsify.posttrain import AVERAGE, BETAS, GRAD_CLIP, MULTIPLIER, loop_settings, rate_schedule, rates_of
from clearhead.sparsify.task import Sparsification, prepare
from clearhead.training.checkpoint import list_checkpoints
from clearhead.training.language_model import LanguageModelling, save_model
from clearhead.training.loop import LoopSettings, fit
from clearhead.training.optim import RateSchedule
from clearhead.training.session import open_accelerator

FIRST = ANSWER.start - 1
"""The position whose prediction is the first digit of the sum."""
DENSE_BATCH, DENSE_RATE, WEIGHT_DECAY = 64, 3e-3, 0.01
BATCH, RATE, GATE_RATE_FACTOR = 32, 1e-3, 20.0
SETTLE_SHARE = 0.25
"""Share of the steps with hard gates: there the last edges close that only noise had kept open."""
LOWEST_MULTIPLIER = 0.3
"""An edge is 0.2 % of all: with less, one of them outweighs a hundredth of a nat, and digits are given up for it."""
CALIBRATION_SUMS = 64
WATCHED_SUMS = 1000
MEASUREMENTS, DENSE_MEASUREMENTS = 50, 10


class Sums:
    """The sums of a split: the loop's `Source`."""

    context = len(PLACES)

    def __init__(self, sums: Addition):
        self.tokens = sums.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, block_indices: Int64[Tensor, " b"]) -> Int64[Tensor, "b 9"]:
        """The sums of these numbers, in this order."""
        return self.tokens[block_indices]


class DenseAddition(LanguageModelling):
    """Learning to add with all edges open: language modelling of which only the digits of the sum count."""

    def loss(
        self,
        forward: Callable[..., Any],
        batch: Int64[Tensor, "b 9"],
        schedule: RateSchedule,  # noqa: ARG002 - nothing but the learning rate is scheduled
        step: int,  # noqa: ARG002
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of the digits of the sum (nats)."""
        logits = forward(input_ids=batch, use_cache=False).logits
        return cross_entropy(logits[:, FIRST:], batch[:, FIRST:]), {}


class Watch:
    """Measures the model on training sums as it will be used, and offers it to `best`; the loop's observer."""

    def __init__(self, hf: PreTrainedModel, sums: Addition, steps: int, gates: Gates | None, best: Best | None):
        self.hf, self.steps, self.gates, self.best = hf, steps, gates, best
        self.tokens = sums.tokens[:WATCHED_SUMS]
        self.every = max(1, steps // (MEASUREMENTS if gates else DENSE_MEASUREMENTS))

    def __call__(self, done: int) -> dict[str, float]:
        """Accuracy and share of open edges after `done` steps where they are due, else nothing."""
        if done % self.every and done != self.steps:
            return {}
        right, share = measure(self.hf, self.tokens, self.gates.hard() if self.gates else nullcontext())
        if share is None:
            return {"accuracy": right}
        assert self.best is not None
        self.best.offer(done, 1 - right, share)  # its loss is the share of wrong sums
        return {"accuracy": right, "edge_share": share, "kept_step": float(self.best.step)}


@torch.no_grad()
def measure(
    hf: nn.Module, tokens: Int64[Tensor, "n 9"], gates: AbstractContextManager[Any]
) -> tuple[float, float | None]:
    """Share of sums with all digits right, given the digits before, and that of open edges; None if none are counted.

    The last token predicts nothing and is left out.
    """
    with gates as tally:
        logits = hf(input_ids=tokens[:, :-1], use_cache=False).logits
    right = (logits[:, FIRST:].argmax(-1) == tokens[:, ANSWER]).all(1)
    if not tally:
        return float(right.double().mean()), None
    opened = torch.stack([layer.opened.double().mean((0, 1)).sum() for layer in tally.values()])
    visible = torch.stack([layer.visible.double().sum() for layer in tally.values()])
    return float(right.double().mean()), float((opened / visible).mean())


def train_dense(config: SparsifyToy, seed: int, folder: Path) -> dict[str, Any]:
    """Trains the dense model, or finishes training it; returns its numbers, which `folder` also holds."""
    if (folder / "summary.json").exists():
        return read_json(folder / "summary.json")
    with RunDirectory(folder) as run:
        begun = time.process_time()
        train, held_out = addition("train", seed), addition("held_out", seed)
        model = build_model(config, seed)
        steps = config.dense_steps
        schedule = RateSchedule(steps=steps, peak_lr=DENSE_RATE, warmup=round(0.02 * steps), decay=round(0.5 * steps))
        settings = LoopSettings(
            batch_blocks=DENSE_BATCH,
            seed=seed,
            grad_clip=GRAD_CLIP,
            checkpoint_every=max(1, steps // 10),
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
        )
        watch = Watch(model, train, steps, None, None)
        result = fit(DenseAddition(model), Sums(train), schedule, settings, run, open_accelerator("cpu"), observe=watch)
        summary = {
            "exact_match": measure(model, held_out.tokens, nullcontext())[0],
            "parameters": model.num_parameters(),
            **_spent(result, begun),
        }
        save_model(model, build_tokenizer(), folder / "model")
        run.write_summary(summary)
    return summary


def train_sparse(config: SparsifyToy, seed: int, dense: Path, folder: Path, like: Path | None = None) -> dict[str, Any]:
    """Makes the model in `dense` sparse, or finishes doing so; returns its numbers, which `folder` also holds.

    `like`: the directory of a sparse model; what is trained is then its control, whose edges are open by lot.
    """
    if (folder / "summary.json").exists():
        return read_json(folder / "summary.json")
    with RunDirectory(folder) as run:
        begun = time.process_time()
        settings = sparse_settings(config, seed, dense, like)
        train, held_out = addition("train", seed), addition("held_out", seed)
        prepared = prepare(settings, "cpu")
        hf, gates = prepared.model.hf, prepared.gates
        prepared.base = look_up(hf, gates)
        if like is None and not list_checkpoints(folder):
            gates.set_bias(opening_bias(prepared.model, gates, train.tokens[:CALIBRATION_SUMS], settings.open_mass))
        best = Best(dict(hf.named_parameters()), 1 - config.accuracy)
        rates = rates_of(settings)
        task = Sparsification(prepared, settings, multiplier(settings), best, rates, scored_from=FIRST)
        watch = Watch(hf, train, settings.steps(), gates, best) if like is None else None
        result = fit(
            task,
            Sums(train),
            rate_schedule(settings),
            loop_settings(settings),
            run,
            open_accelerator("cpu"),
            observe=watch,
        )
        best.restore()
        summary: dict[str, Any] = {**_spent(result, begun)}
        if rates is None:
            right, share = measure(hf, held_out.tokens, gates.hard())
            summary |= {"exact_match": right, "edge_share": share, "kept_step": best.step, "within": best.within}
            summary["edges_by_head"] = shares_by_head(hf, gates, held_out.tokens)
        else:
            summary["exact_match"] = measure(hf, held_out.tokens, gates.random(rates))[0]
        export_model(prepared.model, folder / "model", {"control": settings.control, "seed": seed}, rates)
        run.write_summary(summary)
    return summary


def sparse_settings(config: SparsifyToy, seed: int, dense: Path, like: Path | None) -> Sparsify:
    """The post-training of the model in `dense`, or of its control with random edges."""
    per_step = BATCH * len(PLACES)
    return Sparsify(
        model=str(dense / "model"),
        context=len(PLACES),
        tokens=config.steps * per_step,
        batch_tokens=per_step,
        tolerance=config.tolerance,
        lr=RATE,
        gate_lr_factor=GATE_RATE_FACTOR,
        settle_share=SETTLE_SHARE,
        sink=config.sink,
        control="none" if like is None else "random",
        like=like,
        seed=seed,
    )


def multiplier(settings: Sparsify) -> Geco:
    """The multiplier of the constraint on KL(dense ‖ sparse)."""
    rule = GecoSettings(
        rate=settings.multiplier_rate,
        average=AVERAGE,
        initial=MULTIPLIER,
        low=LOWEST_MULTIPLIER,
        freeze=round(settings.warmup_share * settings.steps()),
    )
    return Geco(rule, settings.tolerance, settings.tolerance)


@torch.no_grad()
def look_up(hf: PreTrainedModel, gates: Gates) -> Callable[[Int64[Tensor, "b 9"]], Float[Tensor, "b 9 v"]]:
    """The dense model's logits, computed once for every sum there is."""
    numbers = torch.arange(10_000)
    with gates.opened():
        parts = Addition.of_pairs(numbers // 100, numbers % 100).tokens.split(1000)
        table = torch.cat([hf(input_ids=part, use_cache=False).logits for part in parts])
    weights = torch.tensor([1000, 100, 0, 10, 1])
    return lambda tokens: table[(tokens[:, :5] * weights).sum(1)]


@torch.no_grad()
def shares_by_head(hf: PreTrainedModel, gates: Gates, tokens: Int64[Tensor, "n 9"]) -> dict[str, list[float]]:
    """Share of open edges by layer and head, over the visible pairs of all positions but the last."""
    with gates.hard() as tally:
        hf(input_ids=tokens[:, :-1], use_cache=False)
    return {
        str(layer): (count.opened.double().mean(0).sum(-1) / count.visible.sum()).tolist()
        for layer, count in tally.items()
    }


def build_model(config: SparsifyToy, seed: int) -> PreTrainedModel:
    """A GPT-2 of these sizes, its weights a function of the seed; this process's random state is kept."""
    shape = GPT2Config(
        vocab_size=len(TOKENS),
        n_positions=len(PLACES),
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        # the function of gelu_new, GPT-2's own, computed in one pass
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(shape)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character of "37+08=", spaces left out; other characters are refused by the tokenizer itself."""
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}))
    tokenizer.normalizer = normalizers.Replace(" ", "")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _spent(result: dict[str, float], begun: float) -> dict[str, float]:
    """What the training took; the CPU seconds are those of this process, the others of all its lives."""
    return {
        "loss": result["loss"],
        "train_seconds": round(result["train_seconds"], 2),
        "cpu_seconds": round(time.process_time() - begun, 2),
    }
