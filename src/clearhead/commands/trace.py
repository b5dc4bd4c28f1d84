"""`clearhead trace`: what a model predicts, back to the tokens, as a graph of units with the heads that carry edges.

Writes `graph/` (our bundle), `neuronpedia/SLUG.json` with its `graph-metadata.json`, and `summary.json`.
"""

import time
from typing import Any

import numpy as np
import torch

from clearhead.circuits.formats.neuronpedia import speakable, to_neuronpedia, write_neuronpedia
from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.tracing.attention_in_graph import explain_attention, load_heads, weigh_heads
from clearhead.circuits.tracing.carried_edge import CarriedEdge, carry_edge, sources_named
from clearhead.circuits.tracing.prune import Pruned, prune
from clearhead.circuits.tracing.qk import ScoreSplit
from clearhead.circuits.tracing.readers import read_difference, read_units
from clearhead.circuits.tracing.sources import Opened, open_prompt
from clearhead.circuits.tracing.trace import Start, likely_logits, trace
from clearhead.commands.opening.structure import without_weights
from clearhead.commands.printing.table import say, show
from clearhead.config import TracePrompt
from clearhead.config.verb import shortened
from clearhead.configfile import refuse_other_run
from clearhead.dictionaries.load import load_dictionary_of
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.runs import RunDirectory
from clearhead.spectral.tracing import Target
from clearhead.spectral.writes import Parts
from clearhead.units import AttentionTable, Graph, Unit
from clearhead.units.algebra import carriers
from clearhead.units.bundle import save_graph

SHOWN, HEADS, PAIRS = 12, 3, 3
"""Rows of a table, heads of an edge, pairs of a score."""


def plan(config: TracePrompt) -> dict[str, Any]:
    """What will be traced, without loading weights."""
    model = without_weights(config.model)
    return {
        "model": config.model,
        "layers": model.n_layers,
        "dictionaries": list(config.dictionaries) or "none: tokens, whole MLPs and heads only",
        "units explained, at most": config.units,
        "edges stored per unit, at most": config.kept,
        "directory": config.directory(),
    }


def run(config: TracePrompt) -> None:
    """Trace, write the run directory, print the graph's numbers."""
    refuse_other_run(config.directory(), config)
    model = Model.load(config.model, dtype=config.dtype, device=config.device)
    dictionaries = Dictionaries(model, map(load_dictionary_of, config.dictionaries))
    clock = _Clock()
    opened = open_prompt(Parts(model), model.tokenize(config.prompt), dictionaries)
    start = _start(config, opened)
    edge = _carried(config, opened, start) if config.edge else None
    clock.lap("forward")
    traced = trace(opened, start, units=config.units, kept=config.kept)
    clock.lap("trace")
    pruned = prune(traced, config.unit_share, config.edge_share)
    clock.lap("prune")
    loadings = load_heads(pruned)
    clock.lap("loadings")
    scores = explain_attention(pruned, config.tables)
    clock.lap("attention scores")
    graph = pruned.graph(config.prompt, loadings, [split.table() for split in scores])
    slug = config.slug or shortened(config.prompt)
    with RunDirectory(config.directory()) as directory:
        directory.write_config(config.to_dict())
        save_graph(graph, directory.path / "graph")
        write_neuronpedia(to_neuronpedia(graph, slug, speakable(model.name)), directory.path / "neuronpedia")
        summary = {"model": model.name, "model_note": model.note, **_summary(config, pruned, graph, scores, clock)}
        if edge is not None:
            summary["edge"] = _edge_numbers(config, edge)
        directory.write_summary(summary)
    _Report(pruned, graph).show(scores, summary)
    say(f"graph and numbers: {directory.path}")


def _start(config: TracePrompt, opened: Opened) -> Start:
    """What the graph explains."""
    if config.unit is not None:
        return Start(read_units(opened, [Unit.parse(config.unit)]), np.ones(1))
    if config.answer is None:
        return likely_logits(opened)
    model = opened.parts.model
    answer = one_token(model, config.answer, "answer")
    if config.wrong is not None:
        wrong = one_token(model, config.wrong, "wrong")
        words = f"{config.answer!r} against {config.wrong!r}"
        return Start(read_difference(opened, Target((answer,), (wrong,))), np.ones(1), words)
    probability = torch.softmax(opened.stream.run["logits"][0, -1].double(), -1)[answer]
    reads = read_units(opened, [Unit("logit", index=answer, position=len(opened) - 1)])
    return Start(reads, np.array([float(probability)]))


def one_token(model: Model, text: str, option: str) -> int:
    """The token that a text is. Raises `ClearheadError` for a text of several, naming them."""
    tokens = model.tokenize(text, special_tokens=False)[0].tolist()
    if len(tokens) != 1:
        pieces = ", ".join(map(repr, model.token_strings(tokens)))
        raise ClearheadError(
            f"--{option} {text!r} is {len(tokens)} tokens of {model.name} ({pieces}); give one, as its first: "
            f"{model.token_strings(tokens[:1])[0]!r}"
        )
    return tokens[0]


