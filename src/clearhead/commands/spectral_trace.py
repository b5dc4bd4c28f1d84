"""`clearhead spectral trace`: back from an answer to who wrote what its heads look for, and what removing it changes.

Writes one graph per prompt (`graph.json`, or `graphs/NNNN.json` for a task), `interventions.json` with every effect
and its controls, and `summary.json`.
"""

import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clearhead.commands.opening.structure import without_weights
from clearhead.commands.printing.table import say, show
from clearhead.config import SpectralTrace
from clearhead.configfile import refuse_other_run
from clearhead.data.tasks import Task, TaskItem, open_task
from clearhead.model.access import Model
from clearhead.runs import RunDirectory, progress, write_json
from clearhead.spectral.interventions import SCOPES, Effect, Size, Summary, intervene, summarise
from clearhead.spectral.signals import SIDES, Firing
from clearhead.spectral.tracing import Link, NothingToTraceError, Target, Trace, trace
from clearhead.spectral.writes import Parts, Stream

SHOWN = 20
"""Rows of the table of links."""


def plan(config: SpectralTrace) -> dict[str, Any]:
    """What will be traced and how many forwards it takes, without loading weights."""
    model = without_weights(config.model)
    prompts = 1 if config.prompt is not None else config.prompts
    each = len(SIDES) * len(SCOPES) * (1 + config.boost) * config.firings
    return {
        "model": config.model,
        "layers": model.n_layers,
        "heads": model.n_layers * model.n_heads,
        "prompts": f"the items of {config.task}" if config.task not in (None, "ioi") else prompts,
        "levels": config.depth,
        "interventions per prompt": each,
        "rows of a forward per prompt": 1 + each * (1 + config.draws),
        "directory": config.directory(),
    }


