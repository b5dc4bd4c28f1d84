"""What it means to train a language model: its sequences, its loss, and what is measured and kept on the way.

    L = mean over all sequences and positions 1..T-1 of -log p(token | tokens before it)        (nats)

The sequences are blocks of text and random tokens repeated (data/repeats.py), in one order. Nothing here reads a file
or knows an architecture: any causal language model of transformers is trained alike.
"""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clearhead.data.repeats import repeated_sequences
from clearhead.errors import NonFiniteError
from clearhead.model.loading import no_bar_for_weights
from clearhead.training.loop import LOG_EVERY
from clearhead.training.optim import RateSchedule
from clearhead.training.repeats import measure_induction, next_token_losses

MEASUREMENTS = 100  # of the held-out losses, at most, equally spaced over the run
MEASURED_BLOCKS = 32  # repeated sequences; also the largest batch of a measurement


class TextAndRepeats:
    """All sequences of a training, numbered: first the repeated ones, then blocks of text, again when they run out."""

    def __init__(
        self,
        text: Int64[Tensor, "n t"],
        context: int,
        total: int,
        repeats: int,
        seed: int,
        alphabet: Int64[Tensor, " a"],
    ):
        self.text, self.context, self.total, self.repeats = text, context, total, repeats
        self.seed, self.alphabet = seed, alphabet

    def __len__(self) -> int:
        return self.total

    def batch(self, block_indices: Int64[Tensor, " b"]) -> Int64[Tensor, "b t"]:
        """The sequences of these numbers, in this order."""
        tokens = torch.empty(len(block_indices), self.context, dtype=torch.int64)
        random = block_indices < self.repeats
        tokens[random] = repeated_sequences(self.seed, block_indices[random], self.context, self.alphabet)
        if not bool(random.all()):
            tokens[~random] = self.text[(block_indices[~random] - self.repeats) % len(self.text)]
        return tokens


class LanguageModelling:
    """Training a language model: the loop's `Task`."""

    def __init__(self, model: PreTrainedModel):
        self.module: nn.Module = model

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """All parameters at one learning rate."""
        return [(list(self.module.parameters()), 1.0)]

    def loss(
        self,
        forward: Callable[..., Any],
        batch: Int64[Tensor, "b t"],
        schedule: RateSchedule,  # noqa: ARG002 - nothing but the learning rate is scheduled
        step: int,  # noqa: ARG002
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean next-token loss of one batch."""
        return next_token_losses(forward, batch).mean(), {}

    def finish_step(self, accelerator: Accelerator) -> None:
        """Nothing follows the optimiser's step."""

    def state(self) -> dict[str, Tensor]:
        """Nothing beyond weights and moments."""
        return {}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Nothing to restore."""


class Watch:
    """Measures the model on held-out data while it trains, and keeps it after the steps that were asked for.

    Every process measures, so that all end with the same numbers; one of them has `save` set.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        run: Path,
        *,
        held_out: Int64[Tensor, "n t"],
        alphabet: Int64[Tensor, " a"],
        keep: list[int],
        steps: int,
        save: bool,
    ):
        self.model, self.tokenizer, self.run = model, tokenizer, run
        self.held_out, self.alphabet, self.save = held_out, alphabet, save
        self.keep, self.steps, self.every = set(keep), steps, max(LOG_EVERY, steps // MEASUREMENTS)

    def __call__(self, done: int) -> dict[str, float]:
        """The losses after `done` steps where they are due, else nothing; raises `NonFiniteError` before saving NaN."""
        if done not in self.keep and done % self.every and done != self.steps:
            return {}
        losses = self.measure()
        for name, value in losses.items():
            if not math.isfinite(value):
                raise NonFiniteError(f"{name} is {value} after step {done}; lower --lr")
        if self.save and done in self.keep:
            save_model(self.model, self.tokenizer, self.run / "snapshots" / f"step-{done:08d}")
        return losses

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Loss on held-out text, and on both halves of random sequences that repeat once (nats per token)."""
        self.model.eval()
        parts = self.held_out.split(MEASURED_BLOCKS)
        text = torch.cat([next_token_losses(self.model, part.to(self.model.device)) for part in parts])
        first, second = measure_induction(self.model, self.alphabet, self.held_out.shape[1], MEASURED_BLOCKS)
        self.model.train()
        return {"held_out_ce": float(text.mean()), "repeat_ce_first": first, "repeat_ce_second": second}


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face folder, whole or not at all; one of that name is replaced."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        with no_bar_for_weights():
            model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
