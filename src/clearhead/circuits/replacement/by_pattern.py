"""The circuit at the level of attention patterns: what the heads of one pattern do is one unit.

    head.L.p                     the Lorsa heads of layer L that share pattern p; edges into it enter their values
    head_k.L.p, head_q.L.p       its keys and queries, as among single heads
    mlp.L                        all features of layer L
    input, positions             all token embeddings, all position embeddings
    target.0                     the logit of the token that comes next, whichever it is

An edge is the sum of all edges between the members (incoming.py), so that one path through a thousand rank-1 pieces is
one line. A pattern's label says where it looks: the kind of key that holds most of its attention, and which share.
"""

from collections.abc import Mapping

from clearhead.circuits.replacement.coactivity import CoActivity
from clearhead.units import Unit

NEXT = Unit("target", index=0)
TOLD = 0.4
"""Share of a pattern's attention from which its label names a kind of key."""


def group_of(unit: Unit, sizes: Mapping[int, int]) -> Unit:
    """The unit of this level that a single one belongs to; `sizes` are heads per pattern, by layer."""
    match unit.kind:
        case "lorsa":
            return Unit("head", unit.layer, (unit.index or 0) // sizes[unit.layer or 0])
        case "feature":
            return Unit("mlp", unit.layer)
        case "embedding":
            return Unit("input")
        case "logit":
            return NEXT
        case _:
            return unit


def label_patterns(activity: CoActivity) -> dict[Unit, str]:
    """Words for the units of this level."""
    attention = activity.attention()
    labels = {Unit("input"): "tokens", Unit("positions"): "positions", NEXT: "next token"}
    for layer in range(activity.model.n_layers):
        labels[Unit("mlp", layer)] = f"MLP {layer}"
        for p in range(activity.dictionaries.attention[layer].config.n_patterns):
            looks = attention.get(Unit("head_k", layer, p), {})
            kind = max(looks, key=looks.__getitem__, default="")
            told = f": {kind} {looks[kind]:.0%}" if looks and looks[kind] >= TOLD else ""
            labels[Unit("head", layer, p)] = f"pattern {p}{told}"
            labels[Unit("head_k", layer, p)] = f"keys of {p}"
            labels[Unit("head_q", layer, p)] = f"queries of {p}"
    return labels
