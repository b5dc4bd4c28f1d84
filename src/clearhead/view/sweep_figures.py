"""The charts of a sweep over checkpoints, as plotly figures in the house style of `view.figures`.

Steps are on a logarithmic axis, since most of what attention learns comes early; step 0 stands where 1 would.
"""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from clearhead.view.figures import AMBER, BLUE, GREY, RED, TEAL, styled
from clearhead.view.spectral_figures import GAUSSIAN_PRODUCTS

COLOURS = (BLUE, AMBER, TEAL, RED)
DASHES = ("solid", "dash", "dot", "dashdot")


def over_training(steps: Sequence[int], curves: Mapping[str, Sequence[float | None]], y: str) -> go.Figure:
    """One curve per head: colours for layers in turn, dashes for heads of a layer; gaps where nothing was measured."""
    figure = go.Figure()
    layers = list(dict.fromkeys(name.split(".")[0] for name in curves))
    for name, values in curves.items():
        layer, head = name.split(".")
        style = {
            "color": COLOURS[layers.index(layer) % len(COLOURS)],
            "dash": DASHES[int(head) % len(DASHES)],
            "width": 1.8,
        }
        figure.add_scatter(
            x=_places(steps), y=list(values), name=name, mode="lines", line=style, hovertemplate=_hover(f"head {name}")
        )
    return _by_step(figure, y, legend=len(curves) <= 24)


def sparsity(
    steps: Sequence[int],
    own: Sequence[float | None],
    rotated: Sequence[float | None],
    spans: Sequence[float | None],
) -> go.Figure:
    """S of one head over training: in its own modes, in rotated bases, and with directions rotated in their spans."""
    figure = go.Figure()
    figure.add_scatter(x=_places(steps), y=list(own), name="own modes", mode="lines+markers", line={"color": BLUE})
    figure.add_scatter(
        x=_places(steps), y=list(rotated), name="rotated bases", mode="lines", line={"color": AMBER, "dash": "dash"}
    )
    if any(value is not None for value in spans):  # layers that rotate have none in a fixed basis
        figure.add_scatter(
            x=_places(steps), y=list(spans), name="rotated spans", mode="lines", line={"color": TEAL, "dash": "dot"}
        )
    figure.add_hline(y=GAUSSIAN_PRODUCTS, line={"color": GREY, "dash": "dot", "width": 1})
    figure = _by_step(figure, "S", legend=True)
    figure.update_yaxes(range=[0, 0.6])
    return figure


def n_recon(steps: Sequence[int], own: Sequence[float | None], rotated: Sequence[float | None]) -> go.Figure:
    """Median N_recon of one head over training, in its own modes and in rotated bases."""
    figure = go.Figure()
    figure.add_scatter(x=_places(steps), y=list(own), name="own modes", mode="lines+markers", line={"color": BLUE})
    figure.add_scatter(
        x=_places(steps), y=list(rotated), name="rotated bases", mode="lines", line={"color": AMBER, "dash": "dash"}
    )
    figure = _by_step(figure, "N_recon", legend=True)
    figure.update_yaxes(rangemode="tozero")
    return figure


def behaviour(steps: Sequence[int], curves: Mapping[str, Sequence[float]]) -> go.Figure:
    """Attention scores of one head over training: previous, duplicate, induction, sink."""
    figure = go.Figure()
    for place, (name, values) in enumerate(curves.items()):
        style = {"color": COLOURS[place % len(COLOURS)], "dash": DASHES[place % len(DASHES)]}
        figure.add_scatter(x=_places(steps), y=list(values), name=name, mode="lines", line=style)
    figure = _by_step(figure, "mean attention", legend=True)
    figure.update_yaxes(range=[0, 1])
    return figure


def _places(steps: Sequence[int]) -> list[int]:
    return [max(1, step) for step in steps]


def _hover(name: str) -> str:
    return f"{name}<br>step %{{x:,}}: %{{y:.3g}}<extra></extra>"


def _by_step(figure: go.Figure, y: str, *, legend: bool) -> go.Figure:
    figure = styled(figure, x="training step", y=y, legend=legend)
    figure.update_xaxes(type="log")
    return figure
