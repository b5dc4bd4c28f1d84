"""One self-contained HTML page from an atlas: `write_page("runs/x/atlas", "x.html")`.

Which page depends on what the atlas holds: the heads of the spectral lens (`view.spectral_page`), or units (here). Both
fill the frame of `view.shell`; the data of units comes from `view.payload`, their charts from `view.figures`.
"""

from collections.abc import Iterator
from pathlib import Path

from clearhead.atlas.read import Atlas
from clearhead.view import spectral_page
from clearhead.view.explanations import EXPLANATIONS
from clearhead.view.payload import build_payload
from clearhead.view.shell import Contents, render, write_within
from clearhead.view.summary import chart_templates, summarise

SCRIPTS = ("units.js", "example.js", "card.js", "unit_list.js", "unit.js", "summary.js")
STYLES = ("unit.css", "card.css")
_FEWER_EXAMPLES = (None, 8, 4, 2, 1)


def write_page(atlas_path: str | Path, out_html: str | Path, *, max_megabytes: float = 25.0) -> Path:
    """Write the page of the atlas at `atlas_path` to `out_html` and return that path.

    A page that would pass `max_megabytes` (10^6 bytes) holds fewer examples per unit, or firings per head, and says so
    in a notice. Raises `ClearheadError` when there is no atlas or neither units nor heads in it, when the limit cannot
    be met with the fewest of each, and when the disk is full; `CorruptFileError` when the tables are damaged or
    contradict each other.
    """
    atlas = Atlas(atlas_path)
    if atlas.sql("select 1 from spectra limit 1"):
        return write_within(Path(out_html), spectral_page.pages(atlas), max_megabytes, spectral_page.SMALLEST)
    return write_within(Path(out_html), _pages(atlas), max_megabytes, "with one example per category")


def _pages(atlas: Atlas) -> Iterator[bytes]:
    """The page of an atlas of units, whole and then with fewer and fewer examples."""
    fixed = {"summaries": summarise(atlas), "templates": chart_templates(), "help": EXPLANATIONS}
    for limit in _FEWER_EXAMPLES:
        payload = build_payload(atlas, limit)
        contents = Contents(
            index={**payload.index, **fixed},
            parts={"units": payload.units, "texts": payload.texts},
            scripts=SCRIPTS,
            styles=STYLES,
            items="Units",
        )
        yield render(contents, atlas.about)
