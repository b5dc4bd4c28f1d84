"""`clearhead circuit global`: the circuit of a model whose layers dictionaries replace, as a graph that view draws.

Writes `graph/`, one unit per attention pattern, `heads/`, the same circuit among single heads and features
(circuits/replacement/global_graph.py), and `summary.json` with what replacing costs on the same tokens, which says how
far the circuit is that of the model, and what the loss is without each pattern.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.replacement.global_graph import SILENCED_BLOCKS, trace_global
from clearhead.circuits.replacement.measure import measure_replacement
from clearhead.commands.opening.structure import without_weights
from clearhead.commands.printing.table import say, show
from clearhead.config import CircuitGlobal
from clearhead.configfile import refuse_other_run
from clearhead.data.repeats import NAME, alphabet_of, repeated_sequences
from clearhead.data.text import token_blocks
from clearhead.dictionaries.load import load_dictionary_of
from clearhead.model.access import Model
from clearhead.runs import RunDirectory
from clearhead.units import Graph, Unit
from clearhead.units.bundle import save_graph

SHOWN = 12
SOURCES = 3


def plan(config: CircuitGlobal) -> dict[str, Any]:
    """What will be drawn, without loading weights."""
    model = without_weights(config.model)
    return {
        "model": config.model,
        "layers": model.n_layers,
        "dictionaries": list(config.dictionaries),
        "text": _text(config),
        "blocks": -(-config.tokens // config.context),
        "edges": config.edges,
        "directory": config.directory(),
    }


def run(config: CircuitGlobal) -> None:
    """Draw, write the run directory, print the edges that matter most."""
    refuse_other_run(config.directory(), config)
    model = Model.load(config.model, dtype=config.dtype, device=config.device)
    dictionaries = Dictionaries(model, map(load_dictionary_of, config.dictionaries))
    tokens = _tokens(config, model)
    with RunDirectory(config.directory()) as directory:
        directory.write_config(config.to_dict())
        # of random tokens, only those of the second half can be known
        first = config.context // 2 + 1 if config.repeats else 2
        circuit = trace_global(model, dictionaries, tokens, edges=config.edges, text=_text(config), counted_from=first)
        save_graph(circuit.patterns, directory.path / "graph")
        save_graph(circuit.heads, directory.path / "heads")
        cost = measure_replacement(model, dictionaries, tokens)
        summary = {
            "model": model.name,
            "model_note": model.note,
            "dictionaries": dictionaries.describe(),
            "text": _text(config),
            "edges": {"patterns": len(circuit.patterns), "heads": len(circuit.heads)},
            **{name: value for name, value in cost.to_dict().items() if name not in ("curve", "places")},
            "loss_counted_from": first,
            "loss_blocks": min(len(tokens), SILENCED_BLOCKS),
            "loss": circuit.loss,
            "loss_replaced": circuit.loss_replaced,
            "loss_without": {unit.id: loss for unit, loss in circuit.loss_without.items()},
        }
        directory.write_summary(summary)
    told = {name: value for name, value in summary.items() if name not in ("model", "model_note", "loss_without")}
    show({name.replace("_", " "): value for name, value in told.items()}, "circuit of the replaced model:")
    graph = circuit.patterns
    _say_edges(graph, "between patterns, what matters most for the logits first:")
    say(f"loss from token {first} on without each ({circuit.loss_replaced:.3f} with all); what feeds it, of the edges:")
    for unit, loss in circuit.loss_without.items():
        if unit not in graph:
            continue
        say(f"  {_named(graph, unit)}  {loss:.3f}")
        for kind, word in (("head_k", "keys"), ("head_q", "queries"), (unit.kind, "values")):
            into = Unit(kind, unit.layer, unit.index)
            if unit.kind == "head" and (fed := _sources(graph, into)):
                say(f"      {word}: {fed}")
    place = directory.path
    say(f"next: clearhead view {place}; clearhead view {place / 'heads'} for single heads")


def _say_edges(graph: Graph, words: str) -> None:
    say(words)
    for edge in range(min(SHOWN, len(graph))):
        ends = [graph.units[place] for place in (graph.source[edge], graph.target[edge])]
        say(f"  {' → '.join(_named(graph, unit) for unit in ends)}  {graph.weight[edge]:+.3g}")


def _sources(graph: Graph, target: Unit) -> str:
    """The heaviest kept edges into a unit, each with its share of their Σ|weight|; what looks for it is no source."""
    if target not in graph:
        return ""
    edges = np.flatnonzero(graph.target == graph.place(target))
    edges = [edge for edge in edges.tolist() if graph.units[graph.source[edge]].kind not in ("head_k", "head_q")]
    total = float(np.abs(graph.weight[edges]).sum())
    edges.sort(key=lambda edge: -abs(graph.weight[edge]))
    named = ((graph.units[graph.source[edge]], float(graph.weight[edge])) for edge in edges[:SOURCES])
    return ", ".join(f"{unit} {weight:+.3g} ({abs(weight) / total:.0%})" for unit, weight in named)


def _named(graph: Graph, unit: Unit) -> str:
    return f"{unit} {graph.labels[unit.id]!r}" if unit.id in graph.labels else unit.id


def _text(config: CircuitGlobal) -> str:
    return NAME if config.repeats else f"{config.text} ({config.split})"


def _tokens(config: CircuitGlobal, model: Model) -> Int64[Tensor, "b t"]:
    """Blocks of the text, or of random tokens of which the second half repeats the first."""
    if config.repeats:
        count = torch.arange(-(-config.tokens // config.context))
        alphabet = alphabet_of(model._tokenizer())
        return repeated_sequences(config.seed, count, config.context, alphabet, config.context // 2)
    return token_blocks(
        model, config.text, split=config.split, n_tokens=config.tokens, context=config.context, at_most=True
    ).tokens
