"""The verb that draws the circuit of a model whose layers dictionaries replace."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tyro.conf import Positional

from clearhead.config.verb import Dtype, Split, Verb, shortened


@dataclass(frozen=True, kw_only=True)
class CircuitGlobal(Verb):
    """Draw the circuit of a whole model: which units feed which, from weights and co-activation."""

    verb: ClassVar[str] = "circuit global"

    dictionaries: Positional[tuple[str, ...]]
    """Runs, folders or hub ids of Lorsas and transcoders, one for each module that they replace."""
    model: str = "clearhead-tiny"
    """Model under study: a Hugging Face id, a local folder, or a bundled one (smollm2, clearhead-tiny)."""
    text: str = "default"
    """Text on which units are active together: a dataset id, a folder, a file, or default."""
    split: Split = "held_out"
    """Part of the text."""
    repeats: bool = False
    """Random tokens that come twice instead of a text: what induction heads need."""
    tokens: int = 8_192
    """Tokens of it."""
    context: int = 128
    """Tokens per block."""
    edges: int = 600
    """Edges kept between patterns, and between single heads: those that matter most for the logits."""
    seed: int = 0
    """Seed of random tokens."""
    dtype: Dtype = "float32"
    """Number format of the model's weights."""
    device: str = "auto"
    """Where to compute: a torch device (cpu, cuda, cuda:1, mps), or auto for an accelerator where there is one."""
    out: Path | None = None
    """Run directory. Derived: runs/circuit-<model>-<text>."""

    def validate(self) -> None:
        """There are dictionaries; counts are positive."""
        self._refuse(not self.dictionaries, "dictionaries", "give at least one run of `clearhead train lorsa`")
        self._positive("tokens", "edges")
        self._refuse(self.context < 4, "context", "a block needs at least 4 tokens")
        if self.repeats:
            self._meaningless(("text", "split"), "random tokens are drawn with --repeats")

    def directory(self) -> Path:
        """The run directory."""
        text = "repeats" if self.repeats else Path(self.text).stem
        return self.out or Path("runs") / f"circuit-{shortened(Path(self.model).name)}-{text}"
