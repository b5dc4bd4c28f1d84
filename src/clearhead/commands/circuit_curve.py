"""`clearhead circuit curve`: how many components keep a behaviour, with controls and the whole protocol.

Writes `summary.json` (per model: protocol, accuracy, every curve with its per-prompt values, scores by unit, CPU
seconds; between models the overlap of their circuits), `prompts.json` (token ids of every item and what it was used
for) and `page.html`; of graph edges also `eap-1.json` (`eap-2.json` of the second model), scores and the first curve's
circuit in the form of EAP-IG and MIB.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

import torch

from clearhead.circuits.curves.agreement import compare_exact
from clearhead.circuits.curves.attention_edges import AttentionEdges, EdgeAblation, describe_circuits
from clearhead.circuits.curves.graph_edges import GraphEdges
from clearhead.circuits.curves.level import Level
from clearhead.circuits.curves.node_level import NodeLevel
from clearhead.circuits.curves.protocol import POLICIES
from clearhead.circuits.curves.statistics import Interval
from clearhead.circuits.curves.study import Settings, Studied, compare_circuits, study
from clearhead.circuits.formats.graph_circuits import write_eap
from clearhead.circuits.patching.ablation import Ablation
from clearhead.circuits.patching.components import NODE_KINDS, NodeKind
from clearhead.circuits.patching.edge_patching import Gating
from clearhead.commands.opening.structure import without_weights
from clearhead.commands.printing.table import say, show, spelled
from clearhead.config import CircuitCurve
from clearhead.config.task import is_file
from clearhead.configfile import refuse_other_run
from clearhead.data.tasks import TASKS, Task, TaskBatch, open_task
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.access import Model
from clearhead.runs import RunDirectory, write_json
from clearhead.view.curve_page import CurveRun, write_curve_page


def plan(config: CircuitCurve) -> dict[str, Any]:
    """What will be ranked and evaluated, without loading weights."""
    file = is_file(config.task)
    if not file and config.task not in TASKS:
        raise UnknownNameError("task", config.task, TASKS, "A file ends in .jsonl, .json, .csv or .parquet.")
    model = without_weights(config.model)
    heads = len(model.attention_layers) * model.n_heads
    components = {"heads": heads, "heads+mlps": heads + model.n_layers}
    return {
        "model": config.model,
        "against": config.against,
        "task": config.task,
        "prompts": f"the items of {config.task}" if file else f"{config.prompts}, half of the right ones to rank",
        "components": components.get(config.level, f"{config.level} of each prompt"),
        "ranking": f"{config.ranking}, {config.policy}",
        "ablation": config.ablation,
        "random rankings": config.controls,
        "directory": config.directory(),
    }


def run(config: CircuitCurve) -> None:
    """Rank, evaluate, write the run directory and its page, print every number with its protocol."""
    refuse_other_run(config.directory(), config)
    names = [config.model, *([config.against] if config.against else [])]
    models = [Model.load(name, dtype=config.dtype, device=config.device) for name in names]
    if config.gates == "frozen" and all(model.gates is None for model in models):
        raise ClearheadError(f"--gates frozen: {' and '.join(names)} have no edge gates to hold; leave out --gates")
    tasks = _tasks(models, config)
    settings = Settings(
        rank=config.ranking,
        policies=POLICIES if config.policy == "both" else (config.policy,),
        ablation=config.ablation,
        metric=config.metric,
        threshold=config.threshold,
        min_effect=config.min_effect,
        controls=config.controls,
        seed=config.seed,
    )

    def open_one(model: Model, reference: Sequence[TaskBatch]) -> Level:
        return open_level(
            model,
            config.level,
            config.ablation,
            reference,
            config.seed,
            gates="recomputed" if model.gates is None else config.gates,
            keep_sinks=config.keep_sinks,
        )

    with RunDirectory(config.directory()) as directory:
        directory.write_config(config.to_dict())
        found = study(models, tasks, open_one, settings)
        overlaps = _overlaps(found)
        runs = [_run_dict(name, one, config) for name, one in zip(names, found, strict=True)]
        directory.write_summary({"model": config.model, "runs": runs, "overlap": overlaps})
        write_json(directory.path / "prompts.json", [_prompts(one, of) for one, of in zip(found, tasks, strict=True)])
        for number, one in enumerate(found, 1):
            _write_eap(directory, number, one)
        shown = [CurveRun(each["name"], each["protocol"], each["curves"], each["scores"]) for each in runs]
        page = write_curve_page(directory.path / "page.html", shown)
    for one, each in zip(found, runs, strict=True):
        _print(one, each)
    for policy, numbers in overlaps.items():
        show(numbers, f"overlap of the {policy} circuits of {names[0]} and {names[1]} (Jaccard):")
    say(f"page: {page}; numbers: {directory.path / 'summary.json'}")


def open_level(
    model: Model,
    name: str,
    ablation: Ablation,
    reference: Sequence[TaskBatch],
    seed: int,
    *,
    gates: Gating = "recomputed",
    keep_sinks: bool = False,
) -> Level:
    """The level called `name`. Raises `UnknownNameError` for an ablation that it does not have."""
    kinds: dict[str, NodeKind] = {kind: kind for kind in NODE_KINDS}
    if name in kinds:
        return NodeLevel.open(model, kinds[name], ablation, reference=reference, seed=seed)
    if name == "graph-edges":
        return GraphEdges(model, ablation, reference=reference, seed=seed)
    of_edges = next((one for one in get_args(EdgeAblation) if one == ablation), None)
    if of_edges is None:
        raise UnknownNameError("ablation of attention edges", ablation, get_args(EdgeAblation))
    return AttentionEdges(model, of_edges, gates=gates, freeze_bos=keep_sinks, reference=reference)


def _tasks(models: Sequence[Model], config: CircuitCurve) -> list[Task]:
    """The same items in every model's tokens."""
    first = open_task(config.task, models[0], config.prompts, config.seed)
    return [first, *(Task.of_items(first.name, model, first.items, first.left_out) for model in models[1:])]


