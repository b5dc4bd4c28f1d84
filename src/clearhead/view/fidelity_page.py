"""The page of a fidelity report: FVU by layer and by size, what Lorsa and SAE both miss, and what a run's error holds.

The frame is that of every page (`view.shell`); the list holds the runs, and a run that errors were compared for has its
heads, positions, classes and tokens on a view of its own. Charts are `view.fidelity_figures`, sentences
`view.fidelity_words`. No model is needed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from clearhead.view import fidelity_figures as figures
from clearhead.view.fidelity_words import HELP, LABELS, sentences
from clearhead.view.figures import error_by_position
from clearhead.view.packing import brief, pack
from clearhead.view.shell import Contents, render, write_within
from clearhead.view.summary import plotly_json
from clearhead.view.visible import visible

Numbers = Mapping[str, Any]
FITTED = 3
"""Different sizes from which a series is listed among the fits; fewer are in the charts alone."""
COLUMNS = ("kind", "layer", "units", "parameters", "k", "init", "seed", "trained_tokens")
MEASURED = ("fvu", "explained_variance", "l0", "dead_share")
OVERLAP = {
    "correlation of ‖e‖²": "correlation",
    "cosine": "cosine",
    "cosine, shuffled": "shuffled_cosine",
}


def write_fidelity_page(out: Path, report: Numbers) -> Path:
    """Write the page of a report (`summary.json` of `clearhead fidelity`) and return its path.

    Raises `ClearheadError` when the disk is full.
    """
    rows = {row["run"]: row for row in report["runs"]}
    layers = report["layers"]
    contents = Contents(
        index={
            "vocab": [],
            "help": HELP,
            "labels": LABELS,
            "title": visible(f"{report['model']}: how faithful the decompositions are"),
            "verdict": [visible(sentence) for sentence in sentences(report, rows)],
            "runs": _columns(report["runs"], layers),
            "charts": [_chart(*built) for built in _summary_charts(report, rows)],
            "layers": [_layer(layer, rows) for layer in layers],
            "across": [[LABELS[name], *_across(found)] for name, found in report["across"].items() if found],
            "fits": [_fit(entry) for entry in report["fits"] if len({x for x, _ in entry["points"]}) >= FITTED],
            "left_out": [[visible(path), visible(reason)] for path, reason in report["left_out"]],
        },
        parts={"runs": [pack(_details(row, layers)) for row in report["runs"]]},
        scripts=("fidelity.js",),
        styles=("toy.css", "sparse.css", "fidelity.css"),
        items="Runs",
    )
    about = {
        "model": report["model"],
        "task": f"fidelity of {len(rows)} runs, {report['split'].replace('_', '-')} text",
        **{name: report[name] for name in ("model_note", "text", "text_sha256", "split", "context", "tokens")},
    }
    return write_within(out, [render(contents, about)], 25.0, "with all its runs")


def fvu_of(row: Numbers) -> float:
    """FVU without massive tokens where there are any, as the report compares it."""
    return row.get("fvu_ordinary", row["fvu"])


def _chart(name: str, title: str, figure: go.Figure) -> dict[str, Any]:
    return {"name": name, "title": title, "help": HELP[name], **plotly_json(figure)}


def _summary_charts(report: Numbers, rows: Mapping[str, Numbers]) -> list[tuple[str, str, go.Figure]]:
    layers = report["layers"]
    built = []
    if layers:
        built.append(("by_layer", "FVU by layer", figures.by_layer(_by_kind(layers, rows))))
    paired = [layer for layer in layers if layer["partner"] is not None]
    if paired:
        own = [next(entry for entry in layer["overlap"] if entry["run"] == layer["partner"]) for layer in paired]
        measures = {label: [entry[name] for entry in own] for label, name in OVERLAP.items()}
        measures["R², SAE’s error"] = [layer["r2_from_partner"] for layer in paired]
        measures["R², input"] = [layer["r2_from_input"] for layer in paired]
        chart = figures.overlap([layer["layer"] for layer in paired], measures)
        built.append(("overlap", "What Lorsa and SAE both miss", chart))
    for over, held in (("parameters", "k"), ("k", "parameters")):
        entries = [entry for entry in report["fits"] if entry["over"] == over]
        if entries:
            title = "FVU by size" if over == "parameters" else "FVU by active units"
            built.append((over, title, figures.scaling(entries, over, held)))
    return built


def _by_kind(layers: Sequence[Numbers], rows: Mapping[str, Numbers]) -> dict[str, tuple[str, list[figures.LayerPoint]]]:
    own = [figures.LayerPoint(layer["layer"], fvu_of(rows[layer["main"]]), layer["main"], True) for layer in layers]
    series = {"lorsa": (LABELS["lorsa"], own)}
    for name in ("sae", "transcoder", "reference"):
        partners = [(layer["layer"], layer["compared"][name]) for layer in layers]
        points = [
            figures.LayerPoint(layer, fvu_of(rows[partner["run"]]), partner["run"], partner["equal"])
            for layer, partner in partners
            if partner is not None
        ]
        if points:
            series[name] = (LABELS[name], points)
    return series


def _columns(runs: Sequence[Numbers], layers: Sequence[Numbers]) -> dict[str, list[Any]]:
    opened = {name for layer in layers for name in layer["by_token"]}
    columns: dict[str, list[Any]] = {"id": [f"run.{place}" for place in range(len(runs))]}
    columns["run"] = [visible(row["run"]) for row in runs]
    columns["opened"] = [row["run"] in opened for row in runs]
    columns["ordinary"] = [brief(fvu_of(row)) for row in runs]
    for name in COLUMNS:
        columns[name] = [row[name] for row in runs]
    for name in MEASURED:
        columns[name] = [brief(row[name]) for row in runs]
    return columns


def _layer(layer: Numbers, rows: Mapping[str, Numbers]) -> dict[str, Any]:
    """A line of the tables of layers."""
    partner = next((entry for entry in layer["overlap"] if entry["run"] == layer["partner"]), None)
    compared = {
        name: None if found is None else [brief(fvu_of(rows[found["run"]])), found["equal"]]
        for name, found in layer["compared"].items()
    }
    own = layer["heads"][layer["main"]]
    overlap = ("correlation", "relative_rank_correlation", "cosine", "shuffled_cosine")
    return {
        "layer": layer["layer"],
        "fvu": brief(fvu_of(rows[layer["main"]])),
        "compared": compared,
        **{name: None if partner is None else brief(partner[name]) for name in overlap},
        "r2_input": brief(layer["r2_from_input"]),
        "r2_partner": brief(layer["r2_from_partner"]),
        "inside": brief(own["inside"]),
        "inside_other": brief(own["inside_other"]),
        "massive": layer["massive_tokens"],
        "massive_share": brief(layer["massive_share_of_error"][layer["main"]]),
    }


def _across(found: Numbers) -> list[Any]:
    def ends(interval: Sequence[float] | None) -> list[float | None] | None:
        return None if interval is None else [brief(end) for end in interval]

    return [
        found["layers"],
        found["lower"],
        brief(found["ratio"]),
        ends(found["ratio_interval"]),
        brief(found["rank_correlation"]),
        ends(found["rank_correlation_interval"]),
    ]


def _fit(entry: Numbers) -> list[Any]:
    held = "k" if entry["over"] == "parameters" else "parameters"
    init = f", {entry['init']}" if entry["init"] else ""
    series = f"{LABELS[entry['kind']]}, layer {entry['layer']}{init}, {figures.held_words(held, entry[held])}"
    over = "parameters" if entry["over"] == "parameters" else "K"
    fit = entry["fit"]
    if fit is None:
        return [visible(series), over, None, None, None, visible(entry["refused"])]
    known = f"rms {fit['rms']:.4f}" if fit["degrees"] > 0 else "as many points as parameters: error not known"
    if fit["left_out"] is not None:
        known += f"; a point left out is missed by up to {fit['left_out']:.4f}"
    return [visible(series), over, brief(fit["a"]), brief(fit["b"]), brief(fit["c"]), known]


def _details(row: Numbers, layers: Sequence[Numbers]) -> dict[str, Any]:
    """What the view of one run shows beside its numbers."""
    name, kind = row["run"], row["kind"]
    errors = dict(enumerate(row["relative_error_by_position"]))
    charts = [("positions", "Relative error by position", error_by_position({at: e for at, e in errors.items() if at}))]
    tables: dict[str, Any] = {}
    layer = next((layer for layer in layers if name in layer["by_token"]), None)
    overlap = next((one["overlap"] for one in layers if one["main"] == name), [])
    if layer is not None:
        heads, tokens = layer["heads"], layer["by_token"][name]
        charts.append(
            ("heads", "By original head", figures.head_shares(heads["output_share"], heads[name]["error_share"], kind))
        )
        charts.append(("classes", "By class of token", figures.class_shares(tokens["classes"], kind)))
        tables = {table: [_token_row(line) for line in tokens[table]] for table in tokens}
    return {
        "charts": [_chart(*built) for built in charts],
        "tables": tables,
        "overlap": [
            [visible(entry["run"]), *(brief(entry[name]) for name in ("correlation", "relative_rank_correlation"))]
            + [
                brief(entry["cosine"]),
                [brief(end) for end in entry["cosine_interval"]],
                brief(entry["shuffled_cosine"]),
            ]
            for entry in overlap
        ],
        "heads": None
        if layer is None
        else [
            [brief(value) for value in values]
            for values in zip(
                layer["heads"]["output_share"],
                layer["heads"][name]["error_share"],
                layer["heads"][name]["unexplained"],
                strict=True,
            )
        ],
    }


def _token_row(line: Numbers) -> list[Any]:
    shares = (brief(line[name]) for name in ("share_of_tokens", "share_of_error", "relative_error"))
    return [visible(line["name"]), line["tokens"], *shares]
