"""The summary of a page: for each layer and kind of unit its metrics, and the charts that describe all its units.

Charts are `view.figures` as plotly JSON. A chart whose numbers the atlas does not hold is left out, never drawn empty.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from clearhead.atlas.read import Atlas, Row
from clearhead.view import figures
from clearhead.view.explanations import EXPLANATIONS, METRIC_NAMES

_ERROR_AT = re.compile(r"error_norm_at_(\d+)")
SPANNING_AT = 2.0
"""Participation from which a unit counts as spread over several original heads."""


def summarise(atlas: Atlas) -> list[dict[str, Any]]:
    """One entry per layer and kind that has units or metrics: `layer`, `kind`, `metrics`, `charts`."""
    metrics = atlas.layers()
    units: dict[tuple[int, str], list[Row]] = {}
    for unit in atlas.units():
        units.setdefault((unit["layer"], unit["kind"]), []).append(unit)
    places = sorted(set(metrics) | set(units), key=lambda place: (place[1], -1 if place[0] is None else place[0]))
    return [
        {
            "layer": layer,
            "kind": kind,
            "metrics": _named_metrics(metrics.get((layer, kind), {})),
            "charts": _charts(metrics.get((layer, kind), {}), units.get((layer, kind), [])),
        }
        for layer, kind in places
    ]


def chart_templates() -> dict[str, Any]:
    """Empty figures of the charts drawn per unit; the page fills in the numbers of the unit it shows."""
    return {
        "histogram": plotly_json(figures.activation_histogram([0], [0.0, 1.0])),
        "shares": plotly_json(figures.head_shares([0.0], [0.0], [0.0])),
    }


def plotly_json(figure: go.Figure) -> dict[str, Any]:
    """`data` and `layout` of a figure as plain JSON values, without the template that plotly adds to each."""
    spec = json.loads(figure.to_json())
    spec["layout"].pop("template", None)
    return {"data": spec["data"], "layout": spec["layout"]}


def _named_metrics(metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    known = [name for name in METRIC_NAMES if name in metrics]
    others = sorted(name for name in metrics if name not in METRIC_NAMES and not _ERROR_AT.fullmatch(name))
    return [
        {
            "metric": name,
            "label": METRIC_NAMES.get(name, name.replace("_", " ")),
            "value": metrics[name],
            "help": EXPLANATIONS.get(name, ""),
        }
        for name in known + others
    ]


def _charts(metrics: Mapping[str, float], units: list[Row]) -> list[dict[str, Any]]:
    built: list[tuple[str, str, go.Figure]] = []
    entropies = [metrics.get(f"ce_{name}") for name in ("clean", "replaced", "mean", "zero")]
    if None not in entropies:
        built.append(("cross_entropy", "Loss when the layer is replaced", figures.cross_entropy(*entropies)))
    errors = {int(found[1]): value for name, value in metrics.items() if (found := _ERROR_AT.fullmatch(name))}
    if errors:
        built.append(("error_by_position", "Error by position", figures.error_by_position(errors)))
    rates = [unit["rate"] for unit in units if unit["rate"] is not None]
    if rates:
        built.append(("rates", "How often units are active", figures.rate_distribution(rates)))
    if any(unit["share_output"] for unit in units):
        built.append(("hosts", "Units by original head", _hosts(units)))
    if any(unit["group"] is not None and unit["dead"] is not None for unit in units):
        built.append(("dead", "Live and dead units by QK group", _dead_by_group(units)))
    if any(unit["participation_output"] and unit["max_activation"] is not None for unit in units):
        built.append(("map", "All live units", _map(units)))
    return [
        {"name": name, "title": title, "help": EXPLANATIONS[name], **plotly_json(figure)}
        for name, title, figure in built
    ]


def _hosts(units: list[Row]) -> go.Figure:
    shares = [(unit["share_output"], unit["participation_output"]) for unit in units if unit["share_output"]]
    n_heads = max(len(share) for share, _ in shares)
    single, spanning = [0] * n_heads, [0] * n_heads
    for share, participation in shares:
        if max(share) > 0:
            side = spanning if participation is not None and participation >= SPANNING_AT else single
            side[share.index(max(share))] += 1
    return figures.hosts(single, spanning)


def _dead_by_group(units: list[Row]) -> go.Figure:
    known = [unit for unit in units if unit["group"] is not None and unit["dead"] is not None]
    groups = sorted({unit["group"] for unit in known})
    alive, dead = ({str(group): 0 for group in groups} for _ in range(2))
    for unit in known:
        (dead if unit["dead"] else alive)[str(unit["group"])] += 1
    return figures.dead_share(alive, dead)


def _map(units: list[Row]) -> go.Figure:
    live = [unit for unit in units if unit["rate"] and unit["max_activation"] is not None]
    live = [unit for unit in live if unit["participation_output"]]
    return figures.unit_map(
        [unit["unit_id"] for unit in live],
        [round(unit["rate"], 7) for unit in live],
        [round(unit["max_activation"], 4) for unit in live],
        [round(unit["participation_output"], 3) for unit in live],
    )
