"""The charts of the spectral lens, as plotly figures: the same figure opens in a notebook, in a page and in a paper.

Builders take plain numbers and return a `plotly.graph_objects.Figure` in the house style of `view.figures`. A sign is
never colour alone: what subtracts is hatched and lies on the other side of zero.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from clearhead.view.figures import AMBER, BLUE, GREY, RED, TEAL, styled

GAUSSIAN_PRODUCTS = 4 / np.pi**2
"""S of products of two independent Gaussians, (2/π)² = 0.405: a head without structure and with a flat spectrum."""


def gaussian_sparsity(sigma: Sequence[float]) -> float:
    """S without structure for singular values `sigma`: that of contributions σ_k g_k h_k with independent Gaussians.

    (2/π)² · (mean σ)² / mean σ², 0.405 for a flat spectrum and less for a steep one; 1, as S itself, for zeros only.
    """
    values = np.asarray(sigma, dtype=float)
    square = float((values**2).mean()) if len(values) else 0.0
    return GAUSSIAN_PRODUCTS * float(values.mean()) ** 2 / square if square else 1.0


def contributions(modes: Sequence[int], contributions: Sequence[float], rest: float) -> go.Figure:
    """One firing: the signed contributions of its largest modes, and the sum of all others."""
    values = [*contributions, rest]
    names = [*(f"mode {mode}" for mode in modes), "others"]
    colours = [BLUE if value >= 0 else RED for value in contributions]
    bars = go.Bar(
        x=names,
        y=values,
        marker={
            "color": [*colours, GREY],
            "pattern": {"shape": ["" if value >= 0 else "/" for value in values], "fillmode": "replace"},
        },
        text=[f"{value:+.2f}".replace("-", "−") for value in values],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{x}<br>contributes %{y:.3g}<extra></extra>",
    )
    figure = styled(go.Figure(bars), y="contribution to the relative score")
    figure.update_yaxes(zeroline=True, zerolinecolor=GREY, zerolinewidth=1)
    figure.update_xaxes(type="category")
    return figure


def sparsity_against_controls(
    sparsity: float,
    controls: Sequence[str],
    effects: Sequence[float],
    lows: Sequence[float],
    highs: Sequence[float],
    *,
    reference: float,
) -> go.Figure:
    """Mean S of a head (vertical line) and under each control, with the 95 % interval of the difference.

    `effects` is S under the control minus S; `lows` and `highs` end its interval. `reference` is the head's
    `gaussian_sparsity`, drawn as a dotted line.
    """
    points = go.Scatter(
        x=[sparsity + effect for effect in effects],
        y=list(controls),
        mode="markers",
        name="control",
        marker={"size": 9, "color": AMBER, "symbol": "diamond"},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [high - effect for high, effect in zip(highs, effects, strict=True)],
            "arrayminus": [effect - low for low, effect in zip(lows, effects, strict=True)],
            "color": GREY,
            "thickness": 1.5,
            "width": 4,
        },
        customdata=[[effect, low, high] for effect, low, high in zip(effects, lows, highs, strict=True)],
        hovertemplate=(
            "%{y}: S %{x:.3f}<br>%{customdata[0]:+.3f} against the head "
            "(%{customdata[1]:+.3f} to %{customdata[2]:+.3f})<extra></extra>"
        ),
    )
    figure = styled(go.Figure(points), x="S: low is sparse", height=92 + 24 * max(len(controls), 1), legend=True)
    figure.update_traces(showlegend=False)
    figure.add_vline(x=sparsity, line={"color": BLUE, "width": 2.5})
    figure.add_vline(
        x=reference,
        line={"color": GREY, "width": 1, "dash": "dot"},
        name="products of Gaussians with this spectrum",
        showlegend=True,
    )
    figure.update_xaxes(rangemode="tozero", showgrid=True)
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    return figure


def spectrum(sigma: Sequence[float], shares: Mapping[int, float] | None = None) -> go.Figure:
    """Singular values, largest first, on a logarithmic axis; zeros have no place there.

    Modes in `shares` are marked, by area according to their share of the contributions.
    """
    marked = dict(shares or {})
    line = go.Scatter(
        x=list(range(len(sigma))),
        y=[value if value > 0 else None for value in sigma],
        mode="lines+markers",
        name="modes",
        line={"color": BLUE, "width": 1.2},
        marker={"size": 3.5},
        hovertemplate="mode %{x}<br>σ %{y:.3g}<extra></extra>",
    )
    marks = go.Scatter(
        x=list(marked),
        y=[sigma[mode] if sigma[mode] > 0 else None for mode in marked],
        mode="markers",
        name="contribute most",
        marker={
            "size": [mark_size(share) for share in marked.values()],
            "color": AMBER,
            "line": {"color": GREY, "width": 1},
        },
        customdata=list(marked.values()),
        hovertemplate="mode %{x}<br>σ %{y:.3g}<br>%{customdata:.1%} of the contributions<extra></extra>",
    )
    figure = styled(go.Figure([line, marks]), x="mode", y="singular value", height=180)
    # two per decade, for a spectrum may span less than one
    ticks = [digit * 10.0**power for power in range(-6, 5) for digit in (1, 3)]
    figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    return figure


def mark_size(share: float) -> float:
    """Diameter of a mark whose area stands for a share."""
    return 6 + 14 * share**0.5


def head_map(values: Sequence[Sequence[float | None]], name: str, categories: Sequence[str] = ()) -> go.Figure:
    """A number of every head, `values[layer][head]`; None leaves a cell empty.

    With `categories` the numbers are places in that list, drawn in one colour each, and the list names them.
    """
    colours: list[list[float | str]] = [[0, "rgba(63,131,217,0.08)"], [1, BLUE]]
    limits: dict[str, float] = {}
    bar = {"title": {"text": name}, "thickness": 9, "outlinewidth": 0, "len": 0.9}
    if categories:
        palette = [BLUE, AMBER, "#b4bdc9", "#9b84d6", TEAL, RED, "#6f7d90", "#d8b4a0", "#5a4f7d"]
        n = len(categories)
        steps = [(place, palette[place % len(palette)]) for place in range(n)]
        colours = [[edge / n, colour] for place, colour in steps for edge in (place, place + 1)]
        limits = {"zmin": -0.5, "zmax": n - 0.5}
        bar |= {"tickvals": list(range(n)), "ticktext": list(categories)}
    cells = go.Heatmap(
        z=[list(row) for row in values],
        colorscale=colours,
        colorbar=bar,
        xgap=1,
        ygap=1,
        hoverongaps=False,
        customdata=[[categories[int(v)] if categories and v is not None else "" for v in row] for row in values],
        hovertemplate="layer %{y}, head %{x}<br>" + ("%{customdata}" if categories else "%{z:.3g}") + "<extra></extra>",
        **limits,
    )
    figure = styled(go.Figure(cells), x="head", y="layer", height=90 + 18 * max(len(values), 4))
    figure.update_yaxes(autorange="reversed", dtick=max(1, len(values) // 16), showgrid=False)
    figure.update_xaxes(dtick=max(1, max(map(len, values), default=1) // 16))
    return figure


def n_recon_histogram(counts: Mapping[int, int]) -> go.Figure:
    """Firings by N_recon: `counts[n]` of those kept need n modes."""
    places = sorted(counts)
    total = sum(counts.values()) or 1
    bars = go.Bar(
        x=places,
        y=[counts[place] for place in places],
        marker={"color": BLUE},
        customdata=[sum(counts[p] for p in places if p <= place) / total for place in places],
        hovertemplate="%{x} modes<br>%{y} of the firings kept<br>%{customdata:.0%} need no more<extra></extra>",
    )
    figure = styled(go.Figure(bars), x="modes needed (N_recon)", y="firings kept")
    figure.update_xaxes(dtick=1 if not places or places[-1] <= 20 else None)
    return figure


def heads_against_control(
    groups: Mapping[str, tuple[str, Sequence[tuple[str, float, float]]]], control: str
) -> go.Figure:
    """Heads by mean S under a control (across) and their own (up); the diagonal is where both agree.

    `groups[verdict]` holds a colour and (name, S, S under the control) of each head. Every group has its own symbol.
    """
    symbols = ["circle", "diamond", "square-open", "triangle-down", "cross", "x", "star", "hexagon", "pentagon"]
    figure = go.Figure()
    top = max([GAUSSIAN_PRODUCTS, *(max(own, other) for _, heads in groups.values() for _, own, other in heads)])
    figure.add_scatter(
        x=[0, top],
        y=[0, top],
        mode="lines",
        line={"color": GREY, "width": 1, "dash": "dot"},
        hoverinfo="skip",
        showlegend=False,
    )
    for place, (verdict, (colour, heads)) in enumerate(groups.items()):
        figure.add_scatter(
            x=[other for _, _, other in heads],
            y=[own for _, own, _ in heads],
            customdata=[name for name, _, _ in heads],
            mode="markers",
            name=verdict,
            marker={"size": 7, "opacity": 0.8, "color": colour, "symbol": symbols[place % len(symbols)]},
            hovertemplate=f"%{{customdata}}, {verdict}<br>S %{{y:.3f}}, {control} %{{x:.3f}}<extra></extra>",
        )
    figure = styled(figure, x=f"S under {control}", y="S", height=300, legend=True)
    figure.update_xaxes(rangemode="tozero", showgrid=True)
    figure.update_yaxes(rangemode="tozero")
    return figure
