"""The page of inclusion curves: how many components explain a behaviour, with intervals, baseline and the protocol.

Several runs, as of a dense and a sparse model, are drawn on one chart. The frame is that of every page (`view.shell`);
the list holds the curves. Charts are `view.curve_figures`, sentences `view.curve_words`. No model is needed.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from clearhead.view import curve_figures as figures
from clearhead.view.curve_words import HELP, Numbers, outcome_words, protocol_words, random_words, things
from clearhead.view.packing import brief, pack
from clearhead.view.shell import Contents, render, write_within
from clearhead.view.summary import plotly_json
from clearhead.view.visible import visible

LISTED = 400
"""Components of a circuit that a page names."""
_HEAD = re.compile(r"head\.(\d+)\.(\d+)")


class CurveRun(NamedTuple):
    """One run of `clearhead circuit curve`."""

    name: str
    """What the run is called where several are compared."""
    protocol: Numbers
    """`circuits.protocol.Protocol.to_dict()`."""
    curves: Sequence[Numbers]
    """`circuits.curve.Curve.to_dict()` of every ranking and policy, random ones among them."""
    scores: Mapping[str, Mapping[str, float]]
    """Scores by ranking and unit; empty where prompts have their own components."""


def write_curve_page(out: Path, runs: Sequence[CurveRun]) -> Path:
    """Write the page of one run or of several and return its path. Raises `ClearheadError` when the disk is full."""
    placed = [(run, curve) for run in runs for curve in run.curves]
    names = curve_names(runs)
    first = runs[0].protocol
    what = things(first["level"])
    contents = Contents(
        index={
            "vocab": [],
            "help": HELP,
            "what": what,
            "title": visible(f"{first['task']}: how many {what}"),
            "verdict": _verdict(runs, names),
            "curves": _columns(names, placed),
            "chart": {
                "name": "inclusion",
                "title": "Share kept by size of the circuit",
                **_spec(_inclusion(names, placed, what)),
            },
            "overlap": overlaps(names, [curve for _, curve in placed]),
            "protocols": [_protocol(run) for run in runs],
        },
        parts={"curves": [pack(_details(run, curve)) for run, curve in placed]},
        scripts=("curve.js",),
        styles=("toy.css", "sparse.css", "curve.css"),
        items="Curves",
    )
    about = {
        "model": " and ".join(dict.fromkeys(str(run.protocol["model"]) for run in runs)),
        "task": f"{first['task']} · {first['level']}",
        "protocols": {run.name: dict(run.protocol) for run in runs},
    }
    return write_within(out, [render(contents, about)], 25.0, "with all its curves")


def curve_names(runs: Sequence[CurveRun]) -> list[str]:
    """`exact, signed`, with the run before it where there are several; random rankings are numbered."""
    names = []
    for run in runs:
        random = 0
        for curve in run.curves:
            if curve["rank"] == "random":
                random += 1
                name = f"random {random}"
            else:
                name = f"{curve['rank']}, {curve['policy']}"
            names.append(f"{run.name}: {name}" if len(runs) > 1 else name)
    return names


def _verdict(runs: Sequence[CurveRun], names: Sequence[str]) -> list[str]:
    """A sentence for every curve that is not random, and one for the random ones of a run."""
    said, place = [], 0
    for run in runs:
        for curve in run.curves:
            if curve["rank"] != "random":
                said.append(outcome_words(names[place], curve, curve["counts"][-1], things(run.protocol["level"])))
            place += 1
        said.append(random_words(run.curves))
    return [visible(sentence) for sentence in said if sentence]


def overlaps(names: Sequence[str], curves: Sequence[Numbers]) -> list[list[Any]]:
    """[curve, curve, Jaccard overlap, sizes] of every two stable circuits that are not random."""
    circuits = [(at, set(curve["circuit"])) for at, curve in enumerate(curves) if curve["rank"] != "random"]
    circuits = [(at, circuit) for at, circuit in circuits if circuit]
    return [
        [visible(names[a]), visible(names[b]), brief(len(one & two) / len(one | two)), len(one), len(two)]
        for place, (a, one) in enumerate(circuits)
        for b, two in circuits[place + 1 :]
    ]


def head_grid(
    scores: Mapping[str, float], policy: str = "signed"
) -> tuple[list[int], list[list[float | None]], list[list[int | None]]] | None:
    """Layers, and by layer and head the scores and the places in the ranking; None without heads."""
    size = abs if policy == "absolute" else float
    order = {name: place for place, name in enumerate(sorted(scores, key=lambda name: -size(scores[name])), 1)}
    heads = {(int(match[1]), int(match[2])): name for name in scores if (match := _HEAD.fullmatch(name))}
    if not heads:
        return None
    layers = sorted({layer for layer, _ in heads})
    width = 1 + max(head for _, head in heads)
    values: list[list[float | None]] = [[None] * width for _ in layers]
    places: list[list[int | None]] = [[None] * width for _ in layers]
    for (layer, head), name in heads.items():
        row = layers.index(layer)
        values[row][head], places[row][head] = brief(scores[name]), order[name]
    return layers, values, places


def _columns(names: Sequence[str], placed: Sequence[tuple[CurveRun, Numbers]]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for place, (name, (run, curve)) in enumerate(zip(names, placed, strict=True)):
        values = {
            "id": f"curve.{place}",
            "name": visible(name),
            "run": visible(run.name),
            "rank": curve["rank"],
            "policy": curve["policy"],
            "metric": curve["metric"],
            "n": curve["counts"][-1],
            "prompts": len(curve["items"]),
            **{key: curve[key] for key in ("first", "stable", "max_f_at")},
            "tied": curve["tied_at_stable"],
            **{key: brief(curve[key]) for key in ("threshold", "auc", "cpr", "cmd", "max_f", "complement_f")},
            "share": None if curve["stable"] is None else brief(curve["stable"] / curve["counts"][-1]),
        }
        for over in ("prompts", "templates"):
            for key in ("first", "stable", "auc"):
                interval = curve[f"intervals_{over}"][key]
                values[f"{key}_{over}"] = None if interval is None else [brief(end) for end in interval]
        for key, value in values.items():
            columns.setdefault(key, []).append(value)
    return columns


def _inclusion(names: Sequence[str], placed: Sequence[tuple[CurveRun, Numbers]], what: str) -> go.Figure:
    lines = [_line(visible(name), curve) for name, (_, curve) in zip(names, placed, strict=True)]
    return figures.inclusion(lines, placed[0][1]["threshold"], what)


def _line(name: str, curve: Numbers) -> figures.Line:
    band = figures.bootstrap_band(np.array(curve["per_prompt_values"], dtype=np.float64))
    return figures.Line(
        name, curve["counts"], curve["f"], band, curve["first"], curve["stable"], curve["rank"] == "random"
    )


def _details(run: CurveRun, curve: Numbers) -> dict[str, Any]:
    """What the view of one curve shows beside its numbers."""
    what = things(run.protocol["level"])
    charts = [
        (
            "inclusion",
            "Share kept by size",
            figures.inclusion([_line(curve["rank"], curve)], curve["threshold"], what, 300),
        ),
        ("per_prompt", "Prompts alone", figures.per_prompt(curve["per_prompt_stable"], what)),
        ("other_metrics", "By every metric", figures.other_metrics(curve["counts"], curve["means"], what)),
    ]
    grid = head_grid(run.scores.get(curve["rank"], {}), curve["policy"])
    if grid is not None:
        charts.append(("ranking", "The ranking by layer and head", figures.ranking(*grid)))
    elif curve["circuit"]:
        order = {name: float(place) for place, name in enumerate(reversed(curve["circuit"]), 1)}
        if (grid := head_grid(order)) is not None:
            charts.append(("order", "The circuit by layer and head", figures.ranking(*grid)))
    values = zip(
        curve["items"], curve["templates"], curve["per_prompt_values"], curve["per_prompt_stable"], strict=True
    )
    return {
        "charts": [{"name": name, "title": title, **_spec(figure)} for name, title, figure in charts],
        "prompts": [
            [item, visible(str(template)), brief(row[0]), brief(row[-1]), stable]
            for item, template, row, stable in values
        ],
        "circuit": [visible(name) for name in curve["circuit"][:LISTED]],
        "size": len(curve["circuit"]),
    }


def _spec(figure: go.Figure) -> dict[str, Any]:
    return plotly_json(figure)


def _protocol(run: CurveRun) -> dict[str, Any]:
    """The protocol in words, as a table, and the items that were left out by reason."""
    protocol = run.protocol
    items = ("ranked_on", "evaluated_on", "wrong", "dropped")
    rows = []
    for name, value in protocol.items():
        if name in ("notes", "refused"):
            continue
        shown = f"{len(value)} prompts" if name in items else str(value)
        rows.append([name.replace("_", " "), visible(shown)])
    left = [["the whole model is wrong", len(protocol["wrong"]), _listed(protocol["wrong"])]]
    left.append([f"effect below {protocol['min_effect']:g}", len(protocol["dropped"]), _listed(protocol["dropped"])])
    left += [[visible(reason), count, "–"] for reason, count in protocol["refused"].items()]
    return {
        "name": visible(run.name),
        "words": [visible(words) for words in protocol_words(protocol)],
        "rows": rows,
        "left": [row for row in left if row[1]],
    }


def _listed(items: Sequence[int]) -> str:
    return ", ".join(map(str, items)) or "–"
