"""The verb that makes a small model to study: pretraining from scratch."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from clearhead.config.verb import Dtype, Verb

Architecture = Literal["gpt2", "llama"]
TRAINED_VOCABULARY = 1024


@dataclass(frozen=True, kw_only=True)
class Pretrain(Verb):
    """Train a small language model from scratch, keeping models along the way."""

    verb: ClassVar[str] = "pretrain"

    architecture: Architecture = "gpt2"
    """gpt2: LayerNorm, learned positions, GELU. llama: RMSNorm, RoPE, SwiGLU. Both with tied embeddings."""
    layers: int = 2
    """Layers."""
    width: int = 128
    """Width of the residual stream, a multiple of --heads."""
    heads: int = 4
    """Attention heads per layer."""
    mlp_width: int | None = None
    """Hidden width of the MLPs; with 1, attention is left nearly alone. Derived: 4 times --width, for llama 8/3."""
    vocabulary: int | None = None
    """Tokens of the tokenizer that is trained. Derived: 1,024, or the size of the one given with --tokenizer."""
    context: int = 128
    """Tokens per sequence, and the longest the model can read."""
    tokenizer: str | None = None
    """An existing tokenizer: a folder, a Hugging Face id or a bundled model. Derived: byte-level BPE of the text."""
    text: str = "default"
    """Text: a Hugging Face dataset id, a folder, a file (txt, jsonl, parquet), or default (needs no network)."""
    tokens: int = 20_000_000
    """Tokens to train on; more than the text holds means that it is read several times."""
    batch_tokens: int = 4096
    """Tokens per step, a multiple of the context."""
    lr: float = 3e-3
    """Peak learning rate of AdamW."""
    repeat_share: float = 0.25
    """Share of the sequences that are random tokens repeated, which is what makes induction heads form early."""
    checkpoints: str = "24"
    """Models to keep: how many, or after which steps, separated by commas (0,500,1000). A number begins dense."""
    store_dtype: Dtype = "float32"
    """Number format of the finished model on disk; training and the models kept along the way are float32."""
    gates: bool = False
    """Train with gates on all attention edges from the first step, and close them once the loss is below --target."""
    target: float | None = None
    """With --gates: loss (nats) of sampled gates on the training sequences above which no edge is closed."""
    seed: int = 0
    """Seed of the weights, of the batch order and of the random sequences."""
    device: str = "auto"
    """Where to compute: a torch device (cpu, cuda, cuda:1, mps), or auto for an accelerator where there is one."""
    out: Path | None = None
    """Run directory. Derived: runs/pretrain-<architecture>-<layers>x<width>-<text>-s<seed>."""
    resume: bool = True
    """Continue a run directory that holds the same configuration; otherwise refuse to write into it."""

    def validate(self) -> None:
        """Sizes are positive and fit each other, blocks fill the batch, checkpoints are within the run."""
        self._positive("layers", "width", "heads", "mlp-width", "vocabulary", "tokens", "batch-tokens", "lr")
        self._refuse(self.context < 8, "context", "a repeated sequence needs at least 8 tokens")
        self._refuse(
            self.width % self.heads != 0, "width", f"the {self.heads} heads share it equally; give a multiple of them"
        )
        self._refuse(
            self.architecture == "llama" and self.width // self.heads % 2 != 0,
            "width",
            f"RoPE turns pairs of dimensions, so each of the {self.heads} heads needs an even width",
        )
        self._refuse(
            self.batch_tokens % self.context != 0,
            "batch-tokens",
            f"a batch holds whole sequences; give a multiple of --context {self.context}",
        )
        self._refuse(not 0 <= self.repeat_share < 1, "repeat-share", "give a share from 0 up to, not including, 1")
        self._refuse(
            self.vocabulary is not None and self.tokenizer is not None,
            "vocabulary",
            f"the tokenizer {self.tokenizer!r} has a size of its own; leave one of the two out",
        )
        self.checkpoint_steps()
        if self.gates:
            self._refuse(self.target is None or self.target <= 0, "target", "--gates needs the loss to hold, in nats")
            self._meaningless(("checkpoints",), "with --gates only the finished model is kept")
        else:
            self._meaningless(("target",), "only a model with --gates has a loss to hold")

    def steps(self) -> int:
        """Optimiser steps: tokens divided by tokens per step, rounded up."""
        return -(-self.tokens // self.batch_tokens)

    def checkpoint_steps(self) -> list[int]:
        """The steps after which a model is kept, ascending; see `spread_steps` for a number of them.

        Raises `ClearheadError` for what is no list of steps of this run.
        """
        words = self.checkpoints.split(",")
        expected = f"give a number of models, or steps between 0 and {self.steps()} separated by commas"
        self._refuse(not all(word.strip().isdecimal() for word in words), "checkpoints", expected)
        given = [int(word) for word in words]
        if len(given) == 1:
            return spread_steps(given[0], self.steps())
        self._refuse(max(given) > self.steps() or len(set(given)) < len(given), "checkpoints", expected)
        return sorted(given)

    def resolved(self) -> "Pretrain":
        """The same configuration with the directory filled in and, for a tokenizer to be trained, its size."""
        vocabulary = (self.vocabulary or TRAINED_VOCABULARY) if self.tokenizer is None else None
        return dataclasses.replace(self, vocabulary=vocabulary, out=self.directory())

    def directory(self) -> Path:
        """The run directory."""
        size = f"{self.layers}x{self.width}"
        return self.out or Path("runs") / f"pretrain-{self.architecture}-{size}-{Path(self.text).stem}-s{self.seed}"


def spread_steps(count: int, steps: int) -> list[int]:
    """`count` steps from 0 to `steps`: a quarter spaced geometrically from 1 on, the rest equally to the end.

    Early training changes on a logarithmic scale; a phase change may come at any time, so no later stretch is left
    unwatched. Fewer come back where steps coincide.
    """
    if count < 1:
        return []
    if count == 1:
        return [steps]
    early = (count - 1) // 4
    even = count - 1 - early
    first = steps / even
    geometric = [first ** (i / early) for i in range(early)] if early and first > 1 else []
    return sorted({0, *(round(step) for step in geometric), *(round(first * (i + 1)) for i in range(even))})
