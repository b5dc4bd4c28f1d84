"""The charts of a sparse model, as plotly figures in the house style of `view.figures`.

Builders take plain numbers and return a `plotly.graph_objects.Figure`; None in a list is a gap.
"""

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from clearhead.view.figures import AMBER, BLUE, GREY, RED, TEAL, styled

COLOURS = (BLUE, AMBER, TEAL, RED)
DEPTHS = [[0, "rgba(63,131,217,0.08)"], [0.5, "rgba(63,131,217,0.55)"], [1, "#2a59c9"]]
FEWEST = 0.01
"""Edges per query below which a head's colour no longer changes."""
Curve = tuple[Sequence[float], Sequence[float | None]]
"""Places and values."""


def training_edges(curves: Mapping[str, Curve], hard_from: float | None) -> go.Figure:
    """Shares of open edges on tokens; on a logarithm where they fall below a tenth."""
    figure = go.Figure()
    for name, (tokens, values) in curves.items():
        held = name.startswith("held")
        line = {"color": BLUE if held else AMBER if name.startswith("drawn") else GREY, "width": 2 if held else 1}
        _line(figure, tokens, values, name, line, markers=held, number="%{y:.2%}", what="tokens")
    figure = styled(figure, x="tokens", y="share of open edges", height=250, legend=True)
    known = [value for _, values in curves.values() for value in values if value]
    _percent(figure, min(known, default=1.0))
    return _mark_hard(figure, hard_from)


def training_rise(batch: Curve, held_out: Curve, allowed: float, hard_from: float | None, y: str) -> go.Figure:
    """What the constraint measured, and the loss on held-out text; dashed where the limit is."""
    figure = go.Figure()
    _line(figure, *batch, "on the batch", {"color": GREY, "width": 1}, number="%{y:.4f}", what="tokens")
    blue = {"color": BLUE, "width": 2}
    _line(figure, *held_out, "held-out loss, hard gates", blue, markers=True, number="%{y:.4f}", what="tokens")
    figure.add_hline(y=allowed, line={"color": RED, "width": 1, "dash": "dash"})
    figure = styled(figure, x="tokens", y=y, height=250, legend=True)
    _readable_range(figure, [value for value in (*batch[1], *held_out[1]) if value is not None], allowed)
    return _mark_hard(figure, hard_from)


def multiplier(curve: Curve) -> go.Figure:
    """λ on tokens, on a logarithm."""
    figure = go.Figure()
    _line(figure, *curve, "λ", {"color": TEAL, "width": 2}, number="%{y:.3g}", what="tokens")
    figure = styled(figure, x="tokens", y="multiplier λ", height=250)
    return logarithmic(figure, [value for value in curve[1] if value])


def by_position(bins: Sequence[str], rises: Mapping[str, Sequence[float]]) -> go.Figure:
    """Rise over the base's loss of each form, by bins of positions that double."""
    figure = go.Figure()
    for (name, values), colour in zip(rises.items(), COLOURS, strict=False):
        figure.add_bar(
            x=list(bins),
            y=list(values),
            name=name,
            marker={"color": colour},
            hovertemplate=f"tokens %{{x}}<br>{name} %{{y:+.4f}} nats<extra></extra>",
        )
    figure.update_layout(barmode="group", bargap=0.25)
    figure = styled(figure, x="position of the predicted token", y="nats over the base", legend=True)
    figure.update_xaxes(type="category")
    figure.update_yaxes(zeroline=True, zerolinecolor=GREY, zerolinewidth=1)
    return figure


def by_length(lengths: Sequence[int], per_query: Sequence[float], expected: Sequence[float]) -> go.Figure:
    """Open edges per query in the first L positions, beside what a dense head reads; both axes logarithmic."""
    figure = go.Figure()
    dense = [(length + 1) / 2 for length in lengths]
    for name, values, line in (
        ("open", per_query, {"color": BLUE, "width": 2}),
        ("expected", expected, {"color": AMBER, "width": 1.5}),
        ("all", dense, {"color": GREY, "width": 1, "dash": "dot"}),
    ):
        _line(figure, lengths, values, name, line, markers=name != "all", number="%{y:.3g} edges", what="positions")
    figure = styled(figure, x="first L positions", y="edges per query", legend=True)
    figure.update_xaxes(type="log", tickvals=list(lengths), ticktext=[f"{length:,}" for length in lengths])
    return logarithmic(figure, [value for value in (*per_query, *expected, *dense) if value])


def heads(layers: Sequence[int], per_query: Sequence[Sequence[float]]) -> go.Figure:
    """Layers by heads, coloured by the logarithm of open edges per query; numbers where there is room."""
    z = [[math.log10(max(value, FEWEST)) for value in row] for row in per_query]
    n_heads = max(map(len, per_query))
    low, high = math.log10(FEWEST), max(max(map(max, z)), 0.1)
    ticks = list(range(int(low), math.floor(high) + 1))
    heat = go.Heatmap(
        z=z,
        y=[str(layer) for layer in layers],
        x=[str(head) for head in range(n_heads)],
        zmin=low,
        zmax=high,
        colorscale=DEPTHS,
        xgap=2,
        ygap=2,
        customdata=[list(row) for row in per_query],
        hovertemplate="layer %{y}, head %{x}<br>%{customdata:.3g} edges per query<extra></extra>",
        colorbar={
            "thickness": 9,
            "outlinewidth": 0,
            "len": 0.9,
            "tickvals": ticks,
            "ticktext": [f"≤ {FEWEST:g}" if tick == low else f"{10.0**tick:g}" for tick in ticks],
        },
    )
    if n_heads <= 12 and len(layers) <= 16:
        heat.text = [[_brief(value) for value in row] for row in per_query]
        heat.texttemplate = "%{text}"
    figure = styled(go.Figure(heat), x="head", y="layer", height=min(120 + 26 * len(layers), 640))
    figure.update_xaxes(type="category", nticks=20)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False, nticks=20)
    return figure


