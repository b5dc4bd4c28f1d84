"""The circuit at the level of attention patterns: what the heads of one pattern do is one unit.

    head.L.p                     the Lorsa heads of layer L that share pattern p; edges into it enter their values
    head_k.L.p, head_q.L.p       its keys and queries, as among single heads
    features.L.n                 the features of layer L that unit n of this list gives most to
    input, positions             all token embeddings, all position embeddings
    target.0                     the logit of the token that comes next, whichever it is

An edge is the sum of all edges between the members (incoming.py), so that one path through a thousand rank-1 pieces is
one line. One MLP does many things at once; its features are told apart by what feeds them (the largest edge from a unit
of this level), so that a path through an MLP remains one. A pattern's label says where it looks: the kind of key that
holds most of its attention, and which share.
"""

from clearhead.circuits.replacement.coactivity import CoActivity
from clearhead.units import Unit

NEXT = Unit("target", index=0)
TOKENS, POSITIONS = Unit("input"), Unit("positions")
TOLD = 1 / 3
"""Share of a pattern's attention from which its label names a kind of key."""


class Grouping:
    """To which unit of this level a single one belongs, and words for those units."""

    def __init__(self, activity: CoActivity):
        lorsas = activity.dictionaries.attention
        self._sizes = {layer: one.config.pattern_size for layer, one in lorsas.items()}
        self._fed: dict[Unit, Unit] = {}
        self.words = {TOKENS: "tokens", POSITIONS: "positions", NEXT: "next token"}
        attention, below = activity.attention(), [TOKENS, POSITIONS]
        for layer, lorsa in sorted(lorsas.items()):
            for p in range(lorsa.config.n_patterns):
                looks = attention.get(Unit("head_k", layer, p), {})
                kind = max(looks, key=looks.__getitem__, default="")
                told = f": {kind} {looks[kind]:.0%}" if looks and looks[kind] >= TOLD else ""
                self.words[Unit("head", layer, p)] = f"pattern {layer}.{p}{told}"
                self.words[Unit("head_k", layer, p)] = f"keys {layer}.{p}"
                self.words[Unit("head_q", layer, p)] = f"queries {layer}.{p}"
                below.append(Unit("head", layer, p))
            if layer in activity.dictionaries.mlp:
                below += self._divide(activity, layer, below)

    def __call__(self, unit: Unit) -> Unit:
        """The unit of this level."""
        match unit.kind:
            case "lorsa":
                return Unit("head", unit.layer, (unit.index or 0) // self._sizes[unit.layer or 0])
            case "feature":
                return self._fed[unit]
            case "embedding":
                return TOKENS
            case "logit":
                return NEXT
            case _:
                return unit

    def _divide(self, activity: CoActivity, layer: int, below: list[Unit]) -> list[Unit]:
        """Assigns each feature of a layer to what gives most to it; returns the groups."""
        block = activity.into_features(layer)
        fed = block.summed(lambda unit: unit if unit.kind == "feature" and unit.layer == layer else self(unit))
        groups = {}
        for feature, row in zip(fed.targets, fed.weight.argmax(0).tolist(), strict=True):
            source = fed.sources[row]
            group = Unit("features", layer, below.index(source))
            self._fed[feature] = groups[group] = group
            told = self.words[source]
            name = told.replace(": fed by", " of") if source.kind == "features" else told.split(": ")[0]
            self.words[group] = f"MLP {layer}: fed by {name}"
        return sorted(groups, key=lambda group: group.index or 0)
