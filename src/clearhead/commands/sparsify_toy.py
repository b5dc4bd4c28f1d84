"""`clearhead sparsify toy`: trains the addition toy for every seed, beside its controls, and tests what it reads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from clearhead.commands.printing.table import say, show
from clearhead.config import SparsifyToy
from clearhead.configfile import refuse_other_run
from clearhead.runs import RunDirectory
from clearhead.sparsify.addition import BATCH, DENSE_BATCH, build_model, train_dense, train_sparse
from clearhead.sparsify.addition_study import Study, study
from clearhead.view.addition_page import write_addition_page

IMMATERIAL = ("out", "seeds", "threads")
CURVES = ("edge_share", "accuracy")


def plan(config: SparsifyToy) -> dict[str, Any]:
    """What will be trained."""
    return {
        "parameters": build_model(config, config.seed).num_parameters(),
        "edges per sum, all open": config.layers * config.heads * 36,
        "seeds": config.seeds,
        "dense training": f"{config.dense_steps:,} steps of {DENSE_BATCH} sums",
        "sparse training": f"{config.steps:,} steps of {BATCH} sums",
        "control with random gates": f"{config.steps:,} steps, first seed",
        "directory": config.directory(),
    }


def run(config: SparsifyToy) -> None:
    """Train, write the run directory and its page, print the tables."""
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        _run(config.resolved())
    finally:
        torch.set_num_threads(before)


def _run(config: SparsifyToy) -> None:
    out = config.directory()
    refuse_other_run(out, config, IMMATERIAL)
    with RunDirectory(out) as directory:
        directory.write_config(config.to_dict())
        studies = []
        for seed in range(config.seed, config.seed + config.seeds):
            folder = out / f"seed-{seed}"
            train_dense(config, seed, folder / "dense")
            train_sparse(config, seed, folder / "dense", folder / "sparse")
            if seed == config.seed:
                train_sparse(config, seed, folder / "dense", folder / "random", like=folder / "sparse")
            studies.append(study(folder, seed))
            _print(studies[-1])
        directory.write_summary(summarise(studies))
        about = {
            "model": "Addition of numbers below 100",
            "task": f"{config.layers} layers of {config.heads} heads, {config.width} dimensions",
            "config": config.to_dict(),
        }
        curves = [read_curves(out / f"seed-{found.seed}" / "sparse") for found in studies]
        page = write_addition_page(out / "page.html", studies, curves, about)
    show(_across(studies), f"all {len(studies)} seeds:" if len(studies) > 1 else "this seed:")
    say(f"page: {page}; numbers: {out / 'summary.json'}; models: {out}/seed-*/{{dense,sparse}}/model")


def summarise(studies: Sequence[Study]) -> dict[str, Any]:
    """The final numbers under stable keys, and the worst of all seeds."""
    return {
        "seeds": [found.numbers for found in studies],
        "largest_edge_share": max(found.numbers["sparse"]["edge_share"] for found in studies),
        "lowest_exact_match": min(found.numbers["sparse"]["exact_match"] for found in studies),
        "statements_held": sum(claim["held"] for found in studies for claim in found.numbers["statements"]),
        "statements": sum(len(found.numbers["statements"]) for found in studies),
    }


def read_curves(folder: Path) -> dict[str, list[float]]:
    """Open edges and accuracy over the steps of a sparse training, where they were measured."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    measured = [line for line in lines if "edge_share" in line]
    return {name: [line[name] for line in measured] for name in ("step", *CURVES)}


def _across(studies: Sequence[Study]) -> dict[str, Any]:
    numbers = [found.numbers for found in studies]
    return {
        "open edges": [_percent(found["sparse"]["edge_share"]) for found in numbers],
        "open edges per sum": [f"{found['sparse']['edges_per_sum']:.1f}" for found in numbers],
        "accuracy, sparse": [_percent(found["sparse"]["exact_match"]) for found in numbers],
        "accuracy, dense": [_percent(found["dense"]["exact_match"]) for found in numbers],
        "the same weights, random edges": [_percent(found["random"]["same_weights"]["mean"]) for found in numbers],
        "statements held": [
            f"{sum(claim['held'] for claim in found['statements'])} of {len(found['statements'])}" for found in numbers
        ],
        "CPU seconds, dense and sparse": [
            f"{found['dense']['cpu_seconds'] + found['sparse']['cpu_seconds']:.0f}" for found in numbers
        ],
    }


def _print(found: Study) -> None:
    """What one seed reached, and what its edges read."""
    numbers = found.numbers
    sparse = numbers["sparse"]
    right, share, edges = _percent(sparse["exact_match"]), _percent(sparse["edge_share"]), sparse["edges_per_sum"]
    say(f"seed {found.seed}: {right} of held-out sums right, {share} of edges open, {edges:.1f} per sum")
    if not sparse["within"]:
        say("  no state reached the accuracy asked for on training sums; the best one was kept. Give more --steps")
    trained = numbers["random"]["trained"]
    if trained is not None:
        say(f"  trained with as many random edges: {_percent(trained['exact_match'])} right")
    for claim in numbers["statements"]:
        say(f"  {'held' if claim['held'] else 'not held'}: {claim['statement']} ({spell_numbers(claim['numbers'])})")
    say("  closed edges, all heads:   accuracy without a carry, with one")
    for row in numbers["classes"]:
        if row["exact_match"] < sparse["exact_match"] - 0.01:
            edge = f"layer {row['layer']}: {row['query']} reads {row['key']}"
            say(f"    {edge:<26} {_percent(row['no_carry']):>8} {_percent(row['carry']):>8}")


def spell_numbers(numbers: dict[str, float | None]) -> str:
    """Names and shares in words."""
    return ", ".join(
        f"{name.replace('_', ' ')}: {'–' if value is None else _percent(value)}" for name, value in numbers.items()
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share < 0.1 else f"{100 * share:.1f} %"
