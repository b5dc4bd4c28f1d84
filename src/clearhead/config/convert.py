"""The verb that takes dictionaries from other libraries and gives ours to them."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tyro.conf import Positional

from clearhead.config.verb import Dtype, Verb
from clearhead.errors import ClearheadError

Library = Literal["clearhead", "llamascopium", "circuit-tracer"]


@dataclass(frozen=True, kw_only=True)
class Convert(Verb):
    """Make another library's dictionary a run that other verbs take, or write ours in its layout."""

    verb: ClassVar[str] = "convert"

    dictionary: Positional[Path]
    """Folder of circuit-tracer, sparsify, SAELens, llamascopium or OpenMOSS/Lorsa; with --to of another, a run."""
    to: Library = "clearhead"
    """Whose layout is written: clearhead, llamascopium (a Lorsa), circuit-tracer (transcoders of all layers)."""
    model: str | None = None
    """Model that the dictionary belongs to, by the name under which it is found here; their names differ."""
    layer: int | None = None
    """Layer it belongs to. Derived: what its files say."""
    text: str = "default"
    """Text that the verbs measure it on where none is given, as for training."""
    context: int = 256
    """Tokens per block that the verbs measure it on."""
    dtype: Dtype = "float32"
    """Number format of the model's weights when it is measured."""
    out: Path | None = None
    """Folder to write. Derived: runs/<model>-<folder>, or the run's name followed by that of the library."""

    def validate(self) -> None:
        """A model is named for what comes in, and nothing of the kind for what goes out."""
        if self.to == "clearhead":
            self._refuse(self.model is None, "model", "name the model that it was trained on, as --model smollm2")
            self._refuse(self.layer is not None and self.layer < 0, "layer", "give its number, from 0 on")
            self._positive("context")
        else:
            self._meaningless(("model", "layer", "text", "context", "dtype"), "the run says what it belongs to")

    def directory(self) -> Path:
        """The folder to write."""
        name = self.dictionary.resolve().name
        if self.out is not None:
            if self.out.resolve() == self.dictionary.resolve():
                raise ClearheadError(f"--out {self.out} is the folder that is read; give another")
            return self.out
        if self.to == "clearhead":
            return Path("runs") / f"{Path(self.model or '').name}-{name}"
        return self.dictionary.with_name(f"{name}-{self.to}")
