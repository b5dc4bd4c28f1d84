"""All that is known of one seed of the addition toy: its models, what their open edges read, and its controls.

Everything is measured on the held-out sums, which decided nothing in the training. The accuracies and edges of the
whole are those of the fused operation, the others of the softmax laid out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.data.addition import Addition, addition
from clearhead.model.access import Model
from clearhead.runs import read_json
from clearhead.sparsify.addition_edges import (
    INPUTS,
    accuracies,
    by_carry,
    by_kind_of_carry,
    close_classes,
    close_heads,
    mean_patterns,
    open_edges,
    predict,
    random_gates,
    random_share,
)
from clearhead.sparsify.addition_reading import conclude, measure_reading

PAIRS = len(INPUTS) * (len(INPUTS) + 1) // 2
"""Visible pairs of one head."""


@dataclass(frozen=True)
class Study:
    """One seed."""

    seed: int
    numbers: dict[str, Any]
    """Everything that is no map, as JSON values."""
    edges: Float[Tensor, "2 l h q k"]
    """How often each edge is open, without and with a carry from the units into the tens."""
    any_head: Float[Tensor, "2 l q k"]
    """How often it is in any head."""
    dense: Float[Tensor, "l h q k"]
    """Mean attention of the dense model."""


def study(folder: Path, seed: int) -> Study:
    """Studies the finished models of a seed: `dense`, `sparse` and, where there is one, `random` in `folder`."""
    held = [name for name in ("dense", "sparse", "random") if (folder / name / "summary.json").exists()]
    models = {name: Model.load(str(folder / name / "model")) for name in held}
    summaries = {name: read_json(folder / name / "summary.json") for name in held}
    return examine(models, summaries, addition("held_out", seed), seed)


def examine(models: Mapping[str, Model], summaries: Mapping[str, dict[str, Any]], sums: Addition, seed: int) -> Study:
    """Studies models on these sums; `models` and `summaries` by name, `dense`, `sparse` and perhaps `random`."""
    model, summary = models["sparse"], summaries["sparse"]
    opened = open_edges(model, sums)
    rows = measure_reading(model, sums, opened)
    shares = {int(layer): torch.tensor(row) for layer, row in summary["edges_by_head"].items()}
    same_weights = random_gates(model, sums, torch.stack([*shares.values()]))
    trained = None
    if "random" in models:
        trained = summaries["random"] | {"edge_share": random_share(models["random"], sums, shares)}
    n_heads = opened.shape[1] * opened.shape[2]
    numbers = {
        "seed": seed,
        "dense": summaries["dense"],
        "sparse": summary | {"edges_per_sum": summary["edge_share"] * PAIRS * n_heads},
        "accuracy": accuracies(predict(model, sums), sums),
        "by_kind_of_carry": by_kind_of_carry(predict(model, sums), sums),
        "statements": conclude(rows),
        "reading": rows,
        "classes": close_classes(model, sums, opened),
        "heads": close_heads(model, sums, opened),
        "random": {"same_weights": same_weights, "trained": trained},
    }
    return Study(seed, numbers, *by_carry(opened, sums), mean_patterns(models["dense"], sums))
