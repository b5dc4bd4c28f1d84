"""The verb that traces where heads look back to who wrote the signal, and tests it."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from clearhead.config.task import is_file
from clearhead.config.verb import Dtype, Verb, shortened
from clearhead.errors import ClearheadError


@dataclass(frozen=True, kw_only=True)
class SpectralTrace(Verb):
    """Trace an answer, or one firing of a head, back to who wrote its signal; then remove it."""

    verb: ClassVar[str] = "spectral trace"

    model: str = "smollm2"
    """Model under study: a Hugging Face id, a local folder, or a bundled one (smollm2, clearhead-tiny)."""
    prompt: str | None = None
    """One text to trace. Derived: the prompts of --task."""
    answer: str | None = None
    """The token that follows the prompt, its leading space included. Derived: the model's own most likely one."""
    wrong: str | None = None
    """A token that --answer is compared with. Derived: the mean over the vocabulary."""
    firing: str | None = None
    """Start from this place, LAYER.HEAD.QUERY.KEY, instead of the heads that carry the logit difference."""
    task: str | None = None
    """A task: ioi, or a JSONL file of prompts. Derived: ioi, where there is no --prompt."""
    prompts: int = 8
    """Prompts of a built-in task."""
    depth: int = 3
    """Levels of firings that are traced; the first are those that write the logit difference."""
    firings: int = 1
    """Firings of the first level, per prompt, whose signals are removed and doubled in the running model."""
    draws: int = 20
    """Controls of every intervention: as many random other modes of the same head, of the same norm."""
    boost: bool = True
    """Also double every signal, beside removing it; takes as long again."""
    seed: int = 0
    """Seed of the task, the controls and the bootstrap."""
    dtype: Dtype = "float32"
    """Number format of the model's weights; decompositions are float64 and sums float32 at least."""
    device: str = "auto"
    """Where to compute: a torch device (cpu, cuda, cuda:1, mps), or auto for an accelerator where there is one."""
    out: Path | None = None
    """Run directory. Derived: runs/trace-MODEL-TEXT."""

    def validate(self) -> None:
        """One prompt or a task; what belongs to a prompt is given with one; controls are enough to compare with."""
        if self.prompt is not None and self.task is not None:
            raise ClearheadError("--prompt and --task exclude each other: give one of them")
        self._refuse(self.prompt is not None and not self.prompt.strip(), "prompt", "give a text")
        for option in ("answer", "wrong", "firing"):
            given = getattr(self, option) is not None
            self._refuse(given and self.prompt is None, option, "it belongs to a --prompt; a task has its own answers")
        self._refuse(self.wrong is not None and self.answer is None, "wrong", "give --answer too")
        self._positive("prompts", "depth")
        if self.prompt is not None:
            self._meaningless(("prompts",), "--prompt is one text")
        elif is_file(self.task_name):
            self._meaningless(("prompts",), "all prompts of the file are traced")
        self._refuse(self.firings < 0, "firings", "give 0 or a positive number")
        self._refuse(self.draws < 20, "draws", "an average of fewer than 20 controls is noise")

    @property
    def task_name(self) -> str:
        """The task that is traced where there is no prompt."""
        return self.task or "ioi"

    def directory(self) -> Path:
        """The run directory."""
        text = shortened(self.prompt) if self.prompt is not None else Path(self.task_name).stem
        return self.out or Path("runs") / f"trace-{Path(self.model).name}-{text}"
