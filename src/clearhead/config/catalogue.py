"""The verb that says which known behaviours the heads of a model and of its Lorsas have."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tyro.conf import Positional

from clearhead.config.verb import Dtype, Layers, Verb
from clearhead.errors import ClearheadError


@dataclass(frozen=True, kw_only=True)
class Catalogue(Verb):
    """Find heads of eleven known kinds (induction, successor, ...), by thresholds fixed on planted ones."""

    verb: ClassVar[str] = "catalogue"

    run: Positional[Path | None] = None
    """Run directory of a trained Lorsa, or a folder of them: their heads, and the original heads of their layers."""
    model: str | None = None
    """Original heads of this model alone, instead of a run; with --planted, the model that gives the tokens."""
    layer: Layers = "all"
    """With --model, the layers: a number, several as 5,12,17, or all."""
    planted: bool = False
    """Print what the thresholds rest on instead: the detectors on planted units. Needs no run and no model."""
    per_kind: int = 20
    """With --planted, units planted of each kind."""
    seeds: int = 1
    """With --planted, plantings that are counted together, each with the next seed."""
    chance: bool = True
    """Also count what is found on shuffled text, which takes as long again."""
    out: Path | None = None
    """Directory for catalogue.json. Derived: the run directory; runs/catalogue with --model."""
    seed: int = 0
    """Seed of the probes, the shuffling and the planted units."""
    dtype: Dtype = "float32"
    """Number format of the model's weights."""

    def validate(self) -> None:
        """One source: a run, a model, or planted units."""
        given = [self.run is not None, self.model is not None and not self.planted, self.planted]
        if sum(given) != 1:
            raise ClearheadError(
                f"catalogue needs one of a run directory, --model NAME and --planted, and was given {sum(given)}"
            )
        self._positive("per-kind", "seeds")
        if self.planted:
            self._meaningless(("layer", "out", "chance"), "planted units are of no layer, and only printed")
        elif self.model is None:
            self._meaningless(("layer",), "a run says which layer it is of")
        if not self.planted:
            self._meaningless(("per-kind", "seeds"), "it is for planted units")