@dataclass
class Findings:
    """What a run has found so far."""

    traces: dict[int, Trace] = field(default_factory=dict)
    effects: list[tuple[int, Effect]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    untested: int = 0
    """Sides of firings that are unexplained, or whose signal leaves no mode to compare with."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("forward", "trace", "interventions"), 0.0))
    """CPU time."""


def run(config: SpectralTrace) -> None:
    """Trace, intervene, write the run directory, print the links and the effects."""
    refuse_other_run(config.directory(), config)
    model = Model.load(config.model, dtype=config.dtype, device=config.device)
    items = _items(model, config)
    parts = Parts(model)
    found = Findings()
    with RunDirectory(config.directory()) as directory:
        directory.write_config(config.to_dict())
        for graph in (directory.path / "graphs").glob("*.json"):  # of this run, when it was made before
            graph.unlink()
        with progress("tracing", len(items), "prompts") as advance:
            for index in items.tokens:
                _one(config, parts, items, index, directory.path, found)
                advance(1)
        summaries = summarise(found.effects, config.seed)
        written = {"effects": [{"prompt": i, **asdict(e)} for i, e in found.effects]}
        write_json(directory.path / "interventions.json", written | {"summary": [asdict(s) for s in summaries]})
        summary = {"model": config.model, "model_note": model.note, **_summary(config, items, found, summaries)}
        directory.write_summary(summary)
    _print(model, items, found, summaries, summary)
    say(f"graphs and numbers: {directory.path}")


def _items(model: Model, config: SpectralTrace) -> Task:
    """The prompts with their answers; a single prompt is a task of one item."""
    if config.prompt is None:
        return open_task(config.task_name, model, config.prompts, config.seed)
    answers, wrong = ((text,) if text is not None else () for text in (config.answer, config.wrong))
    item = TaskItem(config.prompt, config.prompt, answers, wrong, "prompt", {})
    return Task.of_items("prompt", model, (item,))


def _one(config: SpectralTrace, parts: Parts, items: Task, index: int, folder: Path, found: Findings) -> None:
    """Trace one prompt, write its graph, and intervene on the first of its seeds."""
    ids = items.tokens[index]
    clock = _Clock(found.seconds)
    stream = Stream(parts, torch.tensor([ids.clean], device=parts.model.device))
    answers = ids.answers or [int(stream.run.logits[0, -1].argmax())]
    target = Target(tuple(answers), tuple(ids.wrong_answers))
    clock.lap("forward")
    start = target if config.firing is None else [Firing.parse(config.firing)]
    try:
        traced = trace(stream, start, depth=config.depth, prompt=items.items[index].clean)
    except NothingToTraceError as error:
        if config.prompt is not None:
            raise
        found.left_out[error.reason] += 1
        return
    found.traces[index] = traced
    write_json(folder / ("graph.json" if config.prompt else f"graphs/{index:04d}.json"), traced.graph.to_dict())
    clock.lap("trace")
    for seed in traced.seeds[: config.firings]:
        for side in SIDES:
            signal = traced.signals[seed.firing, side]
            if not signal.testable:
                found.untested += 1
                continue
            for scope in SCOPES:
                for amount in (-1, 1) if config.boost else (-1,):
                    effect = intervene(
                        stream, signal, target, scope, amount=amount, draws=config.draws, seed=config.seed
                    )
                    found.effects.append((index, effect))
    clock.lap("interventions")


class _Clock:
    """Adds the CPU time since the last lap."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds, self.last = seconds, time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name] += now - self.last
        self.last = now


def _summary(config: SpectralTrace, items: Task, found: Findings, summaries: list[Summary]) -> dict[str, Any]:
    """The numbers of the run; means are over traced prompts."""
    traces = list(found.traces.values())
    signals = [signal for traced in traces for signal in traced.signals.values() if signal.found]
    links = [link for traced in traces for link in traced.links]
    differences = [traced.difference for traced in traces if traced.difference is not None]
    return {
        "source": items.name,
        "depth": config.depth,
        "prompts_traced": len(traces),
        "prompts_left_out": dict(found.left_out + Counter(items.refused.values())),
        "logit_difference": _mean(differences),
        "carried_by": {
            kind: _mean([traced.carried.get(kind, 0.0) for traced in traces])
            for kind in dict.fromkeys(kind for traced in traces for kind in traced.carried)
        },
        "seeds": _mean([len(traced.seeds) for traced in traces]),
        "firings": _mean([len(traced.level) for traced in traces]),
        "units": _mean([len(traced.graph.units) for traced in traces]),
        "edges": _mean([len(traced.graph) for traced in traces]),
        "unexplained_sides": sum(len(traced.unexplained) for traced in traces),
        "sources_per_side": _mean([len(signal.components) for signal in signals]),
        "modes_per_side": _mean([len(signal.modes) for signal in signals]),
        "links_of_a_single_mode": _mean([len(link.drops) == 1 for link in links]),
        "untested_sides": found.untested,
        "interventions": [asdict(summary) for summary in summaries],
        "seconds": {name: round(value, 2) for name, value in found.seconds.items()},
    }


def _mean(values: list[Any]) -> float | None:
    return float(np.mean(values)) if values else None


def _print(model: Model, items: Task, found: Findings, summaries: list[Summary], summary: dict[str, Any]) -> None:
    hidden = ("model_note", "interventions", "carried_by", "seconds", "prompts_left_out")
    show({name.replace("_", " "): value for name, value in summary.items() if name not in hidden}, "traced:")
    if summary["carried_by"]:
        show(summary["carried_by"], "logit difference by kind of component:")
    if summary["prompts_left_out"]:
        show(summary["prompts_left_out"], "prompts left out:")
    rows = _links_of_prompt(model, items, found) if len(items.items) == 1 else _links_of_task(found)
    show(rows, "drops in attention, reader and side ← writer:")
    if summaries:
        show(dict(map(_row, summaries)), "change of the attention weight and of the logit difference (its controls'):")
    show(summary["seconds"], "CPU seconds:")


def _links_of_prompt(model: Model, items: Task, found: Findings) -> dict[str, str]:
    """The largest links of one prompt, those into the first level before others, with the tokens they lie at."""
    rows: dict[str, str] = {}
    for index, traced in found.traces.items():
        tokens = [repr(token) for token in model.token_strings(items.tokens[index].clean)]
        for link in sorted(traced.links, key=lambda link: (traced.level[link.firing], -link.drop))[:SHOWN]:
            firing, unit = link.firing, link.source
            reader = f"{firing.layer}.{firing.head} {tokens[firing.query]}→{tokens[firing.key]} {link.side}"
            key = "" if unit.part is None or unit.kind != "edge" else f"→{tokens[unit.part]}"
            place = "" if unit.position is None else f" {tokens[unit.position]}{key}"
            modes = f"modes {', '.join(map(str, sorted(link.drops)))}"
            rows[f"{reader} ← {unit.id}{place}"] = f"{link.drop:.3f}, {modes}"
    return rows


def _links_of_task(found: Findings) -> dict[str, str]:
    """The links with the largest sum over prompts, by heads whatever the tokens."""
    drops: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for index, traced in found.traces.items():
        for link in traced.links:
            drops[f"{link.firing.layer}.{link.firing.head} {link.side} ← {_writer(link)}"][index] += link.drop
    order = sorted(drops.items(), key=lambda entry: -sum(entry[1].values()))[:SHOWN]
    n = len(found.traces)
    return {name: f"{sum(by.values()) / n:.3f} per prompt, in {len(by)} of {n}" for name, by in order}


def _writer(link: Link) -> str:
    unit = link.source
    if unit.kind in ("edge", "head"):
        return f"head {unit.layer}.{unit.index}"
    return unit.kind if unit.layer is None else f"{unit.kind} {unit.layer}"


def _row(summary: Summary) -> tuple[str, str]:
    verb = "removed" if summary.amount < 0 else "doubled"
    name = f"{summary.side} side, {summary.scope}, {verb}"
    weight = f"{_spread(summary.weight)} ({summary.weight_control.mean:+.3f})"
    difference = f"{_spread(summary.difference)} ({summary.difference_control.mean:+.3f})"
    beyond = f"beyond every control {summary.weight_beyond:.0%} and {summary.difference_beyond:.0%} of firings"
    if summary.state_cosine is None:
        return name, f"{weight}; {difference}; {beyond}"
    cosine = f"cosine {summary.state_cosine:.3f} ({summary.state_cosine_control:.3f})"
    norm = f"norm × {summary.state_norm:.3f} ({summary.state_norm_control:.3f})"
    return name, f"{weight}; {difference}; {beyond}; stream: {cosine}, {norm}"


def _spread(size: Size) -> str:
    interval = "" if size.low is None else f" [{size.low:+.3f}, {size.high:+.3f}]"
    return f"{size.mean:+.3f}{interval}"
