"""`clearhead evaluate`: measures a trained model on held-out text, prints the numbers and keeps them beside it.

Here a dictionary (Lorsa, transcoder, cross-layer transcoder, SAE); what `clearhead sparsify` leaves is measured by
evaluate_sparse.py.
"""

import dataclasses
from pathlib import Path
from typing import Any

from clearhead.commands import evaluate_sparse
from clearhead.commands.layers import runs_in, show_layers
from clearhead.commands.opened import OpenedDictionary, is_sparse, kind_of, open_dictionary, plan_of
from clearhead.commands.table import show
from clearhead.config import Evaluate, TrainSae, TrainTranscoder
from clearhead.data.harvest import ATTENTION
from clearhead.dictionaries.clt import Clt
from clearhead.dictionaries.dictionary import record_metrics
from clearhead.errors import ClearheadError
from clearhead.runs import environment, write_json
from clearhead.training.evaluate import evaluate
from clearhead.training.evaluate_clt import evaluate_clt

COLUMNS = {
    "fvu": "FVU",
    "fvu_ordinary": "FVU, no massive tokens",
    "l0": "L0",
    "dead_share": "dead share",
    "ce_recovered": "CE recovered",
    "kl_replaced": "KL replaced",
}


def plan(config: Evaluate) -> dict[str, Any]:
    """What will be measured, and where the numbers go."""
    if is_sparse(config.run):
        return evaluate_sparse.plan(config)
    runs = runs_in(config.run)
    if runs != [config.run]:
        one = plan(dataclasses.replace(config, run=runs[0]))
        one["layer"] = ", ".join(run.name for run in runs)
        return one | {"out": f"evaluation.json in each of {len(runs)} directories in {config.run}"}
    return plan_of(config) | {"downstream tokens": config.downstream_tokens, "out": file_of(config)}


def run(config: Evaluate) -> None:
    """Measure, and print all numbers but those by position; of a directory of several layers, one table."""
    if is_sparse(config.run):
        evaluate_sparse.run(config)
        return
    runs = runs_in(config.run)
    if runs != [config.run]:
        _measure_layers(config, runs)
        return
    metrics = measure(config)
    shown = {name: value for name, value in metrics.items() if name != "text_sha256" and not isinstance(value, list)}
    show(shown, f"on {config.split} text, written to {file_of(config)}")


def _measure_layers(config: Evaluate, runs: list[Path]) -> None:
    """Measure one run after the other; one that cannot be measured is named, and the others go on."""
    if config.out is not None:
        raise ClearheadError("--out is for one run; of several each keeps its evaluation.json, leave out --out")
    rows, left_out = {}, {}
    for run in runs:
        try:
            rows[int(run.name)] = measure(dataclasses.replace(config, run=run))
        except ClearheadError as error:
            left_out[int(run.name)] = str(error)
    if not rows:
        raise ClearheadError("; ".join(left_out.values()))
    show_layers(rows, COLUMNS, left_out, f"on {config.split} text, written to evaluation.json of each layer's run")


def measure(config: Evaluate) -> dict[str, Any]:
    """The metrics of a run, also written to `file_of(config)` with their configuration and environment."""
    if config.retrieval is not None:
        raise ClearheadError("--retrieval is for sparse models; leave it out for a dictionary")
    opened = open_dictionary(config)
    metrics = _fidelity(opened, config) | {
        "model_note": opened.model.note,
        "text": opened.blocks.source,
        "text_sha256": opened.blocks.sha256,
        "split": config.split,
    }
    record = metrics | {"config": config.to_dict(), "environment": environment()}
    write_json(file_of(config), record)
    if config.split == "held_out":
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        kind = kind_of(opened.training)
        record_metrics(config.run / kind, kind, numbers)
    return metrics


def _fidelity(opened: OpenedDictionary, config: Evaluate) -> dict[str, Any]:
    module, model, training, blocks = opened
    options = {"downstream_tokens": config.downstream_tokens, "batch_blocks": config.batch_blocks}
    if isinstance(module, Clt):
        return evaluate_clt(module, model, blocks, **options)
    sites = training.sites() if isinstance(training, TrainTranscoder | TrainSae) else ATTENTION
    return evaluate(module, model, int(training.layer or 0), blocks, sites=sites, **options)


def file_of(config: Evaluate) -> Path:
    """The file of the numbers: as given, or evaluation.json in the run directory."""
    return config.out or config.run / "evaluation.json"
