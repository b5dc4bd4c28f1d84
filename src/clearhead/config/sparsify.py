"""The verb that makes a model attend through few edges."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from clearhead.config.verb import Verb

Constraint = Literal["paired", "ce", "kl"]
Control = Literal["none", "dense", "random"]
Penalty = Literal["mean", "head-budget", "layer-budget", "tiles"]
Precision = Literal["float32", "bfloat16", "float16"]
Rule = Literal["normalised", "exponential", "additive", "speedup"]

FULL_RATE, ADAPTER_RATE = 3e-4, 1e-3


@dataclass(frozen=True, kw_only=True)
class Sparsify(Verb):
    """Post-train a model so that it attends through few edges, with its loss held within a tolerance."""

    verb: ClassVar[str] = "sparsify"

    model: str = "smollm2"
    """Model to train: a Hugging Face id, a local folder, or a bundled one (smollm2, clearhead-tiny)."""
    text: str = "default"
    """Text: a Hugging Face dataset id, a folder, a file (txt, jsonl, parquet), or default (needs no network)."""
    context: int = 256
    """Tokens per sequence; documents are packed into sequences of this length."""
    tokens: int = 2_000_000
    """Tokens to train on; a larger number continues a finished run."""
    batch_tokens: int = 512
    """Tokens per step, a multiple of the context. At a fixed number of tokens, more steps beat larger ones."""
    tolerance: float = 0.02
    """How much the loss may rise over the dense model's, in nats per token."""
    target: float | None = None
    """Loss to reach or stay below, for a model that is not trained yet; needs --constraint ce. Derived: the base's."""
    constraint: Constraint = "kl"
    """What may rise: kl, KL(base ‖ model); paired, the loss over the base's on the same text; ce, over a fixed one."""
    distill: float = 0.0
    """Weight of KL(base ‖ model) in the loss."""
    lora: int | None = None
    """Rank of LoRA adapters on all linear layers; scale 2. Derived: none, every parameter is trained."""
    lr: float | None = None
    """Peak learning rate of Adam. Derived: 3e-4, or 1e-3 with --lora."""
    gate_lr_factor: float = 20.0
    """Learning rate of the gates' biases, as a multiple of --lr."""
    warmup_share: float = 0.05
    """Share of the steps in which the learning rate rises and the multiplier rests."""
    settle_share: float = 0.1
    """Share of the steps, at the end, in which gates are hard instead of sampled and the learning rate falls."""
    open_mass: float = 0.999
    """Share of each head's softmax mass that the gates let through at the start; their biases are set to that."""
    gate_bias: float | None = None
    """Bias of all gates at the start. Derived: by head, from --open-mass."""
    sink: bool = False
    """Denominator over open edges and a learned sink, so that closed edges carry nothing; else over all keys."""
    exact: bool = False
    """Gate gradient p(1-p) instead of straight-through with the sampled noise."""
    penalty: Penalty = "mean"
    """What falls: mean share of open edges; that of heads or layers above --budget; that and open tiles of 64 x 64."""
    budget: float = 0.0
    """Share of open edges below which a head or layer is left alone."""
    length_weight: float = 0.0
    """Extra price of an edge whose length is the whole context; 0 prices all edges alike."""
    rule: Rule = "normalised"
    """Update of the multiplier: normalised by the tolerance and clipped, or one of the plain rules."""
    multiplier_rate: float = 0.02
    """Step of the multiplier's update."""
    repeat_share: float = 0.0
    """Share of the sequences that are random tokens repeated, for a model that was pretrained on such."""
    control: Control = "none"
    """A control on the same tokens: dense, no gates and no penalty; random, edges by lot at the density of --like."""
    like: Path | None = None
    """The finished run whose edge share by layer and head the control has."""
    precision: Precision = "float32"
    """Number format of activations in training; weights, gates and multiplier stay in float32."""
    device: str = "auto"
    """Where to compute: a torch device (cpu, cuda, cuda:1, mps), or auto for an accelerator where there is one."""
    seed: int = 0
    """Seed of the gates, the batch order and the adapters."""
    out: Path | None = None
    """Run directory. Derived: runs/sparsify-<model>-<text>-t<tolerance>-s<seed>."""
    resume: bool = True
    """Continue a run directory that holds the same configuration; otherwise refuse to write into it."""

    def validate(self) -> None:
        """Shares are shares, counts are positive, options that exclude each other are not both given."""
        self._refuse(self.context < 8, "context", "a sequence needs at least 8 tokens")
        self._positive("tokens", "batch-tokens", "lora", "lr", "gate-lr-factor", "multiplier-rate")
        self._refuse(self.tolerance < 0, "tolerance", "the loss cannot be held below the base's; give 0 or more")
        if self.target is not None:
            self._refuse(self.constraint != "ce", "target", "only --constraint ce compares with a fixed loss; add it")
            self._refuse(self.target <= 0, "target", "a loss is above 0")
        self._refuse(
            self.precision == "float16",
            "precision",
            "gradients of nearly closed gates underflow in float16; use float32 or bfloat16",
        )
        self._refuse(
            self.batch_tokens % self.context != 0,
            "batch-tokens",
            f"a batch holds whole sequences; give a multiple of --context {self.context}",
        )
        for share in ("warmup-share", "settle-share", "repeat-share", "budget"):
            value = getattr(self, share.replace("-", "_"))
            self._refuse(not 0 <= value < 1, share, "give a share from 0 up to, not including, 1")
        left = f"--warmup-share {self.warmup_share} leaves less than that"
        self._refuse(self.warmup_share + self.settle_share > 1, "settle-share", left)
        self._refuse(not 0 < self.open_mass < 1, "open-mass", "give a share between 0 and 1")
        self._refuse(self.distill < 0, "distill", "give 0 or a number above")
        self._refuse(self.length_weight < 0, "length-weight", "give 0 or a number above")
        if self.control == "random":
            self._refuse(self.like is None, "like", "--control random takes its density from a finished run; name one")
        else:
            self._meaningless(("like",), "only --control random takes a density from a run")
        if self.penalty in ("mean", "tiles"):
            self._meaningless(("budget",), f"--penalty {self.penalty} has no budget")

    def steps(self) -> int:
        """Optimiser steps: tokens divided by tokens per step, rounded up."""
        return -(-self.tokens // self.batch_tokens)

    def resolved(self) -> "Sparsify":
        """The same configuration with rate and directory filled in."""
        rate = self.lr or (FULL_RATE if self.lora is None else ADAPTER_RATE)
        return dataclasses.replace(self, lr=rate, out=self.directory())

    def directory(self) -> Path:
        """The run directory."""
        kind = "" if self.control == "none" else f"-{self.control}"
        name = f"sparsify{kind}-{Path(self.model).name}-{Path(self.text).stem}-t{self.tolerance:g}-s{self.seed}"
        return self.out or Path("runs") / name
