"""What the numbers of a sparse model mean, in words: the sentences of its page, of its tables, and behind every `?`."""

from typing import Any, NamedTuple

Numbers = dict[str, Any]

HELP: dict[str, str] = {
    "per_query": "Open edges of one head in one row of its attention: the keys that a query reads. Mean over rows.",
    "share": (
        "Open edges as a share of the visible pairs of query and key. It depends on the length of the sequences, so "
        "only shares at equal context can be compared; edges per query can be with more right."
    ),
    "rise": "Loss with hard gates minus the loss of the dense base on the same held-out tokens, in nats per token.",
    "heads_closed": "Heads that open fewer than one edge in a hundred rows on this text.",
    "empty_rows": (
        "Rows of a head without an open edge: there the head returns exactly zero. The softmax cannot do that, gates "
        "can."
    ),
    "leak": (
        "Softmax mass on closed edges. Their values are not read, but they stay in the denominator and so make the "
        "open ones smaller: closed is not cut, unless the model was trained with a sink (0 then)."
    ),
    "first": (
        "Part of attention on the first token of a sequence, mean over layers: in the base, and in the sparse model of "
        "what passes the gates, over rows where something passes."
    ),
    "distance": "Mean distance i − j between the query i and the key j of open edges, in tokens.",
    "training_edges": (
        "Share of open edges over the training: expected under σ(x) and drawn on the batch, and with hard gates on the "
        "held-out blocks that the run is watched on. Dotted: from there on gates are hard in training too."
    ),
    "training_rise": (
        "What the constraint holds: its value on the batch (noisy), and the rise of the loss with hard gates on the "
        "watched blocks. Dashed: what is allowed."
    ),
    "multiplier": (
        "The price λ of a nat against the share of open edges, which GECO raises while the constraint is violated and "
        "lowers while it is not. Where it comes to rest it says what a nat of tolerance buys: λ = −dE/dτ."
    ),
    "by_position": (
        "Loss over the base's, by the position of the predicted token. A rise that grows with the position would mean "
        "that what lies far back is lost first."
    ),
    "lengths": (
        "Open edges per query in the first L positions of the sequences, and half of L + 1, which a dense head reads. "
        "Flat: a head reads so many keys however many there are. Parallel to the dotted line: a share of them."
    ),
    "heads": "Open edges per query of every head, colours by their logarithm. Choose a head to see what it reads.",
    "by_layer": "Rows without an open edge, and softmax mass on closed edges, mean over the heads of each layer.",
    "distances": "Mean distance between query and key of the open edges of each layer, in tokens.",
    "first_token": (
        "Part of attention on the first token, three numbers that belong together. Before the gates: softmax mass on "
        "it. After: its part of what passes, over rows where something passes. Rows without an edge: where nothing "
        "does. Zero after the gates alone would not show that the mass left the first token: it may lie behind closed "
        "gates."
    ),
    "empty_tiles": (
        "Tiles of s x s pairs without an open edge, which a kernel could skip, of those that hold a visible pair."
    ),
    "losses": "Mean cross-entropy per predicted token on the same held-out text, in nats.",
    "controls": (
        "Do these edges matter, or would any others do? The loss with as many other edges open, on the same tokens."
    ),
    "tasks": "Share of prompts whose right answer has a larger logit than the wrong ones, the same prompts for all.",
    "induction": (
        "Loss on random tokens that are said twice. The first half cannot be predicted; the second only by whoever "
        "looks back to the first (induction). A tolerance on the mean loss can hide the loss of such a skill."
    ),
    "retrieval": (
        "A number or a fact hidden in a text, asked for at its end: share found word for word, mean over depths. Text "
        "of the length given."
    ),
    "sentences": (
        "Above the tokens the open edges of the sparse model, below them the attention of the dense base in the same "
        "head, from 1 % on; both read this sentence alone. An arc goes from the token that is read to the later one "
        "that reads; its width is the weight. Tokens underlined with dots read nothing. Point at a token to see its "
        "own arcs."
    ),
    "patterns": "The same as squares: rows are the tokens that read, columns those that are read, darker is more.",
}


class Words(NamedTuple):
    """A control: its name, and what it tells."""

    label: str
    says: str


