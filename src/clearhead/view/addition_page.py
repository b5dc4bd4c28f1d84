"""The page of the addition toy: which token reads which, with and without a carry, and what breaks without it.

The frame is that of every page (`view.shell`); the list holds the heads of all seeds, and a seed has a summary of its
own under its address (`#seed.1`). Maps and wiring are drawn by assets/addition.js, charts are `view.addition_figures`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.sparsify.addition_edges import INPUTS
from clearhead.sparsify.addition_reading import CHANGES
from clearhead.sparsify.addition_study import PAIRS, Study
from clearhead.view import addition_figures as figures
from clearhead.view.packing import brief, pack
from clearhead.view.shell import Contents, render, write_within
from clearhead.view.summary import plotly_json

HELP: dict[str, str] = {
    "edge_share": "Open edges under hard gates, of all visible pairs; mean over layers, heads and held-out sums.",
    "edges_per_sum": "Open edges of all layers and heads in one sum.",
    "exact_match": "Held-out sums with all three digits right, each given the right digits before it.",
    "carry": "The same over sums whose units carry into the tens, and over those whose units do not.",
    "dense": "The model before it was made sparse, all edges open.",
    "same_weights": "The sparse model's weights with edges open by lot, as many in each head: mean of 20 draws.",
    "trained": "The dense model trained again, as long, with edges open by lot, as many in each head; one draw.",
    "wiring": (
        "An edge runs from the token that is read, in the layer below, to the token that reads it. Width and opacity: "
        "share of sums in which at least one head opens it; below 2 % it is left out. Colour: which pair is read."
    ),
    "map": (
        "Rows read, columns are read. Darkness is the share of sums in which the edge is open, among those without and "
        "with a carry from the units into the tens."
    ),
    "dense_map": "Mean attention of the same head of the dense model, before its edges were closed.",
    "reading": (
        "The place that predicts a digit, and where it reads the pairs of digits: at their own places, or the units "
        "wherever they can have been gathered (all earlier places but a₁ and b₁). Other sums: the place reads there "
        "from another sum instead, and its prediction follows (becomes the other sum's digit, where that is another) "
        "or stays (where it is the same)."
    ),
    "by_layer": "Open edges from this place to those it reads, in one sum, over all heads: layer and number.",
    "opens": "Share of sums in which at least one of these edges is open, without and with a carry from the units.",
    "closed": "Accuracy of this digit with these edges closed, without and with a carry from the units.",
    "explained": "Share of the variance of what is received through these edges that the carry from the units makes.",
    "tens": "Another tens pair with another c₁ and the same c₂; for c₂ another c₂.",
    "units, same carry": "Another units pair with another c₀ and the same carry.",
    "units, other carry": "Another units pair with the other carry; for c₁ only sums whose tens do not add up to 9.",
    "classes": (
        "Accuracy with all edges of one kind closed, in all heads of the layer, by digit and by carry. Edges that are "
        "never open are left out: closing them changes nothing."
    ),
    "per_sum": "Open edges of this kind in one sum, over all heads.",
    "kinds": "Where carries occur: from the units into the tens, from there into the hundreds, through a 9 between.",
    "without": "Accuracy with all edges of this head closed.",
    "edges_over_steps": "Hard gates, on training sums. The sparsest state that is right enough is kept.",
    "errors_over_steps": "Hard gates, on training sums. Closing an edge that was needed shows as a spike.",
    "held": "All numbers of the statement are at least 95 %.",
}


def write_addition_page(
    out: str | Path, studies: Sequence[Study], curves: Sequence[Mapping[str, Sequence[float]]], about: Mapping[str, Any]
) -> Path:
    """Write the page of these seeds and return its path.

    `curves`: for each seed `step`, `edge_share` and `accuracy` over its sparse training. `about` says where the numbers
    come from; its `model` is the title. Raises `ClearheadError` when the disk is full.
    """
    contents = Contents(
        index={
            "vocab": [],
            "help": HELP,
            "title": str(about["model"]),
            "places": list(INPUTS),
            "changes": list(CHANGES),
            "visible": PAIRS * studies[0].edges.shape[1] * studies[0].edges.shape[2],
            "seeds": [_numbers(study) for study in studies],
            "heads": _heads(studies),
            "charts": _charts(studies, curves),
        },
        parts={"maps": [pack(_maps(study)) for study in studies]},
        scripts=("addition.js",),
        styles=("toy.css", "addition.css"),
        items="Heads",
    )
    return write_within(Path(out), [render(contents, about)], 25.0, "with all its heads")


def _numbers(study: Study) -> dict[str, Any]:
    """What the summary of a seed shows besides maps."""
    kept = ("seed", "accuracy", "by_kind_of_carry", "statements", "reading", "classes", "random", "dense")
    sparse = {name: value for name, value in study.numbers["sparse"].items() if name != "edges_by_head"}
    return _brief({name: study.numbers[name] for name in kept} | {"sparse": sparse})


def _heads(studies: Sequence[Study]) -> dict[str, list[Any]]:
    """Columns of the list: every head of every seed."""
    columns: dict[str, list[Any]] = {
        name: []
        for name in ("id", "study", "seed", "layer", "head", "per_sum", "no_carry", "carry", "apart", "without")
    }
    for place, study in enumerate(studies):
        for row in study.numbers["heads"]:
            values = {
                "id": f"head.{study.seed}.{row['layer']}.{row['head']}",
                "study": place,
                "seed": study.seed,
                "layer": row["layer"],
                "head": row["head"],
                "per_sum": brief(row["per_sum"]),
                "no_carry": brief(row["per_sum_no_carry"]),
                "carry": brief(row["per_sum_carry"]),
                "apart": brief(abs(row["per_sum_carry"] - row["per_sum_no_carry"])),
                "without": brief(row["exact_match"]),
            }
            for name, value in values.items():
                columns[name].append(value)
    return columns


def _maps(study: Study) -> dict[str, Any]:
    return {
        "edges": _rounded(study.edges),
        "any_head": _rounded(study.any_head),
        "dense": _rounded(study.dense),
    }


def _charts(studies: Sequence[Study], curves: Sequence[Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    seeds = [study.seed for study in studies]
    edges = {seed: (own["step"], own["edge_share"]) for seed, own in zip(seeds, curves, strict=True)}
    right = {seed: (own["step"], own["accuracy"]) for seed, own in zip(seeds, curves, strict=True)}
    built = [
        ("edges_over_steps", "Open edges over training", figures.edges_over_steps(edges)),
        ("errors_over_steps", "Wrong sums over training", figures.errors_over_steps(right)),
    ]
    return [{"name": name, "title": title, "help": HELP[name], **plotly_json(figure)} for name, title, figure in built]


def _brief(value: Any) -> Any:
    """The same JSON with four significant digits."""
    if isinstance(value, dict):
        return {name: _brief(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_brief(part) for part in value]
    return brief(value) if isinstance(value, float) else value


def _rounded(values: Tensor) -> list[Any]:
    return values.double().mul(1e4).round().div(1e4).tolist()
