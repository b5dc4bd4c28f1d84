"""The charts of the addition toy, as plotly figures: the same figure opens in a notebook, in a page and in a paper.

Builders take plain numbers and return a `plotly.graph_objects.Figure` in the house style of `view.figures`. The maps
of edges are drawings, not charts (assets/addition.js).
"""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from clearhead.view.figures import AMBER, BLUE, GREY, RED, TEAL, styled

COLOURS = (BLUE, AMBER, TEAL, RED, GREY)


def edges_over_steps(curves: Mapping[int, tuple[Sequence[float], Sequence[float]]]) -> go.Figure:
    """Share of open edges over training, hard gates, a line per seed; `curves` holds steps and shares."""
    figure = _lines(curves, "open edges %{y:.2%}")
    figure = styled(figure, x="step", y="open edges", legend=len(curves) > 1)
    figure.update_yaxes(type="log", tickvals=[0.01, 0.03, 0.1, 0.3, 1], tickformat=".0%", range=[-2.1, 0.05])
    return figure


def errors_over_steps(curves: Mapping[int, tuple[Sequence[float], Sequence[float]]]) -> go.Figure:
    """Share of training sums with a wrong digit, hard gates, a line per seed; `curves` holds steps and accuracies."""
    wrong = {seed: (steps, [1 - right for right in values]) for seed, (steps, values) in curves.items()}
    figure = styled(_lines(wrong, "wrong sums %{y:.1%}"), x="step", y="wrong sums", legend=len(curves) > 1)
    figure.update_yaxes(
        tickformat=".0%", range=[0, max(0.11, *(max(values, default=0) for _, values in wrong.values()))]
    )
    return figure


def _lines(curves: Mapping[int, tuple[Sequence[float], Sequence[float]]], hover: str) -> go.Figure:
    figure = go.Figure()
    for place, (seed, (steps, values)) in enumerate(curves.items()):
        figure.add_scatter(
            x=list(steps),
            y=list(values),
            name=f"seed {seed}",
            mode="lines",
            line={"color": COLOURS[place % len(COLOURS)], "width": 2},
            hovertemplate=f"step %{{x}}<br>{hover}<extra>seed {seed}</extra>",
        )
    return figure
