"""What `clearhead fidelity` says: fits, the comparison over layers, tables in words, and its page."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clearhead.analysis.fidelity.across import compare_layers
from clearhead.analysis.fidelity.scaling import SIZES, fit_power
from clearhead.commands.printing.table import say, show_columns
from clearhead.config import Fidelity
from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.runs import read_json
from clearhead.view.fidelity_page import write_fidelity_page

Numbers = dict[str, Any]
SUMMARY = "summary.json"
NEEDED = ("runs", "layers", "across", "fits", "model", "tokens")
AXES = {"parameters": "k", "k": "parameters"}
"""Over what FVU is fitted, and what is held besides kind, layer, initialisation and tokens."""
LABELS = {"sae": "SAE", "transcoder": "transcoder", "reference": "reference init", "seed": "other seed"}
COMPARED = tuple(LABELS)


def fvu_of(row: Numbers) -> float:
    """FVU without massive tokens, one of which would outweigh thousands of others."""
    return row.get("fvu_ordinary", row["fvu"])


def across_layers(rows: Sequence[Numbers], layers: Sequence[Numbers], seed: int) -> Numbers:
    """FVU of each layer's Lorsa against every partner of equal budget, over layers; None where there is no pair."""
    by_name = {row["run"]: row for row in rows}
    found: Numbers = {}
    for name in COMPARED:
        pairs = [
            (fvu_of(by_name[layer["main"]]), fvu_of(by_name[partner["run"]]))
            for layer in layers
            if (partner := layer["compared"][name]) is not None and partner["equal"]
        ]
        found[name] = compare_layers(*zip(*pairs, strict=True), seed=seed) if pairs else None
    return found


def fits_of(rows: Sequence[Numbers]) -> list[Numbers]:
    """A fit, or why there is none, for every series of runs that differ in size or in active units alone."""
    fits = []
    for axis, held in AXES.items():
        series: dict[tuple[Any, ...], list[Numbers]] = {}
        for row in rows:
            key = tuple(row[name] for name in ("kind", "layer", "init", "trained_tokens", held))
            series.setdefault(key, []).append(row)
        for key, points in series.items():
            xs, ys = [float(row[axis]) for row in points], [fvu_of(row) for row in points]
            if len(set(xs)) < 2:
                continue
            entry: Numbers = dict(zip(("kind", "layer", "init", "trained_tokens", held), key, strict=True))
            entry |= {"over": axis, "points": sorted(zip(xs, ys, strict=True)), "fit": None, "refused": None}
            try:
                fit = fit_power(xs, ys)
                entry["fit"] = dataclasses.asdict(fit) | {"degrees": fit.degrees}
            except ClearheadError as reason:
                entry["refused"] = str(reason)
            fits.append(entry)
    return fits


def print_report(report: Numbers) -> None:
    """The tables of the report, on stdout."""
    rows = {row["run"]: row for row in report["runs"]}
    say(f"{report['model']}: {report['tokens']:,} {report['split']} tokens of {report['text']}")
    _print_runs(report["runs"])
    if report["layers"]:
        _print_layers(report["layers"], rows)
        _print_errors(report["layers"])
    for name, found in report["across"].items():
        if found is not None:
            say(_across_words(name, found))
    _print_fits(report["fits"])


def _print_runs(runs: Sequence[Numbers]) -> None:
    lines = [("run", "units", "parameters", "K", "tokens", "FVU", "ordinary", "L0", "dead")]
    for row in runs:
        lines.append(
            (
                row["run"],
                f"{row['units']:,}",
                f"{row['parameters']:,}",
                f"{row['k']}",
                f"{row['trained_tokens']:,}",
                f"{row['fvu']:.4f}",
                _fixed(row.get("fvu_ordinary"), 4),
                f"{row['l0']:.1f}",
                f"{100 * row['dead_share']:.1f} %",
            )
        )
    show_columns(lines)


def _print_layers(layers: Sequence[Numbers], rows: dict[str, Numbers]) -> None:
    say("FVU by layer, massive tokens left out; * where budgets differ")
    lines = [("layer", "Lorsa", *LABELS.values())]
    for layer in layers:
        cells = []
        for name in COMPARED:
            partner = layer["compared"][name]
            cells.append("–" if partner is None else _starred(fvu_of(rows[partner["run"]]), partner["equal"]))
        lines.append((str(layer["layer"]), f"{fvu_of(rows[layer['main']]):.4f}", *cells))
    show_columns(lines)


