"""The page of several sparse runs: how many edges are left at which price, beside controls and the edges of the base.

At one context, edges per query and share of open edges are the same number in two units, so charts have the first and
say the second on hover. The frame is that of every page (`view.shell`); the list holds the runs.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import plotly.graph_objects as go

from clearhead.view.figures import AMBER, BLUE, GREY, RED, TEAL, styled
from clearhead.view.shell import Contents, render, write_within
from clearhead.view.sparse_figures import logarithmic
from clearhead.view.sparse_words import share, signed
from clearhead.view.summary import plotly_json
from clearhead.view.visible import visible

HELP: dict[str, str] = {
    "frontier": (
        "Each point is a run. Blue: sparse runs, with their tolerance; a line joins the means over seeds. Amber and "
        "teal: the untrained base with as many edges, the largest of every row and of every head, at the same place. "
        "Grey: the dense control, all edges open. To the lower left is better."
    ),
    "controls": (
        "The same with the control that was trained under random edges: what so many edges are worth when nobody chose "
        "them, after as much training."
    ),
    "tolerance": (
        "What was asked for against what it came to: open edges per query by tolerance, a point for every seed."
    ),
    "held": "Measured rise of the loss against the tolerance; on the dashed line all that was allowed is used.",
    "per_query": "Open edges of one head in one row, mean over heads, layers and rows.",
    "share": "Open edges as a share of visible pairs. Comparable only at the same context.",
    "rise": "Loss minus the dense base's on the same held-out tokens, nats per token; sparse runs with hard gates.",
    "sampled_rise": "The same with gates drawn as in training.",
    "empty_rows": "Rows of a head without an open edge.",
    "leak": "Softmax mass on closed edges.",
    "top_in_row_base": "Rise of the untrained base with as many edges per row, the largest of the row.",
    "top_probability_base": "Rise of the untrained base with as many edges per head and text, the largest of all.",
    "trained_tokens": "Tokens the run was trained on.",
}
ORACLES = {"top_in_row_base": ("base, top of row", AMBER), "top_probability_base": ("base, top of head", TEAL)}


class Point(NamedTuple):
    """One run; rises are in nats over the base, None where a number does not exist."""

    run: str
    kind: str
    """none for a sparse run, else the control: dense, random."""
    tolerance: float | None
    seed: int | None
    trained_tokens: int | None
    per_query: float
    share: float
    rise: float
    sampled_rise: float | None
    empty_rows: float | None
    leak: float | None
    top_in_row_base: float | None
    top_probability_base: float | None


def write_frontier_page(out: Path, points: Sequence[Point], shared: dict[str, Any]) -> Path:
    """Write the page of runs that share base, context, tokens and text (`shared`) and return its path.

    Raises `ClearheadError` when the disk is full.
    """
    contents = Contents(
        index={
            "vocab": [],
            "help": HELP,
            "title": visible(f"{shared['base']}: edges and loss"),
            "verdict": sentences(points),
            "runs": _columns(points),
            "charts": _charts(points, shared["context"]),
        },
        parts={},
        scripts=("frontier.js",),
        styles=("toy.css", "sparse.css"),
        items="Runs",
    )
    about = shared | {"model": shared["base"], "task": f"{len(points)} runs, context {shared['context']}"}
    return write_within(out, [render(contents, about)], 25.0, "with all its runs")


def sentences(points: Sequence[Point]) -> list[str]:
    """A line for every tolerance, and one for every kind of control."""
    said = []
    for tolerance, group in by_tolerance(points).items():
        runs = f" ({len(group)} runs)" if len(group) > 1 else ""
        edges, rises = [point.per_query for point in group], [point.rise for point in group]
        part = share(mean(point.share for point in group))
        said.append(
            f"{_asked(tolerance)}{runs}: {_spread(edges, '{:.3g}')} edges per query ({part}), "
            f"rise {_spread(rises, '{:+.4f}')} nats."
        )
    for point in points:
        if point.kind != "none":
            name = {"dense": "Dense control, all edges", "random": "Trained under random edges"}[point.kind]
            said.append(f"{name}, {point.per_query:.3g} per query: rise {signed(point.rise)} nats.")
    return said


def by_tolerance(points: Sequence[Point]) -> dict[float | None, list[Point]]:
    """The sparse runs in groups of one tolerance, small ones first."""
    groups: dict[float | None, list[Point]] = {}
    for point in sorted((p for p in points if p.kind == "none"), key=lambda p: p.tolerance or 0.0):
        groups.setdefault(point.tolerance, []).append(point)
    return groups


def _asked(tolerance: float | None) -> str:
    return "No tolerance known" if tolerance is None else f"Tolerance {tolerance:g}"


def _spread(values: Sequence[float], form: str) -> str:
    middle = form.format(mean(values)).replace("-", "−")
    return middle if len(values) == 1 else f"{middle} ± {form.replace('+', '').format(stdev(values))}"


def _columns(points: Sequence[Point]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {"id": [f"run.{place}" for place in range(len(points))]}
    for name in Point._fields:
        values = [getattr(point, name) for point in points]
        columns[name] = [visible(value) if isinstance(value, str) else value for value in values]
    columns["kind"] = ["sparse" if kind == "none" else kind for kind in columns["kind"]]
    return columns


def _charts(points: Sequence[Point], context: int) -> list[dict[str, Any]]:
    chosen = [point for point in points if point.kind != "random"]
    built = [("frontier", "Edges against the rise of the loss", frontier(chosen, context))]
    if len(chosen) < len(points):
        built.append(("controls", "The same with random edges", frontier(points, context)))
    if any(point.tolerance is not None and point.kind == "none" for point in points):
        built += [
            ("tolerance", "Edges by tolerance", edges_by_tolerance(points)),
            ("held", "Was it held?", held(points)),
        ]
    return [{"name": name, "title": title, "help": HELP[name], **plotly_json(figure)} for name, title, figure in built]


def frontier(points: Sequence[Point], context: int) -> go.Figure:
    """Rise of the loss against edges per query, sparse runs with what the base loses at their edges, and controls."""
    figure = go.Figure()
    sparse = [point for point in points if point.kind == "none"]
    means = sorted(
        (
            mean(p.per_query for p in group),
            mean(p.rise for p in group),
            "" if tolerance is None else f"{tolerance:g}\u2002",
        )
        for tolerance, group in by_tolerance(points).items()
    )
    x, y, asked = zip(*means, strict=True)
    figure.add_scatter(
        x=list(x),
        y=list(y),
        text=list(asked),
        mode="lines+text",
        textposition="bottom left",
        textfont={"size": 10},
        line={"color": BLUE, "width": 1.5},
        hoverinfo="skip",
        showlegend=False,
        cliponaxis=False,
    )
    for name, (label, colour) in ORACLES.items():
        known = [point for point in sparse if getattr(point, name) is not None]
        _dots(figure, known, [getattr(point, name) for point in known], label, colour, "diamond-open")
    _dots(figure, sparse, [point.rise for point in sparse], "sparse", BLUE, "circle")
    for kind, label, colour, symbol in (("dense", "dense", GREY, "star"), ("random", "random edges", RED, "square")):
        own = [point for point in points if point.kind == kind]
        if own:
            _dots(figure, own, [point.rise for point in own], label, colour, symbol)
    figure = styled(
        figure, x=f"open edges per query, of {(context + 1) / 2:g}", y="nats over the base", height=360, legend=True
    )
    figure.update_xaxes(showgrid=True)
    figure.update_yaxes(zeroline=True, zerolinecolor=GREY, zerolinewidth=1)
    return logarithmic(figure, [point.per_query for point in points if point.per_query], axis="x")


def edges_by_tolerance(points: Sequence[Point]) -> go.Figure:
    """Edges per query of the sparse runs by tolerance."""
    known = [point for point in points if point.kind == "none" and point.tolerance is not None]
    figure = go.Figure()
    _dots(figure, known, [point.per_query for point in known], "sparse", BLUE, "circle", x="tolerance")
    figure = styled(figure, x="tolerance, nats", y="edges per query")
    figure.update_xaxes(rangemode="tozero")
    return logarithmic(figure, [point.per_query for point in known if point.per_query])


def held(points: Sequence[Point]) -> go.Figure:
    """Measured rise of the sparse runs by tolerance; dashed where they are equal."""
    known = [point for point in points if point.kind == "none" and point.tolerance is not None]
    largest = max(point.tolerance or 0.0 for point in known)
    figure = go.Figure()
    dashed = {"color": RED, "width": 1, "dash": "dash"}
    figure.add_scatter(x=[0, largest], y=[0, largest], mode="lines", line=dashed, hoverinfo="skip", showlegend=False)
    _dots(figure, known, [point.rise for point in known], "sparse", BLUE, "circle", x="tolerance")
    figure = styled(figure, x="tolerance, nats", y="measured rise, nats")
    figure.update_xaxes(rangemode="tozero")
    return figure


def _dots(
    figure: go.Figure,
    points: Sequence[Point],
    values: Sequence[float],
    name: str,
    colour: str,
    symbol: str,
    *,
    x: str = "per_query",
) -> None:
    figure.add_scatter(
        x=[getattr(point, x) for point in points],
        y=list(values),
        name=name,
        mode="markers",
        cliponaxis=False,
        marker={"color": colour, "symbol": symbol, "size": 9},
        customdata=[
            [visible(point.run), point.per_query, f"{100 * point.share:.2f} %", point.rise] for point in points
        ],
        hovertemplate=f"{name}: %{{customdata[0]}}<br>%{{customdata[1]:.3g}} edges per query (%{{customdata[2]}})"
        "<br>%{y:.4g}<extra></extra>",
    )
