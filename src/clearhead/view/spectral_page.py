"""The page of the spectral lens: which modes make each head look where it looks, with controls beside every number.

`view.page.write_page` writes it for an atlas that holds spectra. The frame is that of every page (`view.shell`).
"""

from collections.abc import Iterator

from clearhead.atlas.read import Atlas
from clearhead.view.shell import Contents, render
from clearhead.view.spectral_explanations import CONTROLS, EXPLANATIONS
from clearhead.view.spectral_payload import build_spectral_payload
from clearhead.view.spectral_summary import head_templates, summarise_heads

SCRIPTS = ("heads.js", "grid.js", "head_list.js", "firing.js", "firings.js", "head.js", "layer.js", "census.js")
STYLES = ("spectral.css",)
SMALLEST = "with 8 firings per head"
_FEWER_FIRINGS = (None, 128, 64, 32, 16, 8)


def pages(atlas: Atlas) -> Iterator[bytes]:
    """The page of an atlas of heads, whole and then with fewer and fewer firings of each head."""
    fixed = {
        "summary": summarise_heads(atlas),
        "templates": head_templates(),
        "help": {**EXPLANATIONS, **{f"control {name}": text for name, text in CONTROLS.items()}},
    }
    for limit in _FEWER_FIRINGS:
        payload = build_spectral_payload(atlas, limit)
        contents = Contents(
            index={**payload.index, **fixed},
            parts={"heads": payload.heads, "prompts": payload.prompts, "layers": payload.layers},
            scripts=SCRIPTS,
            styles=STYLES,
            items="Heads",
        )
        yield render(contents, atlas.about)
