"""The verb that recovers the features one head compares."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from clearhead.config.verb import OfModel

Shrinkage = Literal["ledoit-wolf", "ridge", "none"]


@dataclass(frozen=True, kw_only=True)
class SpectralFeatures(OfModel):
    """Recover the feature pairs that one head compares: its singular vectors, unwhitened."""

    verb: ClassVar[str] = "spectral features"

    head: int
    """Head of the layer, counted from 0."""
    tokens: int = 20_000
    """Tokens to estimate the covariance on, at most; 20 per dimension of the model are a good number."""
    modes: int = 8
    """Singular modes, largest first; at most the head's width."""
    ica: bool = False
    """Also separate pairs that share these modes, by independent components."""
    seed: int = 0
    """Seed of the separation's start, and of the random dictionary that --dictionary is compared with."""
    shrinkage: Shrinkage = "ledoit-wolf"
    """How the covariance is shrunk towards a multiple of the identity."""
    outside_cone: bool = False
    """Compare features with tokens without their part along what all inputs share (mean, top 3 components)."""
    neighbours: int = 5
    """Nearest tokens and elements per feature."""
    dictionary: Path | None = None
    """Folder of a trained Lorsa (RUN/lorsa) whose write vectors are searched too."""
    batch_blocks: int = 8
    """Blocks per forward pass: memory against speed, never the result."""
    out: Path | None = None
    """Run directory. Derived: runs/<model>-<layer>.<head>-features."""

    def validate(self) -> None:
        """Counts are positive."""
        super().validate()
        self._refuse(self.head < 0, "head", "heads are counted from 0")
        self._positive("tokens", "modes", "neighbours", "batch-blocks")

    def directory(self, layer: int) -> Path:
        """The run directory, for the layer's index from 0."""
        return self.out or Path("runs") / f"{Path(self.model).name}-{layer}.{self.head}-features"
