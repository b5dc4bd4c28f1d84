"""The verbs that say how faithful decompositions are: a grid of trainings, and the report of what was trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tyro.conf import Positional

from clearhead.config.lorsa import Initialisation
from clearhead.config.verb import Dtype, OfLayers, Split, Verb

SweptKind = Literal["lorsa", "sae", "transcoder"]


@dataclass(frozen=True, kw_only=True)
class TrainSweep(OfLayers):
    """Train Lorsas, SAEs and attention transcoders over a grid of sizes, K and seeds, and measure them."""

    verb: ClassVar[str] = "train sweep"

    kinds: tuple[SweptKind, ...] = ("lorsa", "sae")
    """Which dictionaries: Lorsas, SAEs on attn_out, transcoders from attn_in to attn_out (what needs no attention)."""
    heads: tuple[int, ...] = ()
    """Lorsa heads; the other kinds get as many parameters as such a Lorsa. Derived: 4 times the model's width."""
    parameters: tuple[int, ...] = ()
    """Parameters of every kind, instead of --heads; each kind gets the number of units that comes closest."""
    k: tuple[int, ...] = (64,)
    """Units active per token (L0), the same for all kinds."""
    init: tuple[Initialisation, ...] = ("data",)
    """Starting weights of Lorsas; SAEs and transcoders start from their data."""
    seeds: tuple[int, ...] = (0,)
    """Seeds; all trainings of one seed see the same tokens in the same order."""
    tokens: int = 100_000
    """Tokens that every training sees."""
    store: Path | None = None
    """Store written by `clearhead harvest`, or folder of stores of several layers. Derived: none."""
    measured_tokens: int = 100_000
    """Held-out tokens to measure on."""
    out: Path = Path("runs/sweep")
    """Directory of the sweep: a run directory for each training, summary.json. Finished trainings are not repeated."""

    def validate(self) -> None:
        """Counts are positive, lists name something, sizes are given one way."""
        super().validate()
        self._positive("tokens", "measured-tokens")
        for option in ("heads", "parameters", "k", "seeds"):
            smallest = 0 if option == "seeds" else 1
            low = any(value < smallest for value in getattr(self, option))
            self._refuse(low, option, f"give numbers from {smallest} on")
        for option in ("kinds", "k", "init", "seeds"):
            self._refuse(not getattr(self, option), option, "name at least one")
        self._refuse(bool(self.heads and self.parameters), "parameters", "give --heads or --parameters, not both")


@dataclass(frozen=True, kw_only=True)
class Fidelity(Verb):
    """Report how faithful decompositions of attention are: against SAEs, by size, and what all miss."""

    verb: ClassVar[str] = "fidelity"

    runs: Positional[tuple[Path, ...]] = ()
    """Directories of trained Lorsas, SAEs and transcoders of attention, or folders of them, as a sweep's."""
    text: str | None = None
    """Text to measure on, as for training. Derived: the runs' own, from its held-out part."""
    split: Split = "held_out"
    """Part of the text: held_out holds other documents (other packages, other books) than train."""
    tokens: int = 50_000
    """Tokens to measure on."""
    batch_blocks: int = 8
    """Blocks per forward pass: memory against speed."""
    seed: int = 0
    """Seed of the shuffled controls and of the intervals."""
    dtype: Dtype | None = None
    """Number format of the model's weights. Derived: the one the runs were trained with."""
    device: str = "auto"
    """Where to compute: a torch device (cpu, cuda, cuda:1, mps), or auto for an accelerator where there is one."""
    out: Path = Path("runs/fidelity")
    """Directory of the report: summary.json with all numbers, and page.html."""

    def validate(self) -> None:
        """Counts are positive."""
        self._positive("tokens", "batch-blocks")
