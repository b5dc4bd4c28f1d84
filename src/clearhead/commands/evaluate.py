"""`clearhead evaluate`: measures a trained model on held-out text, prints the numbers and keeps them beside it.

Here a dictionary (Lorsa, transcoder, cross-layer transcoder, SAE); what `clearhead sparsify` leaves is measured by
evaluate_sparse.py.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clearhead.commands import evaluate_sparse
from clearhead.commands.opening.opened import (
    OpenedDictionary,
    is_sparse,
    open_dictionary,
    plan_of,
    source_of,
)
from clearhead.commands.opening.run_folders import runs_in
from clearhead.commands.printing.table import show, show_layers
from clearhead.config import Evaluate
from clearhead.dictionaries.clt import Clt
from clearhead.dictionaries.dictionary import record_metrics
from clearhead.dictionaries.load import Dictionary
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.runs import environment, write_json
from clearhead.training.evaluate import evaluate, first_blocks, measure_downstream
from clearhead.training.evaluate_clt import evaluate_clt
from clearhead.training.evaluate_layers import measure_layers

LAYERS_AT_ONCE = 8
"""Layers of a directory that share a forward pass; the dictionaries of more would take too much memory."""

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
    """Measure the runs, several from each forward pass; one that cannot be measured is named, and the others go on."""
    if config.out is not None:
        raise ClearheadError("--out is for one run; of several each keeps its evaluation.json, leave out --out")
    _refuse_retrieval(config)
    rows, left_out = {}, {}
    model: Model | None = None
    for start in range(0, len(runs), LAYERS_AT_ONCE):
        opened: dict[int, OpenedDictionary] = {}
        for run in runs[start : start + LAYERS_AT_ONCE]:
            try:
                _refuse_unlike(run, runs[0])
                own = open_dictionary(dataclasses.replace(config, run=run), model)
            except ClearheadError as error:
                left_out[int(run.name)] = str(error)
            else:
                opened[int(run.name)], model = own, own.model
        for layer, metrics in _fidelity_of_layers(opened, config).items():
            rows[layer] = _record(metrics, opened[layer], dataclasses.replace(config, run=config.run / str(layer)))
    if not rows:
        raise ClearheadError("; ".join(left_out.values()))
    show_layers(rows, COLUMNS, left_out, f"on {config.split} text, written to evaluation.json of each layer's run")


def _refuse_unlike(run: Path, first: Path) -> None:
    """One forward pass serves runs of one model, text, context and pair of sites."""
    own, other = (source_of(path) for path in (run, first))
    for field in ("verb", "model", "dtype", "text", "context", "site"):
        values = [training.to_dict().get(field) for training in (own, other)]
        if values[0] != values[1]:
            raise ClearheadError(f"its {field} is {values[0]}, and that of {first} is {values[1]}; evaluate it alone")


def _fidelity_of_layers(opened: Mapping[int, OpenedDictionary], config: Evaluate) -> dict[int, dict[str, Any]]:
    found = {}
    if opened:
        first, model, _, blocks = next(iter(opened.values()))
        sites, options = _sites(first), {"batch_blocks": config.batch_blocks}
        modules = {layer: one.module for layer, one in opened.items()}
        tokens = first_blocks(blocks, config.downstream_tokens)
        for layer, (metrics, mean) in measure_layers(modules, model, blocks, sites=sites, **options).items():
            found[layer] = metrics
            if config.downstream_tokens:
                found[layer] |= measure_downstream(modules[layer], model, layer, tokens, mean, sites=sites, **options)
    return found


def measure(config: Evaluate) -> dict[str, Any]:
    """The metrics of a run, also written to `file_of(config)` with their configuration and environment."""
    _refuse_retrieval(config)
    opened = open_dictionary(config)
    return _record(_fidelity(opened, config), opened, config)


def _refuse_retrieval(config: Evaluate) -> None:
    if config.retrieval is not None:
        raise ClearheadError("--retrieval is for sparse models; leave it out for a dictionary")


def _record(metrics: dict[str, Any], opened: OpenedDictionary, config: Evaluate) -> dict[str, Any]:
    """Write the metrics of one run, and return them with what they were measured on."""
    metrics |= {
        "model_note": opened.model.note,
        "text": opened.blocks.source,
        "text_sha256": opened.blocks.sha256,
        "split": config.split,
    }
    record = metrics | {"config": config.to_dict(), "environment": environment()}
    write_json(file_of(config), record)
    if config.split == "held_out":
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        kind = opened.module.KIND
        record_metrics(config.run / kind, kind, numbers)
    return metrics


def _fidelity(opened: OpenedDictionary, config: Evaluate) -> dict[str, Any]:
    module, model, _, blocks = opened
    options = {"downstream_tokens": config.downstream_tokens, "batch_blocks": config.batch_blocks}
    if isinstance(module, Clt):
        return evaluate_clt(module, model, blocks, **options)
    return evaluate(module, model, int(module.provenance["layer"]), blocks, sites=_sites(module), **options)


def _sites(module: Dictionary) -> tuple[str, str]:
    """The sites that a dictionary of one layer reads and imitates, without their layer."""
    reads, writes = (str(module.provenance[name]).rpartition(".")[0] for name in ("input_site", "output_site"))
    return reads, writes


def file_of(config: Evaluate) -> Path:
    """The file of the numbers: as given, or evaluation.json in the run directory."""
    return config.out or config.run / "evaluation.json"
