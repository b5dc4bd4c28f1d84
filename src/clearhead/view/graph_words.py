"""What the numbers on the page of a graph mean, in one or two sentences; the page shows them behind every `?`."""

from collections.abc import Mapping

_MARKS = (
    "A mark is a unit, a line an edge: how much the lower unit contributes to the upper one. Blue lines add, red "
    "dashed lines subtract; the wider, the heavier. Choose a unit or a line to see its numbers."
)
OF_NO_PROMPT = "Rows are layers, tokens lowest; what a unit does is summed over all tokens of a text. " + _MARKS
"""Instead of `graph` where units have no positions."""

HELP: dict[str, str] = {
    "graph": (
        "Columns are the tokens of the prompt, rows are layers from the embedding below to the logits above. " + _MARKS
    ),
    "influence": (
        "Cumulative share of influence on the targets: units in order of influence, each with the share that it and "
        "all before it hold. Small is important; a slider at 80 % shows the units that hold the first 80 %. Targets, "
        "pinned units and the chosen one are always shown."
    ),
    "weight_rank": (
        "This graph holds no influence, so units are ordered by Σ|weight| of their edges, each with the share that it "
        "and all before it hold. Targets, pinned units and the chosen one are always shown."
    ),
    "edges": (
        "Edges in this order, the first that hold this share of the whole graph; of these, those whose ends are both "
        "shown are drawn. By |weight|: large numbers first, whatever they add to. By share of the input: |weight| over "
        "Σ|weight| into the same unit, which compares edges into features with edges into logits. By influence, where "
        "the graph is of no prompt: that share times the influence of the unit it enters."
    ),
    "in": (
        "Everything that contributes to this unit. Share: |weight| over Σ|weight| of all edges into this unit. Edges "
        "that the sliders hide are listed too, and marked."
    ),
    "out": (
        "Everything that this unit contributes to. Share: |weight| over Σ|weight| of all edges into the other unit. "
        "Edges that the sliders hide are listed too, and marked."
    ),
    "balance": (
        "Sum of all edges into this unit, with their signs. Where the graph is complete, this and the unit's own "
        "constants give its pre-activation."
    ),
    "errors_in": (
        "Share of |weight| into this unit that comes from errors: what dictionaries leave unexplained, and whole "
        "layers that have none. High: read the rest with care."
    ),
    "activation": "How active the unit is at its position, on this prompt.",
    "loadings": (
        "The attention heads that carry this edge, with their share of Σ|loading|. What is counted, and whether the "
        "numbers of several layers add up, stands beside the title."
    ),
    "heads_needed": (
        "The fewest heads, largest first, whose |loadings| reach 90 % of Σ|loading| of the heads that the graph holds "
        "for this edge. A graph may hold only those that carry most."
    ),
    "head_map": "Σ|loading| over all edges of the graph that have loadings, by layer and head. Darker is more.",
    "edge_map": "Loadings of this edge by layer and head. Blue carries in the edge's favour, red against it.",
    "attention": (
        "Why a query looks at a key: the score before the softmax is a sum over pairs of a unit on the query side and "
        "a unit on the key side. Blue raises the score, red lowers it."
    ),
    "pairs": "Pairs of a query-side and a key-side unit, the largest first. Share: of the sum over all pairs.",
    "marginals": "What one unit contributes, summed over all units of the other side.",
    "modes": "The same pairs split over the singular modes of the head's query-key matrix.",
    "against": "Softmax sees differences only; this table explains the score minus that of the key named here.",
    "supernodes": (
        "Named groups of units, saved with the graph. Pin units, name the group, download: the file holds the groups "
        "in the form of the graph's own folder, and this page loads it again."
    ),
    "between": (
        "Sum of the edges from the units of one group to those of another, or to a target, with their signs. Direct "
        "edges only: what goes through units outside both is not counted."
    ),
    "sides": (
        "Two graphs laid over each other. Filled units are in both, hollow ones in one alone: a ring of the first "
        "colour for the first graph, of the second for the second. Edges are drawn by their weight in the first minus "
        "that in the second."
    ),
}

LOADINGS: dict[str, str] = {
    "one": "Paths through this head and no other. They add up over layers; paths through several heads are left out.",
    "last": "Paths whose last head this is. With what passes no head, all heads add up to the edge.",
    "first": "Paths whose first head this is. With what passes no head, all heads add up to the edge.",
    "any": "All paths through this head. They add up within a layer and not over layers.",
}
"""What is counted, by the first word of the loadings' kind."""
SCORES: dict[str, tuple[str, str]] = {
    "replacement": (
        "Replacement score",
        "Of the influence on the targets that ends at tokens, at errors or unexplained, the share of tokens. 100 %: "
        "the units explain every path from the prompt to the answer. Computed before pruning.",
    ),
    "completeness": (
        "Completeness",
        "Of the input of every unit, weighted by its influence, the share that does not come from errors. It forgives "
        "errors that the replacement score counts along whole paths. Computed before pruning.",
    ),
    "replacement_pruned": (
        "Replacement, pruned",
        "The replacement score of the graph on this page: what pruning removed counts as error.",
    ),
    "completeness_pruned": (
        "Completeness, pruned",
        "The completeness of the graph on this page: what pruning removed counts as error.",
    ),
    "error_share": (
        "Error share",
        "Of the influence on the targets, the share that ends at errors: what dictionaries leave unexplained, and "
        "whole layers that have none.",
    ),
}
"""Label and meaning of the scores that we know; others are shown under their own name."""
LOSSES: dict[str, tuple[str, str]] = {
    "loss": ("Loss of the model", "Nats per token that the model itself loses on the tokens that were counted."),
    "loss_replaced": (
        "Loss replaced",
        "The same with every dictionary in place of what it imitates. Near the model's: the circuit drawn is one that "
        "does what the model does. The loss without single units is among their values.",
    ),
}
"""The same for scores that are losses."""


def score_tiles(scores: Mapping[str, float]) -> list[dict[str, str]]:
    """The scores as large numbers: those we know first, as percentages."""
    tiles = []
    known = SCORES | LOSSES
    for name in [*(name for name in known if name in scores), *(name for name in scores if name not in known)]:
        label, meaning = known.get(name, (name.replace("_", " ").capitalize(), ""))
        tiles.append({"label": label, "value": _written(name, scores[name]), "help": meaning, "small": ""})
    return tiles


def compared_tiles(first: Mapping[str, float], second: Mapping[str, float]) -> list[dict[str, str]]:
    """The scores of the first graph, with those of the second beside them."""
    shared = {name: value for name, value in first.items() if name in second}
    others = score_tiles({name: second[name] for name in shared})
    return [
        tile | {"small": f"against {other['value']}"} for tile, other in zip(score_tiles(shared), others, strict=True)
    ]


def _written(name: str, score: float) -> str:
    if name in LOSSES:
        return f"{score:.3f}"
    share = name in SCORES or name.endswith(("_share", "_score"))
    return (f"{100 * score:.1f} %" if share else f"{score:.4g}").replace("-", "−")
