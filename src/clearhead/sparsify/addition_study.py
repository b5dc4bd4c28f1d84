"""All that is known of one seed of the addition toy: its models, what their open edges read, and its controls.

Everything is measured on the held-out sums, which decided nothing in the training. The accuracies and edges of the
whole are those of the fused operation, the others of the softmax laid out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.data.addition import addition
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
    sums = addition("held_out", seed)
    summaries = {
        name: read_json(folder / name / "summary.json")
        for name in ("dense", "sparse", "random")
        if (folder / name / "summary.json").exists()
    }
    model = Model.load(str(folder / "sparse" / "model"))
    opened = open_edges(model, sums)
    predicted = predict(model, sums)
    rows = measure_reading(model, sums, opened)
    shares = {int(layer): torch.tensor(row) for layer, row in summaries["sparse"]["edges_by_head"].items()}
    random: dict[str, Any] = {"same_weights": random_gates(model, sums, torch.stack([*shares.values()]))}
    if "random" in summaries:
        control = Model.load(str(folder / "random" / "model"))
        random["trained"] = summaries["random"] | {"edge_share": random_share(control, sums, shares)}
    else:
        random["trained"] = None
    edges, any_head = by_carry(opened, sums)
    numbers = {
        "seed": seed,
        "dense": summaries["dense"],
        "sparse": summaries["sparse"]
        | {"edges_per_sum": summaries["sparse"]["edge_share"] * PAIRS * opened[0, ..., 0, 0].numel()},
        "accuracy": accuracies(predicted, sums),
        "by_kind_of_carry": by_kind_of_carry(predicted, sums),
        "statements": conclude(rows),
        "reading": rows,
        "classes": close_classes(model, sums, opened),
        "heads": close_heads(model, sums, opened),
        "random": random,
    }
    dense = mean_patterns(Model.load(str(folder / "dense" / "model")), sums)
    return Study(seed, numbers, edges, any_head, dense)