def _print_errors(layers: Sequence[Numbers]) -> None:
    say("the Lorsa's error against the SAE's, and what predicts it")
    columns: list[tuple[str, Callable[[Numbers], float | None]]] = [
        ("corr.", lambda one: _with_partner(one, "correlation")),
        ("rel. rank corr.", lambda one: _with_partner(one, "relative_rank_correlation")),
        ("cosine", lambda one: _with_partner(one, "cosine")),
        ("shuffled", lambda one: _with_partner(one, "shuffled_cosine")),
        ("R² of input", lambda one: one["r2_from_input"]),
        ("R² of SAE error", lambda one: one["r2_from_partner"]),
        ("inside heads", lambda one: one["heads"][one["main"]]["inside"]),
        ("other token's", lambda one: one["heads"][one["main"]]["inside_other"]),
    ]
    lines = [("layer", *(label for label, _ in columns))]
    for layer in layers:
        lines.append((str(layer["layer"]), *(_fixed(read(layer), 3) for _, read in columns)))
    show_columns(lines)
    for layer in layers if len(layers) <= 3 else ():
        others = {entry["run"]: entry for entry in layer["overlap"]}
        for name, partner in layer["compared"].items():
            if partner is not None:
                overlap = others[partner["run"]]
                say(
                    f"  layer {layer['layer']}, errors of {layer['main']} and {partner['run']} ({LABELS[name]}): "
                    f"correlation {_fixed(overlap['correlation'], 3)}, cosine {overlap['cosine']:.3f}, "
                    f"shuffled {overlap['shuffled_cosine']:.3f}"
                )


def _print_fits(fits: Sequence[Numbers]) -> None:
    """A sentence for each series with enough sizes, and one for the rest."""
    few = [entry for entry in fits if len({x for x, _ in entry["points"]}) < SIZES]
    for entry in fits:
        if entry not in few:
            say(fit_words(entry))
    if few:
        say(f"no fit for {len(few)} series of two sizes; {SIZES} carry one")


def _with_partner(layer: Numbers, number: str) -> float | None:
    """A number of the overlap with the layer's SAE; None without one."""
    return next((entry[number] for entry in layer["overlap"] if entry["run"] == layer["partner"]), None)


def _across_words(name: str, found: Numbers) -> str:
    words = f"{LABELS[name]}, {found['layers']} layers of equal budget: FVU ratio {found['ratio']:.3f}"
    if found["ratio_interval"] is not None:
        words += " ({:.3f} to {:.3f})".format(*found["ratio_interval"])
    words += f", Lorsa's is lower at {found['lower']}"
    if found["rank_correlation"] is None:
        return words + "; too few layers for a rank correlation"
    words += f"; rank correlation {found['rank_correlation']:.3f}"
    interval = found["rank_correlation_interval"]
    return words if interval is None else words + " ({:.3f} to {:.3f})".format(*interval)


def fit_words(entry: Numbers) -> str:
    """One series in a sentence."""
    held = AXES[entry["over"]]
    init = f", {entry['init']}" if entry["init"] else ""
    series = f"{entry['kind']} of layer {entry['layer']}{init}, {held} {entry[held]:,}, over {entry['over']}"
    if entry["fit"] is None:
        return f"{series}: no fit, {entry['refused']}"
    fit = entry["fit"]
    known = f"rms {fit['rms']:.4f}" if fit["degrees"] > 0 else "as many parameters as points, so its error is not known"
    return f"{series}: FVU = {fit['a']:.3g} N^-{fit['b']:.3f} + {fit['c']:.3f}, {known}"


def is_report(run: Path) -> bool:
    """Whether a directory is of `clearhead fidelity`."""
    if not (run / "config.json").exists():
        return False
    config = read_json(run / "config.json")
    return isinstance(config, dict) and config.get("verb") == Fidelity.verb


def report_of(run: Path) -> Numbers:
    """The numbers of a report; raises `ClearheadError` where it is not finished, `CorruptFileError` where damaged."""
    if not (run / SUMMARY).exists():
        raise ClearheadError(f"{run} is not finished; type: clearhead fidelity --from {run} --out {run}")
    report = read_json(run / SUMMARY)
    missing = [name for name in NEEDED if name not in report]
    if missing:
        raise CorruptFileError(f"{run / SUMMARY} lacks {', '.join(missing)}; measure again")
    return report


def write_page(run: Path, page: Path) -> Path:
    """The page of a report; returns its path."""
    return write_fidelity_page(page, report_of(run))


def _fixed(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _starred(value: float, equal: bool) -> str:
    return f"{value:.4f}" + ("" if equal else "*")
