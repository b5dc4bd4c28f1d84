"""The verb that lays evaluated sparse runs side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tyro.conf import Positional

from clearhead.config.verb import Verb


@dataclass(frozen=True, kw_only=True)
class Frontier(Verb):
    """Show open edges against the rise of the loss over several sparse runs and their controls."""

    verb: ClassVar[str] = "frontier"

    runs: Positional[tuple[Path, ...]] = ()
    """Evaluated directories of `clearhead sparsify`, sparse runs and controls, of one model, context and text."""
    out: Path = Path("frontier.html")
    """File of the page; the numbers go into a .json beside it."""

    def validate(self) -> None:
        """The page is a page, so that the numbers beside it have another name."""
        self._refuse(self.out.suffix != ".html", "out", "name an .html file")
