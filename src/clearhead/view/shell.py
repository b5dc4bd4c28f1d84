"""The frame that all pages share: one self-contained HTML file, put together from `view/assets` by jinja2.

A page opens from disk, makes no request of any kind and says so to the browser: its content security policy allows
exactly the scripts whose hashes it lists. plotly.js is embedded gzipped (1.9 of 4.8 MB) and unpacked after the first
paint. Pages need a browser of 2023 or later (DecompressionStream).

A page brings its scripts, which run between the shared ones. They define what the shared ones ask for: `listed` (the
list: rows, sorts, filters), `openNamed` and `showSummary` (what an address shows), `settle` (after a change of size)
and `notes` (for the dialog about the page).
"""

import base64
import gzip
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from clearhead.errors import ClearheadError
from clearhead.runs import written_aside
from clearhead.view.visible import json_for_html, visible

BEFORE = ("format.js", "embedded.js", "tip.js", "charts.js", "arcs.js", "tokens.js", "parts.js")
"""Shared scripts that a page's own build on."""
AFTER = ("list.js", "about.js", "main.js")
"""Shared scripts that ask a page's own for what they show."""
STYLES = ("base.css", "list.css", "parts.css")


@dataclass(frozen=True)
class Contents:
    """What one page puts into the frame."""

    index: Mapping[str, Any]
    """Small plain data, there at once: `vocab`, `help`, and what the page's scripts need."""
    parts: Mapping[str, Sequence[str]]
    """Packed data (`packing.pack`) by kind, opened when needed."""
    scripts: Sequence[str]
    styles: Sequence[str]
    items: str
    """What the list holds, for readers who hear the page: “Units”."""


def render(contents: Contents, about: Mapping[str, Any]) -> bytes:
    """The HTML file; `about` is `atlas.json`, whose `model` gives the title."""
    script = "\n".join(_asset(name) for name in (*BEFORE, *contents.scripts, *AFTER))
    plotly, packed_plotly = _plotly()
    index = {
        **contents.index,
        "about": _shown(dict(about)),
        "bytes": {
            "data": sum(len(text) for part in contents.parts.values() for text in part),
            "plotly": len(packed_plotly),
        },
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page = environment.from_string(_asset("page.html.j2")).render(
        title=f"{visible(str(about.get('model', 'model')))} · clearhead",
        policy=_policy(script, plotly),
        styles="\n".join(_asset(name) for name in (*STYLES, *contents.styles)),
        script=script,
        items=contents.items,
        index=json_for_html(index),
        parts=[*contents.parts.items(), ("plotly", [packed_plotly])],
    )
    return page.encode("utf-8")


def write_within(out: Path, pages: Iterable[bytes], max_megabytes: float, smallest: str) -> Path:
    """Write the first page of at most `max_megabytes` (10^6 bytes) to `out` and return that path.

    `pages` goes from the whole page to the smallest, which `smallest` describes; later ones are built only if needed.
    Raises `ClearheadError` when none fits, and when the disk is full.
    """
    page = b""
    for page in pages:
        if len(page) <= max_megabytes * 1e6:
            break
    else:
        raise ClearheadError(
            f"{out} takes {len(page) / 1e6:.1f} MB {smallest}, more than max_megabytes={max_megabytes:g}; raise it"
        )
    with written_aside(out) as aside:
        aside.write_bytes(page)
    return out


def _asset(name: str) -> str:
    return (resources.files("clearhead.view") / "assets" / name).read_text(encoding="utf-8")


@cache
def _plotly() -> tuple[str, str]:
    """plotly.js and its packed form."""
    code = get_plotlyjs()
    return code, base64.b64encode(gzip.compress(code.encode("utf-8"), mtime=0)).decode("ascii")


def _policy(*scripts: str) -> str:
    """Content security policy: nothing is fetched, and only these scripts run, wherever others might come from."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii") for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"base-uri 'none'; form-action 'none'"
    )


def _shown(value: Any) -> Any:
    """`atlas.json` with every text made visible, since its texts may come from anywhere too."""
    if isinstance(value, dict):
        return {visible(str(key)): _shown(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_shown(part) for part in value]
    return visible(value) if isinstance(value, str) and value else value