def by_layer(layers: Sequence[int], shares: Mapping[str, Sequence[float | None]], y: str) -> go.Figure:
    """Shares by layer, as bars in groups, or as lines where there are many layers."""
    figure = go.Figure()
    places = [str(layer) for layer in layers]
    for (name, values), colour in zip(shares.items(), COLOURS, strict=False):
        hover = f"layer %{{x}}<br>{name} %{{y:.2%}}<extra></extra>"
        if len(layers) <= 12:
            figure.add_bar(x=places, y=list(values), name=name, marker={"color": colour}, hovertemplate=hover)
        else:
            style = {"color": colour, "width": 2}
            figure.add_scatter(
                x=places, y=list(values), name=name, mode="lines+markers", line=style, hovertemplate=hover
            )
    figure.update_layout(barmode="group", bargap=0.25)
    figure = styled(figure, x="layer", y=y, legend=True)
    figure.update_xaxes(type="category", nticks=16)
    figure.update_yaxes(rangemode="tozero", tickformat=".0%")
    return figure


def distances(layers: Sequence[int], values: Sequence[float | None]) -> go.Figure:
    """Mean distance between query and key of open edges by layer; no bar where there are no edges."""
    bars = go.Bar(
        x=[str(layer) for layer in layers],
        y=list(values),
        marker={"color": TEAL},
        hovertemplate="layer %{x}<br>%{y:.1f} tokens apart<extra></extra>",
    )
    figure = styled(go.Figure(bars), x="layer", y="tokens")
    figure.update_layout(bargap=0.4)
    figure.update_xaxes(type="category", nticks=16)
    return figure


def empty_tiles(layers: Sequence[int], shares: Mapping[str, Sequence[float]]) -> go.Figure:
    """Share of tiles without an open edge by layer, a colour for each size."""
    return by_layer(layers, {f"{size} x {size}": values for size, values in shares.items()}, "empty tiles")


def logarithmic(figure: go.Figure, values: Sequence[float], axis: str = "y") -> go.Figure:
    """A logarithmic axis around positive values, with ticks at round numbers, fewer over decades."""
    if not values:
        return figure
    low, high = math.log10(min(values)), math.log10(max(values))
    spread = high - low
    digits = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if spread < 0.7 else (1, 2, 5) if spread < 2.5 else (1,)
    ticks = [digit * 10.0**power for power in range(math.floor(low) - 1, math.ceil(high) + 1) for digit in digits]
    room = 0.06 * spread + 0.06
    settings = {"type": "log", "range": [low - room, high + room], "tickvals": ticks}
    update = figure.update_xaxes if axis == "x" else figure.update_yaxes
    update(**settings, ticktext=[f"{tick:g}" for tick in ticks])
    return figure


def _line(
    figure: go.Figure,
    x: Sequence[float],
    y: Sequence[float | None],
    name: str,
    line: dict[str, object],
    *,
    number: str,
    what: str,
    markers: bool = False,
) -> None:
    figure.add_scatter(
        x=list(x),
        y=list(y),
        name=name,
        mode="lines+markers" if markers else "lines",
        line=line,
        marker={"size": 5},
        hovertemplate=f"%{{x:,}} {what}<br>{name} {number}<extra></extra>",
    )


def _percent(figure: go.Figure, lowest: float) -> None:
    """Per cent on the vertical axis, logarithmic where there is much to see below a tenth."""
    if lowest < 0.1:
        ticks = [share for share in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0) if share > lowest / 4]
        figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{100 * share:g} %" for share in ticks])
    else:
        figure.update_yaxes(range=[0, 1.02], tickformat=".0%")


def _readable_range(figure: go.Figure, values: Sequence[float], allowed: float) -> None:
    """Outliers of a start, or of a batch, must not flatten the rest: the highest hundredth may leave the chart."""
    ranked = sorted(values)
    high = max(ranked[int(0.99 * (len(ranked) - 1))] if ranked else allowed, allowed)
    low = min(ranked[int(0.01 * (len(ranked) - 1))] if ranked else allowed, allowed)
    room = 0.12 * (high - low) or 0.01
    figure.update_yaxes(range=[low - room, high + room])


def _mark_hard(figure: go.Figure, hard_from: float | None) -> go.Figure:
    if hard_from is not None:
        figure.add_vline(x=hard_from, line={"color": GREY, "width": 1, "dash": "dot"})
    return figure


def _brief(value: float) -> str:
    return (
        f"{value:.0f}"
        if value >= 10
        else f"{value:.1f}"
        if value >= 0.05
        else f"{value:.2f}"
        if value >= 0.005
        else "0"
    )
