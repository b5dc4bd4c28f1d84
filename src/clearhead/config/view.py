"""The verb that every lens ends with: the page of an atlas."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tyro.conf import Positional

from clearhead.config.verb import Verb


@dataclass(frozen=True, kw_only=True)
class View(Verb):
    """Write one self-contained page of an analysed run; it opens without a network."""

    verb: ClassVar[str] = "view"

    run: Positional[Path]
    """Run directory with an atlas, or the atlas directory itself."""
    out: Path | None = None
    """File of the page. Derived: page.html beside the atlas."""
