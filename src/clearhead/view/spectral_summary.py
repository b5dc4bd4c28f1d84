"""What the spectral page says first: numbers over all heads, and the charts that hold every head or firing."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from clearhead.atlas.read import Atlas, Row
from clearhead.view import spectral_figures
from clearhead.view.figures import GREY
from clearhead.view.spectral_explanations import (
    CANCELLING,
    EXPLANATIONS,
    JUDGED,
    OTHER,
    SEPARATED,
    VERDICTS,
    order_controls,
)
from clearhead.view.spectral_payload import order_verdicts
from clearhead.view.summary import plotly_json
from clearhead.view.visible import visible


def summarise_heads(atlas: Atlas) -> dict[str, Any]:
    """`tiles` (label, value, small print, explanation) and `charts` over all heads; none is drawn without numbers."""
    heads = atlas.sql("select * from spectra order by layer, head")
    controls = atlas.sql("select * from controls")
    counts = atlas.sql("select n_recon, count(*) as n from firings where not sink group by n_recon order by n_recon")
    return {"tiles": _tiles(heads, controls, counts), "charts": _charts(heads, controls, counts)}


def head_templates() -> dict[str, Any]:
    """Empty figures of the charts drawn per head; the page fills in the numbers of the head it shows."""
    return {
        "controls": plotly_json(
            spectral_figures.sparsity_against_controls(0.1, ["gauge"], [0.2], [0.1], [0.3], reference=0.4)
        ),
        "spectrum": plotly_json(spectral_figures.spectrum([1.0, 0.5], {0: 0.5})),
    }


def _tiles(heads: Sequence[Row], controls: Sequence[Row], counts: Sequence[Row]) -> list[dict[str, str]]:
    verdicts = [head["verdict"] for head in heads]
    judged = sum(verdict in JUDGED for verdict in verdicts)
    separated = sum(verdict in (SEPARATED, CANCELLING) for verdict in verdicts)
    fired = [head for head in heads if head["sparsity"] is not None]
    sinks = sum(head["n_sink"] for head in heads)
    tiles = [
        _tile("heads", "Heads", f"{len(heads):,}", f"{len(fired):,} with firings"),
        _tile("firings", "Firings", f"{sum(head['n_firings'] for head in heads):,}", f"+ {sinks:,} on first tokens"),
    ]
    if judged:
        share = f"{100 * separated / judged:.0f} %"
        tiles.append(_tile("separated", "Separated", share, f"{separated:,} of {judged:,} judged"))
    if fired:
        names = order_controls({row["control"] for row in controls})
        beside = [f"{name} {_median([r['sparsity'] for r in controls if r['control'] == name]):.2f}" for name in names]
        tiles.append(
            _tile("sparsity", "S, median head", f"{_median(_known(fired, 'sparsity')):.2f}", "".join(beside[:1]))
        )
    if counts:
        all_of = sum(row["n"] for row in counts)
        few = sum(row["n"] for row in counts if row["n_recon"] <= 4) / all_of
        values = np.repeat([row["n_recon"] for row in counts], [row["n"] for row in counts])
        tiles.append(
            _tile("n_recon_kept", "N_recon, median", f"{np.median(values):g}", f"{100 * few:.0f} % of kept up to 4")
        )
    cancelling = _known(fired, "cancellation")
    if cancelling:
        tiles.append(_tile("cancellation", "Cancellation", f"{_median(cancelling):.3g}", "median head"))
    return tiles


def _tile(name: str, label: str, value: str, small: str) -> dict[str, str]:
    return {
        "name": name,
        "label": label,
        "value": value,
        "small": visible(small) if small else "",
        "help": EXPLANATIONS[name],
    }


def _known(heads: Sequence[Row], name: str) -> list[float]:
    return [head[name] for head in heads if head[name] is not None]


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def _charts(heads: Sequence[Row], controls: Sequence[Row], counts: Sequence[Row]) -> list[dict[str, Any]]:
    built: list[tuple[str, str, go.Figure]] = []
    against = {(row["layer"], row["head"]): row["sparsity"] for row in controls if row["control"] == "gauge"}
    points = _points(heads, against)
    if points:
        figure = spectral_figures.heads_against_control(points, "the gauge control")
        built.append(("heads_against_control", "S of every head against another basis", figure))
    if counts:
        figure = spectral_figures.n_recon_histogram({row["n_recon"]: row["n"] for row in counts})
        built.append(("n_recon_histogram", "Modes needed, of the firings kept", figure))
    return [
        {"name": name, "title": title, "help": EXPLANATIONS[name], **plotly_json(figure)}
        for name, title, figure in built
    ]


def _points(
    heads: Sequence[Row], against: Mapping[tuple[int, int], float]
) -> dict[str, tuple[str, list[tuple[str, float, float]]]]:
    """By verdict: its colour and (name, S, S under the control) of every head that has both."""
    points: dict[str, tuple[str, list[tuple[str, float, float]]]] = {}
    for verdict in order_verdicts(heads):
        own = [
            (f"head.{head['layer']}.{head['head']}", round(head["sparsity"], 4), round(against[place], 4))
            for head in heads
            if head["verdict"] == verdict and head["sparsity"] is not None
            for place in [(head["layer"], head["head"])]
            if place in against
        ]
        if own:
            points[visible(verdict)] = (VERDICTS.get(verdict, OTHER).colour or GREY, own)
    return points
