"""The verb that measures how far the heads of a Lorsa can be trusted."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from clearhead.config.lorsa import OfRun
from clearhead.errors import ClearheadError


@dataclass(frozen=True, kw_only=True)
class Trust(OfRun):
    """Measure how far to trust each head: other seeds, causal effects, what of it the model holds."""

    verb: ClassVar[str] = "trust"

    seeds: tuple[str, ...] = ()
    """Runs of the same layer trained from other seeds, whose heads are matched with this run's."""
    heads: tuple[int, ...] = ()
    """Heads whose effects are measured, with their families. Derived: those active at most tokens, and all families."""
    effects: int = 1000
    """How many heads' effects and patterns are measured, if none is named; all other measures are of all heads."""
    becomes: tuple[str, ...] = ()
    """What else activations are set to besides 0: factors (0.5 2 4), mean, or elsewhere (as at another token)."""
    cases: int = 8
    """Tokens at which each of them is removed, and set to what --becomes says."""
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
        found = [one if isinstance(one, str) else f"{one:g}" for one in self.settings()]  # as the table names them
        self._refuse(len(set(found)) < len(found), "becomes", "name each setting once")

    def settings(self) -> tuple[float | Literal["mean", "elsewhere"], ...]:
        """`becomes` as factors and patches; raises `ClearheadError` for what is neither, or changes nothing."""
        found: list[float | Literal["mean", "elsewhere"]] = []
        for text in self.becomes:
            if text == "mean" or text == "elsewhere":
                found.append(text)
                continue
            try:
                factor = float(text)
            except ValueError:
                factor = math.nan
            if f"{factor:g}" == "1" or not math.isfinite(factor):
                raise ClearheadError(
                    f"--becomes {text} is not possible: give factors other than 1, such as 0.5 2 4, mean or elsewhere"
                )
            found.append(factor)
        return tuple(found)
