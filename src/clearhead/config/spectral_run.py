"""The verbs that decompose the attention of a real model: one model over texts, or its checkpoints in turn."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tyro.conf import Positional

from clearhead.config.task import is_file
from clearhead.config.verb import Dtype, Verb, shortened
from clearhead.errors import ClearheadError

Basis = Literal["fixed", "offset"]


@dataclass(frozen=True, kw_only=True)
class OfTexts(Verb):
    """The verbs that look at attention over prompts, a task, or a text."""

    prompt: str | None = None
    """One text to look at."""
    task: str | None = None
    """A task: ioi, or a JSONL file of prompts (docs/concepts/spectral.md)."""
    prompts: int = 128
    """Prompts of a built-in task."""
    text: str | None = None
    """A Hugging Face dataset id, a folder, a file, or default (needs no network). Derived: default."""
    tokens: int = 8192
    """Tokens of the text."""
    context: int = 64
    """Tokens per block of the text."""
    threshold: float = 0.5
    """A head fires where a key has more than this share of its attention, and 2.5 times an even share; 0.5 or more."""
    basis: Basis = "offset"
    """With RoPE: for each pair the modes at its own distance, or (fixed) one basis per head, that without rotation."""
    seed: int = 0
    """Seed of every random choice."""
    dtype: Dtype = "float32"
    """Number format of the model's weights; decompositions are float64 and statistics float32 at least."""
    device: str = "auto"
    """Where to compute: a torch device (cpu, cuda, cuda:1, mps), or auto for an accelerator where there is one."""

    def validate(self) -> None:
        """At most one of prompt, task and text, each with its own options; counts and the threshold are possible."""
        given = [name for name in ("prompt", "task", "text") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ClearheadError(f"--{given[0]} and --{given[1]} exclude each other: give one of them")
        self._refuse(self.prompt is not None and not self.prompt.strip(), "prompt", "give a text")
        self._positive("prompts", "tokens")
        self._refuse(self.context < 2, "context", "a query needs at least 2 keys to choose from")
        self._refuse(not 0.5 <= self.threshold < 1, "threshold", "give a share from 0.5 to below 1")

        if self.prompt is not None:
            self._meaningless(("prompts", "tokens", "context"), "--prompt is one text and is read whole")
        elif self.task is not None:
            self._meaningless(("tokens", "context"), "the prompts of --task are read whole")
            if is_file(self.task):
                self._meaningless(("prompts",), "all prompts of the file are read")
        else:
            self._meaningless(("prompts",), "it is for a built-in --task")

    def texts(self) -> dict[str, object]:
        """The options that say what is read."""
        if self.prompt is not None:
            return {"prompt": self.prompt}
        if self.task is not None:
            return {"task": self.task, "prompts": self.prompts}
        return {"text": self.text or "default", "tokens": self.tokens, "context": self.context}

    @property
    def source(self) -> str:
        """What the texts are, in a word that can stand in a path."""
        if self.prompt is not None:
            return shortened(self.prompt)
        return Path(self.task or self.text or "default").stem


@dataclass(frozen=True, kw_only=True)
class SpectralRun(OfTexts):
    """Split where every head looks into singular modes, with controls, verdicts and a page."""

    verb: ClassVar[str] = "spectral run"

    model: str = "smollm2"
    """Model under study: a Hugging Face id, a local folder, or a bundled one (smollm2, clearhead-tiny)."""
    controls: bool = True
    """Compare every head with rotated bases, random subspaces, shuffled keys and untrained weights."""
    untrained: bool = True
    """Include the untrained weights among the controls: three more passes over the texts."""
    draws: int = 1000
    """Rotations and shuffles per head; fewer than 1000 give no p value, so no verdict of separation."""
    out: Path | None = None
    """Run directory. Derived: runs/spectral-MODEL-TEXT."""

    def validate(self) -> None:
        """As for all verbs of texts; at least one draw, and controls where something is said about them."""
        super().validate()
        self._positive("draws")
        if not self.controls:
            self._meaningless(("draws", "untrained"), "--no-controls compares with nothing")

    def directory(self) -> Path:
        """The run directory."""
        return self.out or Path("runs") / f"spectral-{Path(self.model).name}-{self.source}"


@dataclass(frozen=True, kw_only=True)
class SpectralSweep(OfTexts):
    """Follow S and N_recon of every head over the checkpoints of a model's training."""

    verb: ClassVar[str] = "spectral sweep"

    checkpoints: Positional[str]
    """A `clearhead pretrain` run, a folder of Hugging Face folders, or MODEL@REVISION,REVISION,... on the hub."""
    out: Path | None = None
    """Run directory. Derived: runs/sweep-CHECKPOINTS-TEXT."""

    def directory(self) -> Path:
        """The run directory."""
        return self.out or Path("runs") / f"sweep-{Path(self.checkpoints.partition('@')[0]).name}-{self.source}"
