"""The charts of a page, as plotly figures: the same figure opens in a notebook, in a page and in a paper.

Each builder takes plain arrays and returns a `plotly.graph_objects.Figure` without fixed width or background, so that a
page can fit it to its column and to a light or dark scheme. Nothing here reads a file.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

BLUE, RED, AMBER, TEAL, GREY = "#3f83d9", "#d4546a", "#d9971e", "#1f9e93", "#8593a6"
SHARE_COLOURS = {"output": BLUE, "weights": AMBER, "routing": TEAL}


def activation_histogram(counts: Sequence[int], edges: Sequence[float]) -> go.Figure:
    """Tokens by activation. `counts` has one entry per bin, `edges` one more."""
    edges_array = np.asarray(edges, dtype=float)
    centres = (edges_array[1:] + edges_array[:-1]) / 2
    bars = go.Bar(
        x=centres.tolist(),
        y=list(counts),
        width=np.diff(edges_array).tolist(),
        marker={"color": AMBER},
        hovertemplate="activation %{x:.3g}<br>%{y} tokens<extra></extra>",
    )
    figure = styled(go.Figure(bars), x="activation", y="tokens", height=150)
    figure.update_yaxes(type="log", dtick=1, exponentformat="none")
    return figure


def head_shares(output: Sequence[float], weights: Sequence[float], routing: Sequence[float]) -> go.Figure:
    """Share of one unit over the original heads of its layer, by the three formulas, one entry per original head."""
    figure = go.Figure()
    for name, values in (("output", output), ("weights", weights), ("routing", routing)):
        figure.add_bar(
            x=list(range(len(values))),
            y=list(values),
            name=name,
            marker={"color": SHARE_COLOURS[name]},
            hovertemplate=f"head %{{x}}<br>{name} share %{{y:.3f}}<extra></extra>",
        )
    figure.update_layout(barmode="group", bargap=0.25)
    return styled(figure, x="original head", y="share", height=190, legend=True, integer_x=True)


def error_by_position(errors: Mapping[int, float]) -> go.Figure:
    """Relative error √(Σ|y − ŷ|² / Σ|y|²) by position of the context."""
    positions = sorted(errors)
    line = go.Scatter(
        x=positions,
        y=[errors[position] for position in positions],
        mode="lines",
        line={"color": BLUE, "width": 2},
        hovertemplate="position %{x}<br>relative error %{y:.3g}<extra></extra>",
    )
    figure = styled(go.Figure(line), x="position in context", y="relative error")
    figure.update_yaxes(rangemode="tozero")
    return figure


def rate_distribution(rates: Sequence[float], bins: int = 36) -> go.Figure:
    """Units by activation rate on a logarithmic axis; units that are never active are one bar at the left."""
    array = np.asarray(rates, dtype=float)
    alive = np.log10(array[array > 0])
    low = np.floor(alive.min()) if len(alive) else -5.0
    counts, edges = np.histogram(alive, bins=bins, range=(low, 0.0))
    centres = (edges[1:] + edges[:-1]) / 2
    step = float(edges[1] - edges[0])
    dead = int((array == 0).sum())
    figure = go.Figure()
    figure.add_bar(
        x=centres.tolist(),
        y=counts.tolist(),
        width=step,
        name="active",
        marker={"color": BLUE},
        customdata=[[10**a, 10**b] for a, b in zip(edges[:-1], edges[1:], strict=True)],
        hovertemplate="active on %{customdata[0]:.2%} to %{customdata[1]:.2%} of tokens<br>%{y} units<extra></extra>",
    )
    figure.add_bar(
        x=[low - 2 * step],
        y=[dead],
        width=2 * step,
        name="never active",
        marker={"color": RED},
        hovertemplate="never active<br>%{y} units<extra></extra>",
    )
    figure = styled(figure, x="share of tokens on which a unit is active", y="units", legend=True)
    decades = list(range(int(low), 1))
    figure.update_xaxes(tickvals=decades, ticktext=[f"{100.0 * 10**decade:g} %" for decade in decades])
    return figure


def dead_share(alive: Mapping[str, int], dead: Mapping[str, int]) -> go.Figure:
    """Live and dead units by place (a layer, or a QK group); both mappings have the same keys."""
    places = list(alive)
    figure = go.Figure()
    for name, counts, colour in (("alive", alive, BLUE), ("dead", dead, RED)):
        figure.add_bar(
            x=places,
            y=[counts[place] for place in places],
            name=name,
            marker={"color": colour},
            hovertemplate=f"%{{x}}<br>%{{y}} {name}<extra></extra>",
        )
    figure.update_layout(barmode="stack")
    figure = styled(figure, x="QK group", y="units", legend=True)
    figure.update_xaxes(type="category", nticks=12)
    return figure


def cross_entropy(clean: float, replaced: float, mean: float, zero: float) -> go.Figure:
    """Loss of the model with one layer left alone, replaced, mean-ablated and zero-ablated; nats per token."""
    names = ["clean", "replaced", "mean-ablated", "zero-ablated"]
    values = [clean, replaced, mean, zero]
    bars = go.Bar(
        x=names,
        y=values,
        marker={"color": [GREY, BLUE, AMBER, RED]},
        text=[f"{value:.3f}" for value in values],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{x}<br>%{y:.4f} nats per token<extra></extra>",
    )
    figure = styled(go.Figure(bars), y="nats per token")
    spread = max(values) - min(values)
    # the differences are small beside the loss itself; the axis title says that it does not start at zero
    figure.update_yaxes(range=[min(values) - 0.6 * spread - 1e-6, max(values) + 0.25 * spread + 1e-6])
    figure.update_yaxes(title={"text": "nats per token (axis cut)"})
    return figure


def hosts(single: Sequence[int], spanning: Sequence[int]) -> go.Figure:
    """Units by the original head with the largest output share, split by whether they span several heads."""
    figure = go.Figure()
    for name, counts, colour in (("one head", single, BLUE), ("spanning several", spanning, TEAL)):
        figure.add_bar(
            x=list(range(len(counts))),
            y=list(counts),
            name=name,
            marker={"color": colour},
            hovertemplate=f"original head %{{x}}<br>%{{y}} units, {name}<extra></extra>",
        )
    figure.update_layout(barmode="stack")
    return styled(figure, x="original head", y="units", legend=True, integer_x=True)


def unit_map(
    unit_ids: Sequence[str], rates: Sequence[float], peaks: Sequence[float], participations: Sequence[float]
) -> go.Figure:
    """Live units by activation rate and largest activation, coloured by participation."""
    points = go.Scatter(
        x=list(rates),
        y=list(peaks),
        customdata=list(unit_ids),
        mode="markers",
        marker={
            "size": 6,
            "opacity": 0.75,
            "color": list(participations),
            "colorscale": [[0, BLUE], [0.5, TEAL], [1, AMBER]],
            "cmin": 1,
            "colorbar": {"title": {"text": "heads<br>spanned"}, "thickness": 9, "outlinewidth": 0, "len": 0.9},
        },
        hovertemplate=(
            "%{customdata}<br>rate %{x:.3%}<br>max activation %{y:.3g}<br>participation %{marker.color:.2f}"
            "<extra></extra>"
        ),
    )
    figure = styled(go.Figure(points), x="activation rate", y="max activation", height=320)
    figure.update_xaxes(type="log", tickformat=".2~%", dtick=1)
    return figure


def styled(
    figure: go.Figure,
    *,
    x: str = "",
    y: str = "",
    height: int = 240,
    legend: bool = False,
    integer_x: bool = False,
) -> go.Figure:
    """The house style: axis titles, no background, and a height in pixels; the width is left to the page."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 48, "r": 8, "t": 26 if legend else 8, "b": 36},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"size": 11},
        showlegend=legend,
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "font": {"size": 11}},
        bargap=0.05,
        hoverlabel={"align": "left"},
    )
    axis = {"gridcolor": "rgba(133,147,166,0.25)", "zeroline": False, "automargin": True}
    figure.update_xaxes(title={"text": x, "standoff": 4}, showgrid=False, **axis)
    figure.update_yaxes(title={"text": y, "standoff": 6}, nticks=5, **axis)
    if integer_x:
        figure.update_xaxes(dtick=1)
    return figure
