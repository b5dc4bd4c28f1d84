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
from clearhead.view.explanations import EXPLANATIONS, HEADLINES, METRIC_NAMES
from clearhead.view.spread import host, spans

_ERROR_AT = re.compile(r"relative_error_by_position_(\d+)")
_INTERVAL = re.compile(r"(.+)_(low|high)")
_FRACTIONS = re.compile(r"fvu|explained_variance|ce_recovered.*|relative_error.*|spanning_(?!.*_heads$).*|.*_share")


def summarise(atlas: Atlas) -> list[dict[str, Any]]:
    """One entry per layer and kind that has metrics or a chart: `layer`, `kind`, `metrics`, `charts`."""
    metrics = atlas.layers()
    units: dict[tuple[int, str], list[Row]] = {}
    for unit in atlas.units():
        units.setdefault((unit["layer"], unit["kind"]), []).append(unit)
    places = sorted(set(metrics) | set(units), key=lambda place: (place[1], -1 if place[0] is None else place[0]))
    summaries = [
        {
            "layer": layer,
            "kind": kind,
            "metrics": _named_metrics(metrics.get((layer, kind), {})),
            "charts": _charts(metrics.get((layer, kind), {}), units.get((layer, kind), [])),
        }
        for layer, kind in places
    ]
    return [summary for summary in summaries if summary["metrics"] or summary["charts"]]


def chart_templates() -> dict[str, Any]:
    """Empty figures of the charts drawn per unit; the page fills in the numbers of the unit it shows."""
    return {
        "histogram": plotly_json(figures.activation_histogram([0], [0.0, 1.0])),
        "shares": plotly_json(figures.head_shares([0.0], [0.0], [0.0])),
    }


def plotly_json(figure: go.Figure) -> dict[str, Any]:
    """`data` and `layout` of a figure as plain JSON values, without the template that plotly adds to each."""
    spec = json.loads(str(figure.to_json()))
    spec["layout"].pop("template", None)
    return {"data": spec["data"], "layout": spec["layout"]}


def _named_metrics(metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    """Label, written value, interval and explanation of each metric; ends of intervals go with their metric."""
    ends = {name for name in metrics if (found := _INTERVAL.fullmatch(name)) and found[1] in metrics}
    known = [name for name in METRIC_NAMES if name in metrics]
    others = [name for name in metrics if name not in METRIC_NAMES and name not in ends]
    others = sorted(name for name in others if not _ERROR_AT.fullmatch(name))
    entries = []
    for name in known + others:
        low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
        entries.append(
            {
                "metric": name,
                "label": METRIC_NAMES.get(name, name.replace("_", " ").capitalize()),
                "value": _written(name, metrics[name]),
                "interval": ""
                if low is None or high is None
                else _written(name, low).rstrip(" %") + "–" + _written(name, high),
                "help": EXPLANATIONS.get(name, ""),
                "headline": name in HEADLINES,
            }
        )
    return entries


def _written(name: str, value: float) -> str:
    if _FRACTIONS.fullmatch(name):
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def _charts(metrics: Mapping[str, float], units: list[Row]) -> list[dict[str, Any]]:
    built: list[tuple[str, str, go.Figure]] = []
    losses = [f"ce_{name}" for name in ("clean", "replaced", "mean", "zero")]
    if all(name in metrics for name in losses):
        figure = figures.cross_entropy(*(metrics[name] for name in losses))
        built.append(("cross_entropy", "Loss when the layer is replaced", figure))
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
    shares = [unit["share_output"] for unit in units if unit["share_output"]]
    n_heads = max(map(len, shares))
    single, spanning = [0] * n_heads, [0] * n_heads
    for share in shares:
        if (largest := host(share)) is not None:
            (spanning if spans(share) else single)[largest] += 1
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
