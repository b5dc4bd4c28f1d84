"""The verb that trains the toy model, and its setting."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from clearhead.config.verb import Verb
from clearhead.errors import ClearheadError

Rope = Literal["off", "constant", "nearby"]
Sweep = Literal["none", "attention-weight", "features", "keys", "head-width"]


@dataclass(frozen=True, kw_only=True)
class ToySetting:
    """One toy model, with nothing left to derive; the fields are those of `SpectralToy`.

    Raises `ClearheadError` for sizes that do not fit each other.
    """

    pairs: int
    weakest_target: float
    features: int
    width: int
    head_width: int
    keys: int
    density: float
    attention_weight: float
    rope: Rope
    steps: int
    batch: int
    lr: float

    def __post_init__(self):
        for name in ("pairs", "width", "head_width", "density", "steps", "batch", "lr"):
            self._refuse(name, getattr(self, name) <= 0, "give a number above 0")
        self._refuse("weakest_target", not 0 < self.weakest_target <= 1, "give a number above 0, at most 1")
        attended = 2 * self.pairs
        self._refuse("features", self.features <= attended, f"the {attended} of the pairs need one more beside them")
        self._refuse("head_width", self.head_width > self.width, f"a token has {self.width} dimensions")
        turned = self.rope != "off" and self.head_width % 2 == 1
        self._refuse("head_width", turned, "rotary positions turn two dimensions at a time, give an even number")
        self._refuse("keys", self.keys < 2, "a query needs at least 2 keys to choose from")
        self._refuse("density", self.density > 1, "a probability is at most 1")
        self._refuse("attention_weight", self.attention_weight < 0, "give 0 or a positive number")

    def _refuse(self, name: str, broken: bool, expected: str) -> None:
        if broken:
            raise ClearheadError(f"--{name.replace('_', '-')} {getattr(self, name)} is not possible: {expected}")


@dataclass(frozen=True, kw_only=True)
class SpectralToy(Verb):
    """Train the toy model: do singular vectors align with the features a head is trained on?"""

    verb: ClassVar[str] = "spectral toy"

    pairs: int = 1
    """Feature pairs (query, key) that the head must match; their target logits fall linearly from 1."""
    weakest_target: float = 0.3
    """Target logit of the last pair, where there are several."""
    features: int | None = None
    """Features of the autoencoder. Derived: 20 for one pair, else 5 per pair and at least 40."""
    width: int | None = None
    """Dimensions of a token. Derived: half the features."""
    head_width: int | None = None
    """Width of the head; with fewer than pairs, pairs share modes. Derived: the width of a token."""
    keys: int = 8
    """Keys that each query chooses from."""
    density: float | None = None
    """Probability that a feature is present in a token. Derived: 0.2 for one pair, else 0.4."""
    attention_weight: float | None = None
    """Weight λ of the attention loss; 0 trains no head. Derived: 100, 1000 for several pairs, threefold for nearby."""
    rope: Rope = "off"
    """Rotary positions: off; constant, the same target at every distance; nearby, a target that falls with distance."""
    steps: int | None = None
    """Training steps. Derived: 1500 for one pair, else 2000."""
    batch: int = 256
    """Queries per step."""
    lr: float = 3e-3
    """Peak learning rate of Adam; it falls to 0 along half a cosine."""
    seed: int = 0
    """First seed."""
    seeds: int = 1
    """Number of seeds, each trained anew; the figures show the first."""
    sweep: Sweep = "none"
    """Also train a toy for each of several values of this setting, at the first seed."""
    threads: int = 1
    """Threads; the steps are too small to gain from more."""
    out: Path | None = None
    """Run directory. Derived: runs/toy-PAIRS."""

    def validate(self) -> None:
        """Counts are positive and fit each other, once derived."""
        self._positive("pairs", "seeds", "threads")
        self.setting()

    def setting(self) -> ToySetting:
        """The toy model of this configuration, with every derived field filled in."""
        one = self.pairs == 1
        features = (20 if one else max(40, 5 * self.pairs)) if self.features is None else self.features
        width = max(1, features // 2) if self.width is None else self.width
        weight = (100.0 if one else 1000.0) * (3 if self.rope == "nearby" else 1)
        return ToySetting(
            pairs=self.pairs,
            weakest_target=self.weakest_target,
            features=features,
            width=width,
            head_width=width - width % (1 + (self.rope != "off")) if self.head_width is None else self.head_width,
            keys=self.keys,
            density=(0.2 if one else 0.4) if self.density is None else self.density,
            attention_weight=weight if self.attention_weight is None else self.attention_weight,
            rope=self.rope,
            steps=(1500 if one else 2000) if self.steps is None else self.steps,
            batch=self.batch,
            lr=self.lr,
        )

    def resolved(self) -> "SpectralToy":
        """The same configuration with every derived field filled in."""
        derived = dataclasses.asdict(self.setting())
        return dataclasses.replace(self, **derived, out=self.out or Path("runs") / f"toy-{self.pairs}")
