"""`clearhead evaluate` of what `clearhead sparsify` left: a sparse model beside its base, or a training control.

Three files are written: evaluation.json (all numbers), of a sparse model also evaluation-sentences.json (its open edges
on two sentences) and page.html, which shows both and the training. With --out they lie there and have its name.
"""

from pathlib import Path
from typing import Any

from clearhead.commands.opening.opened import OpenedSparse, open_sparse, sparsify_of, text_of
from clearhead.commands.printing.sparse_report import KIND, sentences_of, write_page
from clearhead.commands.printing.table import say, show
from clearhead.config import Evaluate, Sparsify
from clearhead.errors import ClearheadError
from clearhead.model.gates import SETTINGS
from clearhead.runs import environment, read_json, write_json
from clearhead.sparsify.evaluate import evaluate
from clearhead.sparsify.evaluate_control import evaluate_control
from clearhead.sparsify.measures import measure_losses
from clearhead.sparsify.posttrain import rates_of
from clearhead.sparsify.sentences import read_sentences
from clearhead.view.sparse_words import CONTROLS

Numbers = dict[str, Any]
SUMMARY = ("tokens", "steps", "kept_step", "within_tolerance", "trained_parameters")
"""Of a run's summary, what its evaluation repeats."""


def plan(config: Evaluate) -> Numbers:
    """What will be measured, and where the numbers go."""
    _refuse_lorsa_options(config)
    training = sparsify_of(config.run)
    record = training_record(config.run, training)
    return {
        "model": config.run if training is None else config.run / "model",
        "base": record["base"],
        "control": record["control"],
        "text": f"{text_of(config, training)} ({config.split}), without the blocks that the run was watched on",
        "tokens, at most": config.tokens,
        "context": "256, or less where the model has less" if training is None else training.context,
        "retrieval prompts of": list(config.retrieval_lengths(training.context if training else 0)) or "no length",
        "out": evaluation_of(config),
    }


def run(config: Evaluate) -> None:
    """Measure, write the files and print the table."""
    _refuse_lorsa_options(config)
    opened = open_sparse(config)
    record = training_record(config.run, opened.training)
    out = evaluation_of(config)
    control = record["control"] != "none"
    found = _measure_control(config, opened) if control else _measure_sparse(config, opened)
    about = {
        "kind": KIND,
        "training": record,
        "model_note": opened.model.note if opened.base is None else opened.base.note,
        "text": opened.blocks.source,
        "text_sha256": opened.blocks.sha256,
        "split": config.split,
        "config": config.to_dict(),
        "environment": environment(),
    }
    evaluation = found | about
    write_json(out, evaluation)
    show(table(evaluation), f"on {found['tokens']:,} tokens of {config.split} text; numbers: {out}")
    if control:
        say("a control: `clearhead frontier` shows it beside the sparse runs")
        return
    write_json(sentences_of(out), read_sentences(opened.model, opened.base, opened.tokens, prefix=opened.blocks.prefix))
    page = out.with_suffix(".html") if config.out else config.run / "page.html"
    say(f"page: {write_page(config.run, out, page)}")


def training_record(run: Path, training: Sparsify | None) -> Numbers:
    """How a model came to be: base, control, tolerance, seed, and of its run also text and lengths; None if unknown."""
    if training is None:
        settings = read_json(run / "config.json")[SETTINGS]
        known = {key: settings.get(key) for key in ("base", "tolerance", "seed")}
        return known | {"control": settings.get("control", "none"), "target": None} | dict.fromkeys(SUMMARY)
    summary = read_json(run / "summary.json")
    hard_steps = round(training.settle_share * training.steps())
    return {
        "base": training.model,
        "tolerance": training.tolerance,
        "seed": training.seed,
        "control": training.control,
        "target": training.target,
        "constraint": training.constraint,
        "lora": training.lora,
        "text": training.text,
        "context": training.context,
        "hard_from_tokens": (training.steps() - hard_steps) * training.batch_tokens,
        **{key: summary[key] for key in SUMMARY},
    }


def evaluation_of(config: Evaluate) -> Path:
    """The file of the numbers: as given, or evaluation.json in the run directory."""
    return config.out or config.run / "evaluation.json"


