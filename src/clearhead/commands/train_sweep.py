"""`clearhead train sweep`: trains a grid of dictionaries at equal budgets and measures all on the same held-out text.

Each training is an ordinary run directory, which `clearhead evaluate` and `clearhead analyze` take; a finished one is
not repeated. After all trainings of the grid one pass over the text measures every run; evaluation.json in its
directory and summary.json hold what `clearhead evaluate` calls by the same names.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clearhead.analysis.fidelity.errors import measure_errors
from clearhead.commands.opening.attention_runs import TrainedRun, load_candidate
from clearhead.commands.opening.structure import without_weights
from clearhead.commands.opening.training_time import MEASURED_STEPS
from clearhead.commands.printing.table import duration, say, show_columns
from clearhead.config import TrainSweep
from clearhead.configfile import refuse_other_verb
from clearhead.data.text import token_blocks
from clearhead.model.access import Model
from clearhead.runs import RunDirectory, environment, read_json, write_json
from clearhead.training.sweep import Planned, plan_sweep, train

SHOWN = ("fvu", "l0", "dead_share")


def plan(config: TrainSweep) -> dict[str, Any]:
    """Every training with its parameters, and the time of those that are not finished."""
    planned = plan_sweep(config, without_weights(config.model))
    open_ = [one for one in planned if not one.finished()]
    rows: dict[str, Any] = {}
    for one in planned:
        done = "" if one in open_ else ", finished"
        rows[one.name] = f"{one.units:,} units, {one.parameters:,} parameters{done}"
    rows |= {"tokens, each": config.tokens, "measured tokens": config.measured_tokens, "directory": config.out}
    if open_:
        rows["time of the trainings"] = f"about {duration(predicted_seconds(open_))}, from a few steps of each kind"
    return rows


def predicted_seconds(planned: Sequence[Planned]) -> float:
    """Seconds of all trainings: the largest of each kind is begun, the others take their share by parameters."""
    total = 0.0
    for kind in dict.fromkeys(one.kind for one in planned):
        own = [one for one in planned if one.kind == kind]
        largest = max(own, key=lambda one: one.parameters)
        with tempfile.TemporaryDirectory() as folder:
            changes: dict[str, Any] = {"init": "random"} if kind == "lorsa" else {}
            short = dataclasses.replace(
                largest.config,
                tokens=MEASURED_STEPS * largest.config.batch_tokens,
                store=None,
                out=Path(folder) / "steps",
                **changes,
            )
            rate = train(dataclasses.replace(largest, config=short))["tokens_per_second"]
        total += sum(one.config.tokens / rate * one.parameters / largest.parameters for one in own)
    return total


def run(config: TrainSweep) -> None:
    """Train what is not finished, measure everything, print the table."""
    refuse_other_verb(config.out, config)
    model = Model.load(config.model, dtype=config.dtype, device=config.device)
    planned = plan_sweep(config, model)
    with RunDirectory(config.out) as directory:
        directory.write_config(config.to_dict())
        for place, one in enumerate(planned, 1):
            if one.finished():
                say(f"{place} of {len(planned)}: {one.name} is finished")
            else:
                say(f"{place} of {len(planned)}: {one.name}, {one.parameters:,} parameters")
                train(one, model)
        rows = measure(config, model, planned)
        directory.write_summary(rows)
    print_table(rows["runs"])
    say(f"next: clearhead fidelity {config.out}; clearhead analyze {planned[0].directory}")


def measure(config: TrainSweep, model: Model, planned: Sequence[Planned]) -> dict[str, Any]:
    """FVU and its companions of all runs, from one pass; also written to evaluation.json of each."""
    blocks = token_blocks(
        model, config.text, split="held_out", n_tokens=config.measured_tokens, context=config.context, at_most=True
    )
    text = {
        "model_note": model.note,
        "text": blocks.source,
        "text_sha256": blocks.sha256,
        "split": "held_out",
    }
    rows = []
    for layer in dict.fromkeys(one.layer for one in planned):
        own = [one for one in planned if one.layer == layer]
        candidates = [load_candidate(TrainedRun(one.directory, one.name, one.config), model) for one in own]
        for one, metrics in zip(own, measure_errors(model, blocks, candidates)[layer].metrics(), strict=True):
            record = metrics | text | {"config": config.to_dict(), "environment": environment()}
            write_json(one.directory / "evaluation.json", record)
            rows.append(_row(one, metrics))
    return {"model": config.model, **text, "context": config.context, "trained_tokens": config.tokens, "runs": rows}


def _row(one: Planned, metrics: dict[str, Any]) -> dict[str, Any]:
    trained = read_json(one.directory / "summary.json")
    numbers = {name: value for name, value in metrics.items() if not isinstance(value, list)}
    return {
        "run": one.name,
        "kind": one.kind,
        "layer": one.layer,
        "units": one.units,
        "parameters": trained["parameters"],
        "k": one.config.k,
        "init": one.config.to_dict().get("init"),
        "seed": one.config.seed,
        "train_seconds": trained["train_seconds"],
        **numbers,
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """A line for every run."""
    lines = [("run", "parameters", "FVU", "L0", "dead", "trained in")]
    for row in rows:
        fvu, l0, dead = (row[name] for name in SHOWN)
        numbers = (f"{row['parameters']:,}", f"{fvu:.4f}", f"{l0:.1f}", f"{100 * dead:.1f} %")
        lines.append((row["run"], *numbers, duration(row["train_seconds"])))
    show_columns(lines)
