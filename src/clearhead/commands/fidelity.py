"""`clearhead fidelity`: how faithful decompositions of attention layers are, against SAEs, by size, and what they miss.

All runs are measured anew, on the same held-out tokens, in one pass per layer; nothing is read from their evaluations.
summary.json holds every number, page.html shows them.
"""

from collections.abc import Sequence
from typing import Any

from clearhead.analysis.fidelity.errors import Comparison, LayerErrors, measure_errors
from clearhead.commands.opening.attention_runs import (
    REFERENCE,
    TrainedRun,
    choose,
    find_runs,
    is_equal,
    load_candidate,
    most_alike,
    refuse_unlike,
)
from clearhead.commands.printing.fidelity_report import across_layers, fits_of, print_report, write_page
from clearhead.commands.printing.table import say
from clearhead.config import Fidelity
from clearhead.configfile import refuse_other_verb
from clearhead.data.text import token_blocks
from clearhead.model.access import Model
from clearhead.model.tokens import vocabulary_strings
from clearhead.runs import RunDirectory


def plan(config: Fidelity) -> dict[str, Any]:
    """Which runs are compared, and where the report goes."""
    found, left = find_runs(config.runs)
    refuse_unlike(found)
    kinds = [run.kind for run in found]
    return {
        "model": found[0].training.model,
        "layers": sorted({run.layer for run in found}),
        **{kind: kinds.count(kind) for kind in ("lorsa", "sae", "transcoder")},
        "left out": [f"{path}: {reason}" for path, reason in left] or None,
        "text": f"{config.text or found[0].training.text} ({config.split})",
        "tokens, at most": config.tokens,
        "report": config.out,
    }


def run(config: Fidelity) -> None:
    """Measure, print, and write numbers and page."""
    refuse_other_verb(config.out, config)
    found, left = find_runs(config.runs)
    refuse_unlike(found)
    for path, reason in left:
        say(f"left out: {path}, since {reason}")
    with RunDirectory(config.out) as directory:
        directory.write_config(config.to_dict())
        report = measure(config, found)
        report["left_out"] = [[str(path), reason] for path, reason in left]
        directory.write_summary(report)
        print_report(report)
        page = write_page(config.out, config.out / "page.html")
    say(f"page: {page}; numbers: {config.out / 'summary.json'}")
    mains = {layer["main"] for layer in report["layers"]}
    if len(mains) > 1:
        places = " ".join(row["path"] for row in report["runs"] if row["run"] in mains)
        say("next, how errors of several layers add up:")
        say(f"  clearhead replace --model {report['model']} --dictionaries {places}")


def measure(config: Fidelity, found: Sequence[TrainedRun]) -> dict[str, Any]:
    """The report on these runs, which belong to one model, text and context."""
    training = found[0].training
    model = Model.load(training.model, dtype=config.dtype or training.dtype, device=config.device)
    blocks = token_blocks(
        model,
        config.text or training.text,
        split=config.split,
        n_tokens=config.tokens,
        context=training.context,
        at_most=True,
    )
    found = sorted(found, key=lambda run: run.layer)
    by_layer: dict[int, list[TrainedRun]] = {}
    for one in found:
        by_layer.setdefault(one.layer, []).append(one)
    candidates = {layer: [load_candidate(one, model) for one in own] for layer, own in by_layer.items()}
    parameters = {
        layer: [sum(p.numel() for p in candidate.module.parameters()) for candidate in own]
        for layer, own in candidates.items()
    }
    chosen = {layer: choose(own, parameters[layer]) for layer, own in by_layer.items()}
    compared = {layer: comparison for layer, comparison in chosen.items() if comparison is not None}
    errors = measure_errors(
        model,
        blocks,
        [candidate for own in candidates.values() for candidate in own],
        compared,
        batch_blocks=config.batch_blocks,
        seed=config.seed,
    )
    assert model.tokenizer is not None  # text could not have been cut without one
    texts = vocabulary_strings(model.tokenizer, model.d_vocab)
    special = frozenset(model.tokenizer.all_special_ids)
    rows, layers = [], []
    for layer, own in by_layer.items():
        rows += _rows(own, parameters[layer], errors[layer])
        if layer in compared:
            partners = _partners(own, parameters[layer], compared[layer])
            layers.append(errors[layer].result(texts, special) | {"compared": partners})
    return {
        "model": training.model,
        "model_note": model.note,
        "text": blocks.source,
        "text_sha256": blocks.sha256,
        "split": config.split,
        "context": blocks.context,
        "tokens": len(blocks) * (blocks.context - 1),
        "runs": rows,
        "layers": layers,
        "across": across_layers(rows, layers, config.seed),
        "fits": fits_of(rows),
    }


def _rows(own: Sequence[TrainedRun], parameters: Sequence[int], errors: LayerErrors) -> list[dict[str, Any]]:
    rows = []
    for one, size, candidate, metrics in zip(own, parameters, errors.candidates, errors.metrics(), strict=True):
        told = {
            "run": one.name,
            "path": str(one.path),
            "kind": one.kind,
            "units": candidate.module.n_units,
            "parameters": size,
            "k": one.training.k,
            "init": one.init,
            "seed": one.training.seed,
            "trained_tokens": one.training.tokens,
        }
        rows.append(told | metrics)
    return rows


def _partners(own: Sequence[TrainedRun], parameters: Sequence[int], comparison: Comparison) -> dict[str, Any]:
    """By name, the run that the layer's Lorsa is compared with, and whether budgets were equal; None without one."""
    main = comparison.main
    places = {
        "sae": comparison.partner,
        "transcoder": most_alike(own, parameters, main, kind="transcoder"),
        "reference": most_alike(own, parameters, main, kind="lorsa", init=REFERENCE),
        "seed": most_alike(own, parameters, main, kind="lorsa", init=own[main].init, other_seed=True),
    }
    return {
        name: None if at is None else {"run": own[at].name, "equal": is_equal(own, parameters, main, at)}
        for name, at in places.items()
    }
