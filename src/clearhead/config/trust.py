"""The verb that measures how far the heads of a Lorsa can be trusted."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from clearhead.config.lorsa import OfRun


@dataclass(frozen=True, kw_only=True)
class Trust(OfRun):
    """Measure how far to trust each head: other seeds, causal effects, what of it the model holds."""

    verb: ClassVar[str] = "trust"

    seeds: tuple[str, ...] = ()
    """Runs of the same layer trained from other seeds, whose heads are matched with this run's."""
    heads: tuple[int, ...] = ()
    """Heads whose effects are measured. Derived: those active at most tokens, as many as --effects says."""
    effects: int = 1000
    """How many heads' effects are measured, each by removing it at some tokens; all other measures are of all heads."""
    cases: int = 8
    """Tokens at which each of them is removed."""
    tokens: int = 20_000
    """Tokens to measure on."""
    seed: int = 0
    """Seed of the tokens that are drawn, of random directions and of intervals."""
    out: Path | None = None
    """Directory of the atlas that gets the table. Derived: atlas in the run directory."""

    def validate(self) -> None:
        """Counts are positive, heads count from 0."""
        super().validate()
        self._positive("effects", "cases")
        self._refuse(any(head < 0 for head in self.heads), "heads", "heads count from 0")
        self._refuse(len(set(self.heads)) < len(self.heads), "heads", "name each head once")
