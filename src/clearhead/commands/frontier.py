"""`clearhead frontier`: open edges against the rise of the loss, over evaluated sparse runs and their controls.

Numbers are those of each run's evaluation.json; nothing is measured here. Runs are compared only where they were
evaluated on the same blocks of the same text, from the same base.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clearhead.commands.printing.sparse_report import evaluation_of, is_sparse_run
from clearhead.commands.printing.table import say, show_columns
from clearhead.config import Frontier
from clearhead.errors import ClearheadError
from clearhead.runs import environment, read_json, write_json
from clearhead.view.sparse_frontier import Point, write_frontier_page

Numbers = dict[str, Any]
SAME = ("base", "context", "tokens", "text", "text_sha256", "split")
"""What all evaluations must agree on."""
ORACLES = ("top_in_row_base", "top_probability_base")
"""Of the controls of an evaluation, those that choose the best edges of the untrained base."""


def plan(config: Frontier) -> Numbers:
    """Which runs are compared, and where the page goes."""
    found = [read_evaluation(run) for run in config.runs]
    refuse_unlike(config.runs, found)
    kinds = [evaluation["training"]["control"] for evaluation in found]
    return {
        **{key: found[0][key] for key in SAME},
        "sparse runs": kinds.count("none"),
        "controls": len(kinds) - kinds.count("none"),
        "page": config.out,
        "numbers": numbers_of(config),
    }


def run(config: Frontier) -> None:
    """Print the table, write page and numbers."""
    found = [read_evaluation(run) for run in config.runs]
    refuse_unlike(config.runs, found)
    points = [point_of(run, evaluation) for run, evaluation in zip(config.runs, found, strict=True)]
    points.sort(
        key=lambda point: (point.kind != "none", point.kind, point.tolerance or 0.0, point.seed or 0, point.run)
    )
    shared = {key: found[0][key] for key in SAME}
    numbers = shared | {"runs": [point._asdict() for point in points]}
    write_json(numbers_of(config), numbers | {"config": config.to_dict(), "environment": environment()})
    text = f"{shared['tokens']:,} tokens of {shared['text']}, context {shared['context']}"
    say(f"{len(points)} runs from {shared['base']}, measured on {text}")
    print_table(points)
    page = write_frontier_page(config.out, points, shared)
    say(f"page: {page}; numbers: {numbers_of(config)}")


def numbers_of(config: Frontier) -> Path:
    """The file of the numbers, beside the page."""
    return config.out.with_suffix(".json")


def read_evaluation(run: Path) -> Numbers:
    """The evaluation of a run. Raises `ClearheadError` where there is none."""
    if not is_sparse_run(run):
        raise ClearheadError(f"{run} is no run of `clearhead sparsify`; give directories that it wrote")
    evaluation = read_json(evaluation_of(run))
    if evaluation["base"] is None:
        raise ClearheadError(f"{run} was evaluated without its base, so the rise of its loss is not known")
    return evaluation


def refuse_unlike(runs: Sequence[Path], found: Sequence[Numbers]) -> None:
    """Raise `ClearheadError` unless there are runs, each once, that were evaluated on the same."""
    if not runs:
        raise ClearheadError("name the runs to compare: clearhead frontier RUN RUN ...")
    for place, run in enumerate(runs):
        if run.resolve() in [other.resolve() for other in runs[:place]]:
            raise ClearheadError(f"{run} is named twice; name every run once")
    for run, evaluation in zip(runs, found, strict=True):
        unlike = [f"{key} {evaluation[key]}, not {found[0][key]}" for key in SAME if evaluation[key] != found[0][key]]
        if unlike:
            raise ClearheadError(
                f"{run} cannot be compared with {runs[0]}: it was evaluated with {'; '.join(unlike)}. Runs of one base "
                "and context can, evaluated alike: clearhead evaluate RUN with the same --text, --split and --tokens"
            )
    if all(evaluation["training"]["control"] != "none" for evaluation in found):
        raise ClearheadError("all of these are controls; name at least one sparse run")


def point_of(run: Path, evaluation: Numbers) -> Point:
    """A run as a point, with what the oracles lose at its edges."""
    training, ce, edges = evaluation["training"], evaluation["ce"], evaluation["edges"]
    sparse = training["control"] == "none"
    controls = evaluation["controls"] if sparse else {}
    return Point(
        run=run.name,
        kind=training["control"],
        tolerance=training["tolerance"],
        seed=training["seed"],
        trained_tokens=training["tokens"],
        per_query=edges["per_query"],
        share=edges["share"],
        rise=ce["hard" if sparse else "control"] - ce["base"],
        sampled_rise=ce["sampled"] - ce["base"] if sparse else None,
        empty_rows=edges.get("empty_rows"),
        leak=edges.get("leak"),
        **{name: controls[name] - controls["base"] if sparse else None for name in ORACLES},
    )


def print_table(points: Sequence[Point]) -> None:
    """A line for every run."""
    head = ("run", "kind", "tolerance", "seed", "edges/query", "share", "rise", "base, top of row", "base, top of head")
    lines: list[tuple[str, ...]] = [head]
    for point in points:
        oracles = [getattr(point, name) for name in ORACLES]
        kind = "sparse" if point.kind == "none" else point.kind
        tolerance = "–" if point.tolerance is None or kind != "sparse" else f"{point.tolerance:g}"
        seed = "–" if point.seed is None else str(point.seed)
        rises = ["–" if value is None else f"{value:+.4f}" for value in (point.rise, *oracles)]
        lines.append((point.run, kind, tolerance, seed, f"{point.per_query:.2f}", f"{100 * point.share:.2f} %", *rises))
    show_columns(lines)
