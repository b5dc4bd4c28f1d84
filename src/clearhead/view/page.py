"""One self-contained HTML page from an atlas: `write_page("runs/x/atlas", "lorsa.html")`.

The page opens from disk, makes no request of any kind and says so to the browser: its content security policy allows
exactly the scripts whose hashes it lists. Scripts and styles lie in `view/assets` and are put together here by jinja2;
data comes from `view.payload`, charts from `view.figures`. plotly.js is embedded gzipped (1.9 of 4.8 MB) and unpacked
after the first paint. The page needs a browser of 2023 or later (DecompressionStream).
"""

import base64
import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from clearhead.atlas.read import Atlas
from clearhead.errors import ClearheadError
from clearhead.runs import written_aside
from clearhead.view.explanations import EXPLANATIONS
from clearhead.view.payload import Payload, build_payload
from clearhead.view.summary import chart_templates, summarise
from clearhead.view.visible import json_for_html, visible

SCRIPTS = (
    "format.js",
    "data.js",
    "tip.js",
    "charts.js",
    "arcs.js",
    "example.js",
    "list.js",
    "unit.js",
    "summary.js",
    "about.js",
    "main.js",
)
STYLES = ("base.css", "list.css", "unit.css")
_FEWER_EXAMPLES = (None, 8, 4, 2, 1)


def write_page(atlas_path: str | Path, out_html: str | Path, *, max_megabytes: float = 25.0) -> Path:
    """Write the page of the atlas at `atlas_path` to `out_html` and return that path.

    A page that would pass `max_megabytes` (10^6 bytes) holds fewer examples per unit, and says so in a notice.
    Raises `ClearheadError` when there is no atlas or no unit in it, when the limit cannot be met with one example of
    each category, and when the disk is full; `CorruptFileError` when the tables are damaged or contradict each other.
    """
    atlas = Atlas(atlas_path)
    out = Path(out_html)
    fixed = {"summaries": summarise(atlas), "templates": chart_templates(), "help": EXPLANATIONS}
    page = b""
    for limit in _FEWER_EXAMPLES:
        page = _render(atlas, build_payload(atlas, limit), fixed).encode("utf-8")
        if len(page) <= max_megabytes * 1e6:
            break
    else:
        raise ClearheadError(
            f"the page of {atlas.path} takes {len(page) / 1e6:.1f} MB with one example per category, "
            f"more than max_megabytes={max_megabytes:g}; raise it"
        )
    with written_aside(out) as aside:
        aside.write_bytes(page)
    return out


@cache
def _plotly() -> tuple[str, str]:
    """plotly.js and its packed form."""
    code = get_plotlyjs()
    return code, base64.b64encode(gzip.compress(code.encode("utf-8"), mtime=0)).decode("ascii")


def _render(atlas: Atlas, payload: Payload, fixed: Mapping[str, Any]) -> str:
    assets = resources.files("clearhead.view") / "assets"
    script = "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS)
    plotly, packed_plotly = _plotly()
    index = {
        **payload.index,
        **fixed,
        "about": _shown(atlas.about),
        "bytes": {"data": payload.size, "plotly": len(packed_plotly)},
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((assets / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        title=f"{visible(str(atlas.about.get('model', 'model')))} · clearhead",
        policy=_policy(script, plotly),
        styles="\n".join((assets / name).read_text(encoding="utf-8") for name in STYLES),
        script=script,
        index=json_for_html(index),
        parts=[("units", payload.units), ("texts", payload.texts), ("plotly", [packed_plotly])],
    )


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
