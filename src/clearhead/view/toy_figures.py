"""The charts of the toy model, as plotly figures: the same figure opens in a notebook, in a page and in a paper.

Builders take plain numbers and return a `plotly.graph_objects.Figure` in the house style of `view.figures`.
"""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from clearhead.view.figures import AMBER, BLUE, GREY, RED, TEAL, styled
from clearhead.view.spectral_figures import GAUSSIAN_PRODUCTS

SHADES = [[0, "rgba(63,131,217,0)"], [1, BLUE]]
EVENT_COLOURS = {"singular vectors": BLUE, "orthogonalisation": RED, "amplitude": GREY}
GPT2_RANGE = (10, 55)
"""‖E_X‖₂ of dictionaries of GPT-2 as the paper reports it."""


def spectrum(sigma: Sequence[float], targets: Sequence[float], control: Sequence[float]) -> go.Figure:
    """Singular values of Ω beside the target logits of the pairs, and those of a head that was not trained."""
    modes = list(range(len(sigma)))
    figure = go.Figure()
    figure.add_bar(x=modes, y=list(sigma), name="σ, trained", marker={"color": BLUE}, hovertemplate=_hover("σ"))
    figure.add_scatter(
        x=modes[: len(targets)],
        y=list(targets),
        name="target logit T",
        mode="markers",
        marker={"color": AMBER, "symbol": "diamond", "size": 8},
        hovertemplate=_hover("T"),
    )
    figure.add_scatter(
        x=list(range(len(control))),
        y=list(control),
        name="σ, no head",
        mode="lines",
        line={"color": GREY, "dash": "dot"},
        hovertemplate=_hover("σ without training"),
    )
    figure = styled(figure, x="mode", y="singular value", height=290, legend=True)
    figure.update_yaxes(rangemode="tozero")
    return figure


def _hover(what: str) -> str:
    return f"mode %{{x}}<br>{what} %{{y:.4g}}<extra></extra>"


def shades(matrix: Sequence[Sequence[float]], x: str, y: str) -> go.Figure:
    """A matrix of |cosines| as shades from 0 to 1, first row on top."""
    heat = go.Heatmap(
        z=[list(row) for row in matrix],
        zmin=0,
        zmax=1,
        colorscale=SHADES,
        colorbar={"thickness": 9, "outlinewidth": 0, "len": 0.9},
        hovertemplate=f"{y} %{{y}}, {x} %{{x}}<br>|cosine| %{{z:.3f}}<extra></extra>",
    )
    figure = styled(go.Figure(heat), x=x, y=y, height=300)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def dynamics(
    steps: Sequence[int], curves: Mapping[str, Sequence[float]], events: Mapping[str, int | None]
) -> go.Figure:
    """Cosines, overlap and amplitudes over training on a logarithmic axis; dotted where an event is reached."""
    colours = {"in the span": BLUE, "query": BLUE, "own vector": TEAL, "key": TEAL, "overlap": RED, "logit / T": AMBER}
    figure = go.Figure()
    for name, values in curves.items():
        figure.add_scatter(
            x=[max(step, 1) for step in steps],
            y=list(values),
            name=name,
            mode="lines",
            line={"color": colours.get(name, GREY), "width": 2, "dash": "dash" if name == "key" else "solid"},
            hovertemplate=f"step %{{x}}<br>{name} %{{y:.3f}}<extra></extra>",
        )
    for event, step in events.items():
        if step is not None:
            figure.add_vline(x=max(step, 1), line={"color": EVENT_COLOURS.get(event, GREY), "width": 1, "dash": "dot"})
    figure = styled(figure, x="step", y="", height=290, legend=True)
    figure.update_xaxes(type="log", dtick=1)
    figure.update_yaxes(range=[0, 1.3], dtick=0.25)
    return figure


