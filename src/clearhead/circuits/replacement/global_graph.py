"""The circuit of a whole model whose layers dictionaries replace, once for all prompts: weights times co-activity.

Edges are those of coactivity.py; the strongest for the logits are kept (strongest.py). Two graphs of the same circuit:

    patterns  all heads of one attention pattern as one unit, whose edges are the sums (by_pattern.py)
    heads     single Lorsa heads, features, tokens and logits

The edges are what the weights say. What the replaced model does without a pattern's heads, or a group of features, is
measured beside them (edits.py): how many nats its loss rises by when they are silent.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from clearhead.circuits.replacement.by_pattern import Grouping
from clearhead.circuits.replacement.coactivity import CoActivity
from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.replacement.edits import in_place, losses
from clearhead.circuits.replacement.strongest import graph_of, strongest
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.runs import environment, progress
from clearhead.units import Graph, Provenance, Unit

PROTOCOL = (
    "global circuit of the replaced model: weight = virtual weight times mean co-activation; edges into keys and "
    "queries are in units of the score, all others in those of what they enter"
)
SUMMED = "; summed over all heads of a pattern, all features of a layer, all tokens"
SIDES = ("head", "head_k", "head_q")
SILENCED_BLOCKS = 16  # the loss without each pattern is measured on


class GlobalCircuit(NamedTuple):
    """One circuit as two graphs, and the losses (nats) that say how far it is that of the model."""

    patterns: Graph
    heads: Graph
    loss: float
    """Of the model."""
    loss_replaced: float
    loss_without: dict[Unit, float]
    """Of the replaced model with the heads of a pattern (`head.L.p`) or a group of features silent."""


def trace_global(
    model: Model,
    dictionaries: Dictionaries,
    tokens: Int[Tensor, "b t"],
    *,
    edges: int = 600,
    text: str = "",
    counted_from: int = 2,
) -> GlobalCircuit:
    """The `edges` edges of the replaced model that matter most, over blocks of tokens; each graph holds them in order.

    Losses are of the predictions of tokens `counted_from`, and later ones, of the first blocks.
    Raises `ClearheadError` for blocks of less than three tokens, and what `CoActivity` raises.
    """
    if tokens.dim() != 2 or tokens.shape[1] < 3 or not len(tokens):
        raise ClearheadError(f"expected blocks of at least 3 tokens, [b, t]; got {list(tokens.shape)}")
    activity = CoActivity(model, dictionaries)
    with progress("circuit", tokens.numel()) as advance:
        for block in tokens:
            activity.add(block.to(model.device))
            advance(block.numel())
    grouping = Grouping(activity)
    few, members = tokens[:SILENCED_BLOCKS], {}
    for unit in activity.rates():
        if unit.layer is not None:
            members.setdefault(grouping(unit), []).append(unit)
    with progress("silence", len(members), "units") as advance:
        without = {}
        for group, units in members.items():
            without[group] = _loss(model, few, in_place(dictionaries, units), counted_from)
            advance(1)
    loss, replaced = (_loss(model, few, edit, counted_from) for edit in ({}, in_place(dictionaries)))
    rise = {group: value - replaced for group, value in without.items()}
    patterns, heads = draw(activity, grouping, edges, text, rise, {"loss": loss, "loss_replaced": replaced})
    return GlobalCircuit(patterns, heads, loss, replaced, without)


def _loss(model: Model, tokens: Int[Tensor, "b t"], edit: dict, counted_from: int) -> float:
    return float(losses(model, tokens, edit)[:, counted_from - 1 :].mean())


@torch.no_grad()
def draw(
    activity: CoActivity,
    grouping: Grouping,
    edges: int,
    text: str,
    rise: dict[Unit, float],
    scores: dict[str, float],
) -> tuple[Graph, Graph]:
    """Both graphs of what was accumulated; `rise` is of the loss by unit."""
    values = {}
    for unit, shares in activity.attention().items():
        for kind, share in shares.items():
            same = {Unit(side, unit.layer, unit.index): share for side in SIDES}
            values.setdefault(f"attention to {kind}", {}).update(same)
    name, versions = activity.model.name, environment()["versions"]
    summed = (block.summed(grouping) for block in activity.incoming())
    kept, influence = strongest(summed, edges)
    provenance = Provenance(name, PROTOCOL + SUMMED, prompt=text, versions=versions)
    patterns = graph_of(
        kept,
        influence,
        provenance,
        labels=grouping.words,
        values={"rise of the loss without it": rise, **values},
        scores=scores,
    )
    kept, influence = strongest(activity.incoming(), edges)
    provenance = Provenance(name, PROTOCOL, prompt=text, versions=versions)
    words = grouping.words | _token_strings(activity.model, influence)
    values = {"rate": activity.rates(), **values}
    return patterns, graph_of(kept, influence, provenance, labels=words, values=values, scores=scores)


def _token_strings(model: Model, units: Iterable[Unit]) -> dict[Unit, str]:
    """The vocabulary's words for embeddings and logits; none without a tokenizer."""
    if model.tokenizer is None:
        return {}
    tokens = [unit for unit in units if unit.kind in ("embedding", "logit")]
    return dict(zip(tokens, model.token_strings([unit.index or 0 for unit in tokens]), strict=True))