def _run_dict(name: str, found: Studied, config: CircuitCurve) -> dict[str, Any]:
    agreement = None
    if config.compare_exact:
        agreement = dataclasses.asdict(compare_exact(found.level, found.scores, found.scored, seed=config.seed))
    return {
        "name": name,
        "protocol": found.protocol.to_dict(),
        "accuracy": found.accuracy,
        "curves": [curve.to_dict(config.seed) for curve in found.curves],
        "edge_counts": _edge_counts(found),
        "agreement_with_exact": agreement,
        "scores": {found.protocol.rank: found.named_scores()},
        "cpu_seconds": dict(found.seconds),
    }


def _edge_counts(found: Studied) -> dict[str, dict[str, float]]:
    """Policy → what the stable circuit of attention edges consists of, on average; nothing at other levels."""
    level = found.level
    if not isinstance(level, AttentionEdges):
        return {}
    return {
        curve.policy: describe_circuits(level, found.evaluated, found.scores.keys(curve.policy), curve.stable)
        for curve in found.curves
        if curve.method == found.scores.method != "random" and curve.stable is not None
    }


def _write_eap(directory: RunDirectory, number: int, found: Studied) -> None:
    """The file of EAP-IG and MIB, at the level of graph edges."""
    level, curve = found.level, found.curves[0]
    if isinstance(level, GraphEdges):
        kept = set(curve.circuit)
        keep = torch.tensor([name in kept for name in found.names])
        write_eap(directory.path / f"eap-{number}.json", level.parts, found.scores.of_batches[0][0], keep)


def _prompts(found: Studied, behaviour: Task) -> list[dict[str, Any]]:
    protocol = found.protocol
    uses = {
        "ranked": protocol.ranked_on,
        "evaluated": protocol.evaluated_on,
        "wrong": protocol.wrong,
        "dropped": protocol.dropped,
    }
    return [
        {
            "model": protocol.model,
            "item": item,
            "template": behaviour.items[item].template,
            "used": [use for use, items in uses.items() if item in items],
            **ids._asdict(),
        }
        for item, ids in sorted(behaviour.tokens.items())
    ]


def _overlaps(found: Sequence[Studied]) -> dict[str, dict[str, float]]:
    """Policy → overlaps of the two models' circuits, where both have such circuits of the same components."""
    if len(found) < 2 or set(found[0].names) != set(found[1].names):
        return {}
    pairs = zip(found[0].curves, found[1].curves, strict=True)
    compared = {a.policy: compare_circuits(a, b) for a, b in pairs if a.method != "random"}
    return {policy: numbers for policy, numbers in compared.items() if numbers}


def _print(found: Studied, saved: dict[str, Any]) -> None:
    name = saved["name"]
    show(found.protocol.lines(), f"protocol, {name}:")
    for curve in saved["curves"]:
        if curve["rank"] != "random":
            show(_numbers(curve, found), f"{name}: {curve['rank']}, {curve['policy']}:")
    for policy, counts in saved["edge_counts"].items():
        shown = {key.replace("_", " "): value for key, value in counts.items()}
        shown["share of edges to the first token"] = counts["bos"] / max(1, counts["edges"])
        show(shown, f"{name}: the {policy} circuit of a prompt, on average:")
    if saved["agreement_with_exact"] is not None:
        show(saved["agreement_with_exact"], f"{name}: exact effects against the scores of the ranking:")
    random = [curve for curve in saved["curves"] if curve["rank"] == "random"]
    if random:
        numbers = {"stable crossing": [one["stable"] for one in random], "AUC": [one["auc"] for one in random]}
        show(numbers, f"{name}: random rankings:")
    show(found.seconds, "CPU seconds:")


def _numbers(curve: dict[str, Any], found: Studied) -> dict[str, object]:
    """What is printed of a curve."""
    own = sorted(count for count in curve["per_prompt_stable"] if count is not None)
    share = f"{curve['threshold']:.0%}"
    alone = f"crossed by {len(own)} of {len(curve['items'])} prompts"
    if own:
        alone = f"median {own[len(own) // 2]}, {own[0]} to {own[-1]}; {alone}"
    return {
        "components": found.protocol.components,
        f"{share}, stable crossing": _with_intervals(curve, "stable"),
        f"{share}, first crossing": _with_intervals(curve, "first"),
        f"{share}, each prompt alone": alone,
        "AUC": _with_intervals(curve, "auc"),
        "max F": _with_intervals(curve, "max_f"),
        "CPR": curve["cpr"],
        "CMD": curve["cmd"],
        "F of the complement": curve["complement_f"],
        "components tied at the cut": curve["tied_at_stable"],
        "M(none), M(all)": [curve["means"][curve["metric"]][end] for end in (0, -1)],
        "accuracy of the model": found.accuracy,
        "first of the circuit": " ".join(curve["circuit"][:10]) or None,
    }


def _with_intervals(curve: dict[str, Any], key: str) -> str:
    over = {name: curve[f"intervals_{name}"][key] for name in ("prompts", "templates")}
    ends = [f"{name} {_interval(found)}" for name, found in over.items()]
    return f"{spelled(curve[key])} ({'; '.join(ends)})"


def _interval(found: Interval | None) -> str:
    return "–" if found is None else f"{_short(found.low)} to {_short(found.high)}"


def _short(number: float) -> str:
    return spelled(int(number) if number == int(number) else number)
