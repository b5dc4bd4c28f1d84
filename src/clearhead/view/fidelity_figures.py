"""The charts of a fidelity report, as plotly figures in the house style of `view.figures`.

Builders take plain numbers; nothing here reads a file. A fit is drawn only between the sizes that were measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from clearhead.view.fidelity_words import LABELS
from clearhead.view.figures import AMBER, BLUE, GREY, RED, TEAL, styled
from clearhead.view.visible import visible

COLOURS = {"lorsa": BLUE, "sae": AMBER, "transcoder": TEAL, "reference": RED, "seed": "#8a63c9"}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot")


class LayerPoint(NamedTuple):
    """One run in the chart of layers."""

    layer: int
    fvu: float
    run: str
    equal: bool


def by_layer(series: Mapping[str, tuple[str, Sequence[LayerPoint]]], height: int = 330) -> go.Figure:
    """FVU by layer; `series` gives for each kind its label and points. One layer alone is drawn as bars."""
    figure = go.Figure()
    if all(len(points) == 1 for _, points in series.values()):
        return _one_layer(figure, series)
    for kind, (label, points) in series.items():
        figure.add_scatter(
            x=[point.layer for point in points],
            y=[point.fvu for point in points],
            name=label,
            mode="lines+markers",
            line={"color": COLOURS[kind], "width": 2},
            marker={
                "size": 8,
                "color": COLOURS[kind],
                "symbol": ["circle" if point.equal else "circle-open" for point in points],
            },
            customdata=[visible(point.run) for point in points],
            hovertemplate=f"layer %{{x}}, {label}<br>FVU %{{y:.4f}}<br>%{{customdata}}<extra></extra>",
        )
    figure = styled(figure, x="layer", y="FVU", height=height, legend=True)
    figure.update_xaxes(**_whole({point.layer for _, points in series.values() for point in points}))
    figure.update_yaxes(rangemode="tozero")
    return figure


def _one_layer(figure: go.Figure, series: Mapping[str, tuple[str, Sequence[LayerPoint]]]) -> go.Figure:
    for kind, (label, (point,)) in series.items():
        figure.add_bar(
            y=[label if point.equal else f"{label} *"],
            x=[point.fvu],
            text=[f"{point.fvu:.3f}"],
            orientation="h",
            marker={"color": COLOURS[kind]},
            customdata=[visible(point.run)],
            hovertemplate="%{customdata}<br>FVU %{x:.4f}<extra></extra>",
        )
    figure = styled(figure, x="FVU", height=max(180, 70 + 40 * len(series)))
    figure.update_yaxes(autorange="reversed", showgrid=False, nticks=0)
    figure.update_xaxes(showgrid=True, nticks=6)
    return figure


def scaling(entries: Sequence[Mapping[str, Any]], over: str, held: str) -> go.Figure:
    """FVU against `over` on a logarithm: a colour for each kind, a symbol for each value held; fits where there are."""
    figure = go.Figure()
    values = sorted({_size(held, entry) for entry in entries})
    named: set[str] = set()
    for entry in entries:
        place = values.index(_size(held, entry))
        kind = "reference" if entry["init"] == "reference" else entry["kind"]
        colour, dash = COLOURS[kind], DASHES[place % len(DASHES)]
        held_said = held_words(held, entry[held])
        x, y = zip(*entry["points"], strict=True)
        fit = entry["fit"]
        figure.add_scatter(
            x=list(x),
            y=list(y),
            name=LABELS[kind],
            legendgroup=kind,
            showlegend=kind not in named,
            mode="markers" if fit else "lines+markers",
            line={"color": colour, "width": 1, "dash": "dot"},
            marker={"size": 8, "color": colour, "symbol": SYMBOLS[place % len(SYMBOLS)]},
            cliponaxis=False,
            hovertemplate=f"{LABELS[kind]}, layer {entry['layer']}, {held_said}<br>{over} %{{x:,}}<br>FVU %{{y:.4f}}"
            "<extra></extra>",
        )
        named.add(kind)
        if fit is not None:
            sizes = np.geomspace(fit["low"], fit["high"], 40)
            figure.add_scatter(
                x=sizes.tolist(),
                y=(fit["a"] * sizes ** -fit["b"] + fit["c"]).tolist(),
                mode="lines",
                line={"color": colour, "width": 1.5, "dash": dash},
                hoverinfo="skip",
                showlegend=False,
            )
    for place in range(len(values)):  # what the symbols mean
        held_by = next(entry for entry in entries if _size(held, entry) == values[place])
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            name=held_words(held, held_by[held]),
            marker={"size": 9, "color": GREY, "symbol": SYMBOLS[place % len(SYMBOLS)]},
        )
    label = "parameters" if over == "parameters" else "active units per token (K)"
    figure = styled(figure, x=label, y="FVU", height=380, legend=True)
    figure.update_xaxes(range=_room([x for entry in entries for x, _ in entry["points"]]))
    ticks = sorted({x for entry in entries for x, _ in entry["points"]})
    ticks = [tick for place, tick in enumerate(ticks) if place == 0 or tick > 1.15 * ticks[place - 1]]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[amount(tick) for tick in ticks], nticks=0, tickangle=0)
    figure.update_yaxes(range=[0, 1.12 * max(y for entry in entries for _, y in entry["points"])])
    return figure


def overlap(layers: Sequence[int], measures: Mapping[str, Sequence[float | None]]) -> go.Figure:
    """What two errors share: lines over many layers, bars for one measure each where layers are few."""
    figure = go.Figure()
    colours = (BLUE, TEAL, GREY, AMBER, RED)
    if len(layers) > 3:
        for (name, values), colour in zip(measures.items(), colours, strict=False):
            figure.add_scatter(
                x=list(layers),
                y=list(values),
                name=name,
                mode="lines+markers",
                line={"color": colour, "width": 2},
                hovertemplate=f"layer %{{x}}<br>{name} %{{y:.3f}}<extra></extra>",
            )
        figure = styled(figure, x="layer", height=330, legend=True)
        figure.update_xaxes(**_whole(set(layers)))
        return figure
    for place, (layer, colour) in enumerate(zip(layers, colours, strict=False)):
        figure.add_bar(
            y=list(measures),
            x=[values[place] for values in measures.values()],
            name=f"layer {layer}",
            orientation="h",
            marker={"color": colour},
            hovertemplate=f"layer {layer}<br>%{{y}} %{{x:.3f}}<extra></extra>",
        )
    figure = styled(figure, height=max(230, 60 + 34 * len(measures) * len(layers)), legend=len(layers) > 1)
    figure.update_layout(barmode="group", bargap=0.35)
    figure.update_yaxes(autorange="reversed", showgrid=False, nticks=0)
    figure.update_xaxes(showgrid=True, nticks=6)
    return figure


def head_shares(output: Sequence[float | None], error: Sequence[float | None], kind: str) -> go.Figure:
    """Share of the output and of the error by original head."""
    figure = go.Figure()
    for name, values, colour in (("of the output", output, GREY), ("of the error", error, COLOURS[kind])):
        figure.add_bar(
            x=list(range(len(values))),
            y=list(values),
            name=name,
            marker={"color": colour},
            hovertemplate=f"head %{{x}}<br>%{{y:.1%}} {name}<extra></extra>",
        )
    figure.update_layout(barmode="group", bargap=0.25)
    figure = styled(figure, x="original head", y="share", height=250, legend=True, integer_x=len(output) <= 16)
    figure.update_yaxes(tickformat=".0%")
    return figure


def class_shares(rows: Sequence[Mapping[str, Any]], kind: str) -> go.Figure:
    """Share of the tokens and of the error by class."""
    figure = go.Figure()
    for name, key, colour in (
        ("of the tokens", "share_of_tokens", GREY),
        ("of the error", "share_of_error", COLOURS[kind]),
    ):
        figure.add_bar(
            y=[visible(row["name"]) for row in rows],
            x=[row[key] for row in rows],
            name=name,
            orientation="h",
            marker={"color": colour},
            hovertemplate=f"%{{y}}<br>%{{x:.1%}} {name}<extra></extra>",
        )
    figure.update_layout(barmode="group", bargap=0.25)
    figure = styled(figure, height=max(230, 70 + 34 * len(rows)), legend=True)
    figure.update_yaxes(autorange="reversed", showgrid=False, nticks=0)
    figure.update_xaxes(tickformat=".0%", showgrid=True, nticks=5)
    return figure


def _size(held: str, entry: Mapping[str, Any]) -> float:
    """The value held, sizes that differ by less than a twentieth as one."""
    return float(entry[held]) if held == "k" else round(float(np.log(entry[held])) * 10) / 10


def held_words(held: str, value: float) -> str:
    """What a series holds, in words."""
    return f"K {value:g}" if held == "k" else f"{amount(value)} parameters"


def amount(value: float) -> str:
    """A number of parameters as `1.3M`."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"


def _room(values: Sequence[float]) -> list[float]:
    """A range of a logarithmic axis with room for words at its ends."""
    low, high = np.log10(min(values)), np.log10(max(values))
    room = 0.12 * (high - low) or 0.2
    return [float(low - room), float(high + room)]


def _whole(layers: set[int]) -> dict[str, Any]:
    """An axis of layers: whole numbers, and not a whole unit of room around a single one."""
    if len(layers) <= 12:
        return {"tickvals": sorted(layers), "nticks": 0, "range": [min(layers) - 0.6, max(layers) + 0.6]}
    return {"dtick": 5, "tick0": 0}