CONTROLS: dict[str, Words] = {
    "top_in_row_base": Words(
        "base, largest of each row",
        "The dense base, untrained, with as many edges in every row as the gates open there: those of its largest "
        "weights. Far above hard gates: training found or made better edges than pruning would. Equal: pruning would "
        "have done.",
    ),
    "top_in_row_base_renormalised": Words(
        "the same, summing to 1",
        "As above, with the kept weights of a row scaled up to sum to 1, as top-k attention does.",
    ),
    "top_probability_base": Words(
        "base, largest of each head",
        "The dense base with as many edges in every head and text: those of the largest weights, wherever they are. A "
        "head may then read nothing in some rows, as gates may.",
    ),
    "random_base": Words(
        "base, edges by lot",
        "The dense base with each head's share of edges, drawn without a look at the text: what so many edges are "
        "worth anywhere.",
    ),
    "top_probability_sparse": Words(
        "sparse model, largest of each head",
        "The sparse model's weights with as many edges: those of its largest weights. Equal to hard gates: the gates "
        "open what is largest, and their threshold is all they add.",
    ),
    "random_sparse": Words(
        "sparse model, edges by lot",
        "The sparse model's weights with each head's share of edges drawn by lot. Near hard gates: the edges mean "
        "nothing. Training under random edges is a run of its own (--control random).",
    ),
}

FORMS: dict[str, Words] = {
    "base": Words("dense base", "The model that training began with."),
    "hard": Words(
        "hard gates", "The sparse model as it is used: an edge is open where its probability exceeds one half."
    ),
    "sampled": Words("sampled gates", "Gates drawn as in training; mean over seeds."),
    "opened": Words(
        "gates opened", "The sparse model's weights with all edges open; above hard gates where they got used to those."
    ),
}


def outcome(evaluation: Numbers) -> tuple[str, bool]:
    """Two or three words on whether the loss is where it was to be, and whether it is."""
    allowed = allowed_loss(evaluation)
    if allowed is None:
        return "no tolerance known", True
    inside = evaluation["ce"]["hard"] <= allowed
    held = "allowed loss" if evaluation["training"]["target"] is not None else "tolerance"
    return f"{'within' if inside else 'over'} the {held}", inside


def allowed_loss(evaluation: Numbers) -> float | None:
    """The largest loss that the run was to have, on the tokens of the evaluation; None where that is not known."""
    training, base = evaluation["training"], evaluation["ce"]["base"]
    start = base if training["target"] is None else training["target"]
    return None if start is None or training["tolerance"] is None else start + training["tolerance"]


def verdict(evaluation: Numbers) -> list[str]:
    """What the numbers say, a paragraph for each question."""
    ce, edges, controls = evaluation["ce"], evaluation["edges"], evaluation["controls"]
    visible = (evaluation["context"] + 1) / 2
    heads = sum(len(row) for row in evaluation["by_head"]["share"])
    said = [
        f"A query of a head reads {edges['per_query']:.3g} of the {visible:g} keys that it sees "
        f"({share(edges['share'])}), mean over {heads} heads in {len(evaluation['layers'])} layers and "
        f"{evaluation['tokens']:,} tokens that the run was neither trained nor chosen on. In "
        f"{share(edges['empty_rows'])} of the rows a head reads nothing."
    ]
    if ce["base"] is not None:
        rise = signed(ce["hard"] - ce["base"])
        said.append(f"The loss is {ce['hard']:.3f} nats, {rise} beside the dense base's{_held(evaluation)}.")
    if controls["base"] is not None:
        said.append(_beside_controls(evaluation))
    if edges["leak"] >= 0.0005:
        said.append(
            f"{share(edges['leak'])} of the softmax mass lies on closed edges: it carries nothing, yet makes what is "
            "open smaller (train with --sink against it)."
        )
    return said


def _beside_controls(evaluation: Numbers) -> str:
    """Whether training did better than leaving edges out of the base, all on the tokens of the controls."""
    controls = evaluation["controls"]
    names = ("hard", "top_in_row_base", "top_probability_base", "random_base")
    hard, of_row, of_head, lot = (controls[name] - controls["base"] for name in names)
    gain = (
        "less than each of these"
        if hard < min(of_row, of_head, lot)
        else "not less than the best of these: with so many edges left, training gains nothing over leaving edges out"
    )
    return (
        f"Cut to as many edges without training, the base's loss changes by {signed(of_row)} nats with the largest of "
        f"each row, {signed(of_head)} with the largest of each head, {signed(lot)} with edges by lot. The sparse "
        f"model's rise on the same {evaluation['laid_out_tokens']:,} tokens is {signed(hard)}, {gain}."
    )


def _held(evaluation: Numbers) -> str:
    training, allowed = evaluation["training"], allowed_loss(evaluation)
    if allowed is None:
        return ""
    if training["target"] is not None:
        return f"; it was to reach {allowed:.3f}"
    return f"; a rise of {training['tolerance']:g} was allowed"


def share(value: float | None) -> str:
    """A share in per cent with two or three digits; a dash for none."""
    if value is None:
        return "–"
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def signed(value: float, digits: int = 4) -> str:
    """A difference of losses, its sign always written."""
    return f"{value:+.{digits}f}".replace("-", "−")