class _Clock:
    """CPU seconds by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name] = round(now - self.last, 3)
        self.last = now


def _summary(
    config: TracePrompt, pruned: Pruned, graph: Graph, scores: list[ScoreSplit], clock: _Clock
) -> dict[str, Any]:
    """The numbers of the run."""
    traced = pruned.traced
    rows, ends = traced.rows, traced.scores()
    return {
        "prompt": config.prompt,
        "tokens": list(graph.tokens),
        "dictionaries": traced.opened.dictionaries.describe(),
        "targets": {
            unit.id: {"value": float(value), "share": float(share)}
            for unit, value, share in zip(
                traced.start.reads.targets, traced.start.reads.value.tolist(), traced.start.share, strict=True
            )
        },
        "sources": len(traced.opened.sources),
        "units_explained": len(rows) - len(traced.start.share),
        "edges_stored": len(rows.entries.weight),
        "share_not_stored": sum(rows.dropped) / sum(rows.total),
        "largest_error_of_a_row": max(rows.error),
        "influence_in_tokens": ends.tokens,
        "influence_in_errors": ends.errors,
        "influence_in_biases": ends.biases,
        "influence_unexplained": ends.unexplained,
        "replacement_score": ends.replacement,
        "completeness": ends.completeness,
        "replacement_score_pruned": pruned.scores.replacement,
        "completeness_pruned": pruned.scores.completeness,
        "graph_units": len(graph.units),
        "graph_edges": len(graph),
        "heads_for_90_percent_of_influence": _heads_needed(pruned, graph),
        "attention_scores": {
            split.unit.id: {"score": split.score, "pairs_90": split.count_pairs()} for split in scores
        },
        "cpu_seconds": clock.seconds | {"total": round(sum(clock.seconds.values()), 3)},
    }


def _heads_needed(pruned: Pruned, graph: Graph) -> int:
    """The fewest heads that hold 0.9 of the influence that passes heads."""
    sizes = {} if graph.loadings is None else weigh_heads(pruned, graph.loadings)
    return len(carriers(np.array(list(sizes.values())), 0.9))


def _carried(config: TracePrompt, opened: Opened, start: Start) -> CarriedEdge:
    """The edge that is asked for, over its heads."""
    name = config.edge[1]
    known = [unit.id for unit in start.reads.targets]
    reads = start.reads if name in known else read_units(opened, [Unit.parse(name)])
    return carry_edge(opened, reads, sources_named(opened, config.edge[0]), known.index(name) if name in known else 0)


def _edge_numbers(config: TracePrompt, edge: CarriedEdge) -> dict[str, Any]:
    """The numbers of an edge that was asked for."""
    source, target = config.edge
    return {
        "source": source,
        "target": target,
        "weight": edge.weight,
        "past_all_heads": edge.direct,
        "heads_80": edge.count(0.8),
        "heads_90": edge.count(0.9),
        "heads": {f"{layer}.{head}": weight for (layer, head), weight in edge.heads.items()},
    }


class _Report:
    """What is printed of a graph, units named with their tokens."""

    def __init__(self, pruned: Pruned, graph: Graph):
        self.pruned, self.graph = pruned, graph
        self.model = pruned.traced.opened.parts.model

    def show(self, scores: list[ScoreSplit], summary: dict[str, Any]) -> None:
        """All of it."""
        hidden = ("model", "model_note", "prompt", "tokens", "targets", "attention_scores", "cpu_seconds", "edge")
        targets = summary["targets"].items()
        say("tokens: " + " ".join(f"{place}:{token!r}" for place, token in enumerate(self.graph.tokens)))
        show({self.named(unit): f"{t['value']:.3f}, share {t['share']:.3f}" for unit, t in targets}, "explained:")
        show({name.replace("_", " "): value for name, value in summary.items() if name not in hidden}, "traced:")
        show(self.edges(), "edges that carry most, and the last heads on their way:")
        loadings = self.graph.loadings
        if loadings is not None and len(loadings):
            heads = list(weigh_heads(self.pruned, loadings).items())[:SHOWN]
            show({f"{layer}.{head}": size for (layer, head), size in heads}, "heads by the influence they carry:")
        if "edge" in summary:
            numbers = {name.replace("_", " "): value for name, value in summary["edge"].items() if name != "heads"}
            show(numbers | dict(list(summary["edge"]["heads"].items())[:SHOWN]), "edge asked for, and its heads:")
        for split, table in zip(scores, self.graph.attention, strict=True):
            way = f"{self.graph.tokens[split.query]!r} → {self.graph.tokens[split.key]!r}"
            show(self.pairs(table), f"{split.unit.id}, {way}: {split.score:.3f} above the mean key")
        show(summary["cpu_seconds"], "CPU seconds:")

    def edges(self) -> dict[str, str]:
        """The edges that carry most, with their heads."""
        rows, loadings = {}, self.graph.loadings
        for edge in np.argsort(-self.pruned.carried, kind="stable")[:SHOWN].tolist():
            ends = (self.graph.units[places[edge]] for places in (self.graph.source, self.graph.target))
            heads = {} if loadings is None else loadings.of(edge)
            named = [f"{layer}.{head} {weight:+.3f}" for (layer, head), weight in list(heads.items())[:HEADS]]
            rows[" → ".join(self.named(unit.id) for unit in ends)] = ", ".join(
                [f"{self.graph.weight[edge]:+.3f}", *named]
            )
        return rows

    def pairs(self, table: AttentionTable) -> dict[str, float]:
        """The pairs with the largest share of a score."""
        return {f"{self.named(i)} × {self.named(j)}": weight for i, j, weight in table.pairs[:PAIRS]}

    def named(self, name: str) -> str:
        """A unit with its token: the predicted one for logits, for others the one that they stand at."""
        unit = Unit.parse(name)
        if unit.kind == "logit" and unit.index is not None:
            return f"{name} {self.model.token_strings([unit.index])[0]!r}"
        return name if unit.position is None else f"{name} {self.graph.tokens[unit.position]!r}"
