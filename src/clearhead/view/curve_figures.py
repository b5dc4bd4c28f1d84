"""The charts of inclusion curves, as plotly figures in the house style of `view.figures`.

Counts are drawn on a logarithm, with 0 at a half. Builders take plain numbers; nothing here reads a file.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from clearhead.ops.bootstrap import bounds, draw_counts
from clearhead.view.figures import AMBER, BLUE, GREY, RED, TEAL, styled

COLOURS = (BLUE, AMBER, TEAL, RED, "#8a63c9", "#7a8b2d", "#c0622f")
SIGNED = [[0, RED], [0.5, "rgba(133,147,166,0.10)"], [1, BLUE]]
_TICKS = (0, 1, 2, 5)


class Line(NamedTuple):
    """One curve as it is drawn."""

    name: str
    counts: Sequence[int]
    f: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None
    """2.5 and 97.5 percentiles of F over prompts at every count."""
    first: int | None
    stable: int | None
    is_random: bool


def bootstrap_band(values: NDArray[np.float64]) -> tuple[list[float], list[float]] | None:
    """95 % band of F over resampled prompts from `values` [p, k], whose columns go from the empty circuit to the model.

    None for a single prompt, and where a resample has no behaviour to explain.
    """
    n = len(values)
    if n < 2:
        return None
    means = draw_counts(n, 0) @ values / n
    effect = means[:, -1:] - means[:, :1]
    if (effect <= 0).any():
        return None
    f = (means - means[:, :1]) / effect
    low, high = bounds(f)
    return low.tolist(), high.tolist()


def inclusion(lines: Sequence[Line], threshold: float, what: str, height: int = 380) -> go.Figure:
    """F on the number of components kept, with bands, first (▽) and stable (◆) crossings; random rankings in grey."""
    figure = go.Figure()
    colours = iter(COLOURS * (1 + len(lines) // len(COLOURS)))
    largest = max(max(line.counts) for line in lines)
    for line in lines:
        colour = GREY if line.is_random else next(colours)
        x = [_place(count) for count in line.counts]
        if line.band is not None:
            low, high = line.band
            figure.add_scatter(
                x=[*x, *x[::-1]],
                y=[*high, *list(low)[::-1]],
                mode="lines",
                fill="toself",
                fillcolor=_pale(colour),
                line={"width": 0},
                hoverinfo="skip",
                showlegend=False,
            )
        figure.add_scatter(
            x=x,
            y=list(line.f),
            customdata=list(line.counts),
            mode="lines+markers",
            name=line.name,
            line={"color": colour, "width": 1.5 if line.is_random else 2, "dash": "dot" if line.is_random else "solid"},
            marker={"size": 4},
            hovertemplate=f"{line.name}<br>%{{customdata}} {what}: F %{{y:.3f}}<extra></extra>",
        )
        for word, count, symbol in (("first", line.first, "triangle-down-open"), ("stable", line.stable, "diamond")):
            if count is not None:
                figure.add_scatter(
                    x=[_place(count)],
                    y=[line.f[list(line.counts).index(count)]],
                    mode="markers",
                    marker={"size": 11, "color": colour, "symbol": symbol, "line": {"width": 2, "color": colour}},
                    hovertemplate=f"{line.name}<br>{word} crossing: {count} {what}<extra></extra>",
                    showlegend=False,
                )
    figure.add_hline(y=threshold, line={"color": RED, "width": 1, "dash": "dash"})
    figure.add_hline(y=1.0, line={"color": GREY, "width": 1, "dash": "dot"})
    figure = styled(
        figure, x=f"{what} kept, most important first", y="F: share of the behaviour kept", height=height, legend=True
    )
    return _counted(figure, largest)


def other_metrics(counts: Sequence[int], means: Mapping[str, Sequence[float]], what: str) -> go.Figure:
    """The same circuits by every metric, each scaled from the empty circuit (0) to the model (1)."""
    figure = go.Figure()
    for (name, values), colour in zip(means.items(), COLOURS, strict=False):
        effect = values[-1] - values[0]
        if effect == 0:
            continue
        words = name.replace("_", " ").replace("kl", "KL")
        figure.add_scatter(
            x=[_place(count) for count in counts],
            y=[(value - values[0]) / effect for value in values],
            customdata=[[count, value] for count, value in zip(counts, values, strict=True)],
            mode="lines",
            name=words,
            line={"color": colour, "width": 2},
            hovertemplate=f"%{{customdata[0]}} {what}<br>{words} %{{customdata[1]:.3f}}, scaled %{{y:.3f}}"
            "<extra></extra>",
        )
    figure = styled(figure, x=f"{what} kept", y="scaled from none to all", height=300, legend=True)
    return _counted(figure, max(counts))


def per_prompt(crossings: Sequence[int | None], what: str) -> go.Figure:
    """How many prompts need how many components on their own; those that never stay above are the last bar."""
    reached = [count for count in crossings if count is not None]
    top = max(reached, default=1)
    width = max(1, -(-top // 24))
    bins = np.bincount(np.array(reached, dtype=np.int64) // width, minlength=1) if reached else np.zeros(1, int)
    names = [
        f"{at * width}" if width == 1 else f"{at * width}–{min(top, (at + 1) * width - 1)}" for at in range(len(bins))
    ]
    never = len(crossings) - len(reached)
    figure = go.Figure()
    figure.add_bar(
        x=names,
        y=bins.tolist(),
        name="stable",
        marker={"color": BLUE},
        hovertemplate=f"%{{x}} {what}<br>%{{y}} prompts<extra></extra>",
    )
    if never:
        figure.add_bar(
            x=["never"],
            y=[never],
            name="never",
            marker={"color": RED},
            hovertemplate="no stable crossing<br>%{y} prompts<extra></extra>",
        )
    figure = styled(figure, x=f"{what} that one prompt needs", y="prompts", height=300)
    figure.update_xaxes(type="category", nticks=6, tickangle=0)
    return figure


def ranking(
    layers: Sequence[int], values: Sequence[Sequence[float | None]], places: Sequence[Sequence[int | None]]
) -> go.Figure:
    """Scores by layer (bottom to top) and head: blue helps, red hurts, by the square root, so that one head that does
    most leaves the others visible. `places` in the ranking are said on hover.
    """
    size = max((abs(value) for row in values for value in row if value is not None), default=1.0) or 1.0
    pairs = [list(zip(*rows, strict=True)) for rows in zip(values, places, strict=True)]
    heat = go.Heatmap(
        z=[
            [None if value is None else math.copysign(math.sqrt(abs(value) / size), value) for value in row]
            for row in values
        ],
        y=[str(layer) for layer in layers],
        customdata=[[list(pair) for pair in row] for row in pairs],
        zmin=-1,
        zmax=1,
        colorscale=SIGNED,
        colorbar={
            "thickness": 9,
            "outlinewidth": 0,
            "len": 0.9,
            "tickvals": [-1, 0, 1],
            "ticktext": [f"{-size:.2g}", "0", f"{size:.2g}"],
        },
        hovertemplate="head %{y}.%{x}<br>score %{customdata[0]:.4g}, place %{customdata[1]}<extra></extra>",
        xgap=1,
        ygap=1,
    )
    figure = styled(go.Figure(heat), x="head", y="layer", height=max(220, 90 + 15 * len(layers)))
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(type="category", nticks=16, showgrid=False)
    return figure


def _place(count: int) -> float:
    return float(max(count, 0.5))


def _counted(figure: go.Figure, largest: int) -> go.Figure:
    """A logarithmic axis of counts that has 0 on it and ends at all."""
    ticks = sorted({0, *(step * 10**power for step in _TICKS[1:] for power in range(7)), largest})
    # a tick close to the last would lie under it
    ticks = [tick for tick in ticks if tick == largest or tick < 0.6 * largest]
    figure.update_xaxes(
        type="log",
        tickvals=[_place(tick) for tick in ticks],
        ticktext=[f"{tick:,}" for tick in ticks],
        nticks=0,
        tickangle=0,
    )
    return figure


def _pale(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"
