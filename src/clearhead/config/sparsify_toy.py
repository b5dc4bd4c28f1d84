"""The verb that trains the addition toy: a small dense model, made sparse, beside its controls."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from clearhead.config.verb import Verb


@dataclass(frozen=True, kw_only=True)
class SparsifyToy(Verb):
    """Train a small model to add numbers below 100, make it sparse, and test what its open edges read."""

    verb: ClassVar[str] = "sparsify toy"

    layers: int = 4
    """Layers of the model (GPT-2's architecture)."""
    heads: int = 4
    """Attention heads per layer."""
    width: int = 64
    """Dimensions of a token, a multiple of --heads."""
    dense_steps: int = 1600
    """Steps of the dense training from scratch; a step takes 64 sums."""
    steps: int = 3000
    """Steps of the sparse post-training; a step takes 32 sums."""
    tolerance: float = 0.03
    """How far the sparse model may be from the dense one: KL(dense ‖ sparse) in nats per digit of the sum."""
    accuracy: float = 0.998
    """Share of training sums, all digits right, that the kept state must reach; of those the sparsest is kept."""
    sink: bool = True
    """Denominator over open edges and a learned sink, so that closed edges carry nothing; else over all keys."""
    seed: int = 0
    """First seed: of weights, the split into 9,000 and 1,000 sums, batch order and gates."""
    seeds: int = 1
    """Number of seeds, each trained anew; the random-gate control is trained for the first."""
    threads: int = 1
    """Threads; the steps are too small to gain from more."""
    out: Path | None = None
    """Run directory; one that holds the same run is continued. Derived: runs/addition."""

    def validate(self) -> None:
        """Counts are positive and fit each other; shares are shares."""
        self._positive("layers", "heads", "width", "dense-steps", "steps", "tolerance", "seeds", "threads")
        whole = f"every head has the same width; give a multiple of --heads {self.heads}"
        self._refuse(self.width % self.heads != 0, "width", whole)
        self._refuse(not 0 < self.accuracy <= 1, "accuracy", "give a share above 0, at most 1")

    def resolved(self) -> "SparsifyToy":
        """The same configuration with its directory filled in."""
        return dataclasses.replace(self, out=self.directory())

    def directory(self) -> Path:
        """The run directory."""
        return self.out or Path("runs") / "addition"