def losses(steps: Sequence[int], reconstruction: Sequence[float], attention: Sequence[float]) -> go.Figure:
    """Both losses over training, each on a logarithmic axis; a divergence that rounds to 0 has no place there."""
    figure = go.Figure()
    for name, values, colour in (("reconstruction", reconstruction, AMBER), ("attention", attention, BLUE)):
        figure.add_scatter(
            x=[max(step, 1) for step in steps],
            y=[value if value > 1e-8 else None for value in values],
            name=name,
            mode="lines",
            line={"color": colour, "width": 2},
            hovertemplate=f"step %{{x}}<br>{name} %{{y:.3g}}<extra></extra>",
        )
    figure = styled(figure, x="step", y="loss", legend=True)
    figure.update_xaxes(type="log", dtick=1)
    figure.update_yaxes(type="log", exponentformat="power", nticks=6)
    return figure


def sparsity(steps: Sequence[int], own: Sequence[float], rotated: Sequence[float]) -> go.Figure:
    """S of the contributions to target keys over training, in the head's basis and in a rotated one."""
    figure = _two_bases(steps, own, rotated, "S: low is sparse")
    figure.add_hline(y=GAUSSIAN_PRODUCTS, line={"color": GREY, "width": 1, "dash": "dot"})
    figure.update_yaxes(range=[0, 0.7])
    return figure


def n_recon(steps: Sequence[int], own: Sequence[float], rotated: Sequence[float]) -> go.Figure:
    """Median number of modes that make up a relative logit, in the head's basis and in a rotated one."""
    figure = _two_bases(steps, own, rotated, "N_recon, median")
    figure.update_yaxes(rangemode="tozero")
    return figure


def _two_bases(steps: Sequence[int], own: Sequence[float], rotated: Sequence[float], y: str) -> go.Figure:
    figure = go.Figure()
    for name, values, colour in (("singular vectors", own, BLUE), ("rotated, same logits", rotated, GREY)):
        figure.add_scatter(
            x=[max(step, 1) for step in steps],
            y=list(values),
            name=name,
            mode="lines",
            line={"color": colour, "width": 2},
            hovertemplate=f"step %{{x}}<br>{name} %{{y:.3g}}<extra></extra>",
        )
    figure = styled(figure, x="step", y=y, legend=True)
    figure.update_xaxes(type="log", dtick=1)
    return figure


def anisotropy(interference: Sequence[float], curves: Mapping[str, Sequence[float]]) -> go.Figure:
    """Mean |cosine| of recovered features over ‖E_X‖₂; the range reported for GPT-2 is shaded."""
    colours = {"u₁": BLUE, "u₁, mean removed": AMBER, "Σ u₁": TEAL, "floor": GREY}
    figure = go.Figure()
    figure.add_vrect(x0=GPT2_RANGE[0], x1=GPT2_RANGE[1], fillcolor="rgba(133,147,166,0.16)", line={"width": 0})
    for name, values in curves.items():
        figure.add_scatter(
            x=list(interference),
            y=list(values),
            name=name,
            mode="lines+markers",
            line={"color": colours.get(name, GREY), "width": 2, "dash": "dot" if name == "floor" else "solid"},
            hovertemplate=f"‖E‖₂ %{{x:.1f}}<br>{name} %{{y:.3f}}<extra></extra>",
        )
    figure = styled(figure, x="interference ‖E_X‖₂", y="mean |cosine|", legend=True)
    figure.update_yaxes(range=[0, 1.02])
    return figure


def sweep(name: str, values: Sequence[float], curves: Mapping[str, Sequence[float]]) -> go.Figure:
    """The worst pair's cosine, overlap and logit for each value of one setting."""
    colours = {"cosine": BLUE, "overlap": RED, "logit / T": AMBER}
    figure = go.Figure()
    for label, numbers in curves.items():
        figure.add_scatter(
            x=[f"{value:g}" for value in values],
            y=list(numbers),
            name=label,
            mode="lines+markers",
            line={"color": colours.get(label, GREY), "width": 2},
            hovertemplate=f"{name} %{{x}}<br>{label} %{{y:.3f}}<extra></extra>",
        )
    figure = styled(figure, x=name, y="worst pair", legend=True)
    figure.update_xaxes(type="category")
    figure.update_yaxes(range=[0, 1.15])
    return figure
