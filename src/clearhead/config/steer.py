"""The verb that turns units of a traced prompt up or down."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tyro.conf import Positional

from clearhead.config.verb import Verb
from clearhead.errors import ClearheadError


@dataclass(frozen=True, kw_only=True)
class Steer(Verb):
    """Turn units of a traced prompt up or down: the effect that edges predict, and the measured one."""

    verb: ClassVar[str] = "steer"

    traced: Positional[Path]
    """Run directory of clearhead trace; its prompt, model, dictionaries and targets are taken."""
    turn: tuple[str, ...] = ()
    """Units with factors, as feature.12.345@7=0; 0 removes what a unit writes, 2 doubles it."""
    device: str = "auto"
    """Where to compute: a torch device (cpu, cuda, cuda:1, mps), or auto for an accelerator where there is one."""
    out: Path | None = None
    """Run directory. Derived: steered in that of the trace."""

    def validate(self) -> None:
        """Units with factors that are numbers."""
        self._refuse(not self.turn, "turn", "give a unit and a factor, as feature.12.345@7=0")
        self.factors()

    def factors(self) -> dict[str, float]:
        """The factor of each unit by its name."""
        found: dict[str, float] = {}
        for text in self.turn:
            unit, _, number = text.rpartition("=")
            try:
                factor = float(number)
            except ValueError:
                factor = math.nan
            if not unit or not math.isfinite(factor):
                raise ClearheadError(f"--turn {text} is no unit with a factor; give one as feature.12.345@7=0")
            if unit in found:
                raise ClearheadError(f"--turn names {unit} twice; give one factor")
            found[unit] = factor
        return found

    def directory(self) -> Path:
        """The run directory."""
        return self.out or self.traced / "steered"