def _measure_sparse(config: Evaluate, opened: OpenedSparse) -> Numbers:
    """Everything about a sparse model, and the base's loss on the text of the controls."""
    context = opened.tokens.shape[1]
    batch_tokens = config.batch_blocks * context
    lengths = config.retrieval_lengths(context)
    found = evaluate(
        opened.model,
        opened.tokens,
        base=opened.base,
        retrieval_lengths=lengths,
        needle_text=text_of(config, opened.training),
        batch_tokens=batch_tokens,
    )
    if opened.base is not None:
        some = opened.tokens[: found["laid_out_tokens"] // context]
        losses, _ = measure_losses(opened.base, some, batch=config.batch_blocks, what="base loss")
        found["controls"]["base"] = float(losses.mean())
    else:
        found["controls"]["base"] = None
    return found


def _measure_control(config: Evaluate, opened: OpenedSparse) -> Numbers:
    if opened.training is None:
        raise ClearheadError(f"{config.run} is the model of a control; give the directory of its run instead")
    if config.retrieval is not None:
        raise ClearheadError("--retrieval measures sparse models, and this is a control; leave it out")
    batch_tokens = config.batch_blocks * opened.tokens.shape[1]
    rates = rates_of(opened.training)
    return evaluate_control(opened.model, opened.base, opened.tokens, rates, batch_tokens=batch_tokens)


def _refuse_lorsa_options(config: Evaluate) -> None:
    if config.downstream_tokens != Evaluate.downstream_tokens:
        raise ClearheadError("--downstream-tokens is for a Lorsa; leave it out for a sparse model")


def table(evaluation: Numbers) -> dict[str, str]:
    """What is printed: a line for every question, forms of the model side by side."""
    ce, edges, context = evaluation["ce"], evaluation["edges"], evaluation["context"]
    training = evaluation["training"]
    form = "hard" if "hard" in ce else "control"
    visible = (context + 1) / 2
    allowed = "" if training["tolerance"] is None or form != "hard" else f"; tolerance {training['tolerance']:g}"
    if training["target"] is not None:
        allowed = f"; allowed {training['target'] + training['tolerance']:g}"
    rows = {"loss, base": _loss(ce["base"], None), f"loss, {_NAMES[form]}": _loss(ce[form], ce["base"]) + allowed}
    for other in ("sampled", "opened"):
        if other in ce:
            rows[f"loss, {_NAMES[other]}"] = _loss(ce[other], ce["base"])
    rows["open edges per query"] = f"{edges['per_query']:.2f} of {visible:g} ({_share(edges['share'])})"
    if form == "hard":
        rows["open edges per query"] += f", expected {edges['expected_per_query']:.2f}"
        rows |= _edge_rows(evaluation)
    for half, words in (("first_half", "new random tokens"), ("second_half", "said again")):
        values = {name: found[half] for name, found in evaluation["induction"].items() if found is not None}
        rows[f"loss, {words}"] = ", ".join(f"{_NAMES[name]} {value:.3f}" for name, value in values.items())
    for name, found in evaluation["tasks"].items():
        rows[f"task {name.replace('_', ' ')}"] = _accuracies(found)
    for kind, lengths in evaluation.get("retrieval", {}).items():
        for found in lengths:
            rows[f"{kind}, {found['length']:,} tokens"] = _retrieved(found)
    return rows


_NAMES = {"base": "base", "hard": "hard gates", "sampled": "sampled gates", "opened": "gates opened"}
_NAMES |= {"control": "control"}


def _edge_rows(evaluation: Numbers) -> dict[str, str]:
    """Edges by length, empty rows, leak, first token and the controls of a sparse model."""
    edges, first, controls = evaluation["edges"], evaluation["first_token"], evaluation["controls"]
    rows = {}
    for at in evaluation["lengths"][:-1]:
        visible = (at["length"] + 1) / 2
        rows[f"  in the first {at['length']:,}"] = f"{at['per_query']:.2f} of {visible:g} ({_share(at['share'])})"
    rows["rows without an edge"] = _share(edges["empty_rows"])
    rows["softmax mass on closed edges"] = _share(edges["leak"])
    means = {"base": first["base"], "before the gates": first["before_gates"], "after them": first["after_gates"]}
    rows["first token's part"] = ", ".join(f"{name} {_share(_mean(values))}" for name, values in means.items())
    rows["other edges, as many"] = (
        f"loss on {evaluation['laid_out_tokens']:,} tokens, hard gates {controls['hard']:.3f}"
    )
    for name, words in CONTROLS.items():
        if controls[name] is not None:
            rows[f"  {words.label}"] = f"{controls[name]:.3f}, {controls[name] - controls['hard']:+.4f} on hard gates"
    return rows


def _loss(value: float | None, base: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if base is None else f"{value:.4f}, {value - base:+.4f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.3g} %"


def _mean(values: list[float | None] | None) -> float | None:
    known = [value for value in values or [] if value is not None]
    return sum(known) / len(known) if known else None


def _accuracies(found: Numbers) -> str:
    if "refused" in found:
        return f"not measured: {found['refused']}"
    forms = {name: found[name] for name in _NAMES if found.get(name) is not None}
    listed = ", ".join(f"{_NAMES[name]} {100 * form['accuracy']:.1f} %" for name, form in forms.items())
    return f"{listed} right of {found['prompts']}"


def _retrieved(found: Numbers) -> str:
    if "refused" in found:
        return f"not measured: {found['refused']}"
    forms = {name: _mean(found[name]["exact"]) for name in _NAMES if found.get(name) is not None}
    return ", ".join(f"{_NAMES[name]} {_share(value)} found" for name, value in forms.items())
