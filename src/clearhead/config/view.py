"""The verb that every lens ends with: the page of what a run found."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tyro.conf import Positional

from clearhead.config.verb import Verb


@dataclass(frozen=True, kw_only=True)
class View(Verb):
    """Write one self-contained page of an analysed, traced or evaluated run; it opens without a network."""

    verb: ClassVar[str] = "view"

    run: Positional[Path]
    """Run directory with an atlas (or the atlas itself), with a graph, or with the evaluation of a sparse model."""
    against: Path | None = None
    """A second run on the same page: another graph, laid over the first, or circuit curves of another model."""
    out: Path | None = None
    """File of the page. Derived: page.html in the run directory."""
