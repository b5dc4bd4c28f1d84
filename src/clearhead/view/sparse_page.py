"""The page of a sparse model: how few edges it attends through, at which price, and which edges they are.

The frame is that of every page (`view.shell`); the list holds the heads, those with most open edges first. Charts are
`view.sparse_figures`, sentences and explanations `view.sparse_words`. No model is needed: everything comes from what
`clearhead evaluate` wrote and from the run's metrics.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from clearhead.view import sparse_figures as figures
from clearhead.view.packing import Vocabulary, brief, pack
from clearhead.view.shell import Contents, render, write_within
from clearhead.view.sparse_words import (
    CONTROLS,
    FORMS,
    HELP,
    Numbers,
    allowed_loss,
    outcome,
    share,
    signed,
    verdict,
)
from clearhead.view.summary import plotly_json
from clearhead.view.visible import visible

CLOSED = 0.01
"""Edges per query below which a head counts as closed."""
Section = dict[str, Any]
"""A heading with its charts and tables: {title, charts, tables}."""


def write_sparse_page(out: Path, evaluation: Numbers, sentences: Sequence[Numbers], metrics: Sequence[Numbers]) -> Path:
    """Write the page and return its path.

    `evaluation` is evaluation.json, `sentences` what `sparsify.sentences` found, `metrics` the lines of metrics.jsonl,
    none for a model without its run. Raises `ClearheadError` when the disk is full.
    """
    vocabulary = Vocabulary()
    tokens = [[vocabulary.place(token) for token in sentence["tokens"]] for sentence in sentences]
    name = evaluation["base"] or evaluation["model"]
    pill, inside = outcome(evaluation)
    contents = Contents(
        index={
            "vocab": vocabulary.entries,
            "help": HELP,
            "title": visible(f"{name}, sparse"),
            "outcome": {"text": pill, "good": inside},
            "verdict": verdict(evaluation),
            "tiles": tiles(evaluation),
            "heads": head_columns(evaluation),
            "sections": [
                section for section in _sections(evaluation, metrics) if section["charts"] + section["tables"]
            ],
            "sentences": tokens,
            "layers": evaluation["layers"],
            "chosen": telling_head(evaluation, sentences),
        },
        parts={"layers": [pack(_edges(sentences, place)) for place in range(len(evaluation["layers"]))]},
        scripts=("edges.js", "sparse.js"),
        styles=("toy.css", "sparse.css"),
        items="Heads",
    )
    return write_within(out, [render(contents, _about(evaluation))], 25.0, "with all its heads")


def _about(evaluation: Numbers) -> Numbers:
    training = evaluation["training"]
    about = {
        "model": evaluation["base"] or evaluation["model"],
        "task": f"sparse, tolerance {training['tolerance']}" if training["target"] is None else "sparse, from scratch",
    }
    kept = ("model_note", "text", "text_sha256", "tokens", "context", "split", "training", "config", "environment")
    return about | {key: evaluation[key] for key in kept}


def tiles(evaluation: Numbers) -> list[dict[str, str]]:
    """The large numbers, each with what it is to be compared with."""
    ce, edges, first = evaluation["ce"], evaluation["edges"], evaluation["first_token"]
    training = evaluation["training"]
    visible_keys = (evaluation["context"] + 1) / 2
    per_query = [value for row in evaluation["by_head"]["per_query"] for value in row]
    closed = sum(value < CLOSED for value in per_query)
    rows = [("per_query", "Edges/query", f"{edges['per_query']:.3g}", f"of {visible_keys:g}")]
    rows.append(("share", "Open edges", share(edges["share"]), f"expected {share(edges['expected_share'])}"))
    if ce["base"] is not None:
        held = "" if training["tolerance"] is None else f"allowed {training['tolerance']:g}"
        if training["target"] is not None:
            held = "base: not trained"
        rows.append(("rise", "Rise of the loss", signed(ce["hard"] - ce["base"]), held))
    rows.append(("empty_rows", "Empty rows", share(edges["empty_rows"]), ""))
    rows.append(("heads_closed", "Closed heads", str(closed), f"of {len(per_query)}"))
    rows.append(("leak", "Leak", share(edges["leak"]), ""))
    before = "" if first["base"] is None else f"base {share(_mean(first['base']))}"
    rows.append(("first", "First token", share(_mean(first["after_gates"])), before))
    return [{"name": name, "label": label, "value": value, "small": small} for name, label, value, small in rows]


def head_columns(evaluation: Numbers) -> dict[str, list[Any]]:
    """A row per head: its name, place and numbers."""
    columns: dict[str, list[Any]] = {}
    measured = evaluation["by_head"]
    for row, layer in enumerate(evaluation["layers"]):
        for head, per_query in enumerate(measured["per_query"][row]):
            values = {
                "id": f"head.{layer}.{head}",
                "name": f"{layer}.{head}",
                "layer": layer,
                "row": row,
                "head": head,
                "per_query": brief(per_query),
                "share": brief(measured["share"][row][head]),
                "distance": brief(measured["distance"][row][head]),
            }
            for name, value in values.items():
                columns.setdefault(name, []).append(value)
    return columns


def telling_head(evaluation: Numbers, sentences: Sequence[Numbers]) -> list[int]:
    """Row and head that the summary shows, by the first sentence: the one that reads with the fewest of its edges.

    Of the heads that open an edge in most rows, and most of their edges not to the first token, the one that opens the
    smallest share of the edges that the base has (of all pairs, without a base). Where there is none, the sparsest.
    """
    shares = evaluation["by_head"]["share"]
    places = [(value, row, head) for row, values in enumerate(shares) for head, value in enumerate(values)]
    telling = []
    for _, row, head in places if sentences else []:
        layer = sentences[0]["layers"][row]
        opened = _flat(layer["model"][head])
        keys, size = opened[1::3], len(layer["model"][head])
        if len(set(opened[::3])) > size / 2 and keys.count(0) < len(keys) / 2:
            dense = size * (size + 1) / 2 if layer["base"] is None else len(_flat(layer["base"][head])) / 3
            telling.append((len(keys) / dense, row, head))
    _, row, head = min(telling or places)
    return [row, head]


def _edges(sentences: Sequence[Numbers], place: int) -> list[list[Numbers]]:
    """Of a layer, per head and sentence: query, key, thousandths of every edge, in one list."""
    n_heads = len(sentences[0]["layers"][place]["model"]) if sentences else 0
    found = []
    for head in range(n_heads):
        per_sentence = []
        for sentence in sentences:
            layer = sentence["layers"][place]
            base = None if layer["base"] is None else _flat(layer["base"][head])
            per_sentence.append({"model": _flat(layer["model"][head]), "base": base})
        found.append(per_sentence)
    return found


def _flat(rows: Sequence[str]) -> list[int]:
    flat = []
    for query, row in enumerate(rows):
        for edge in row.split():
            key, weight = edge.split(":")
            flat += [query, int(key), int(weight)]
    return flat


def _sections(evaluation: Numbers, metrics: Sequence[Numbers]) -> list[Section]:
    return [
        _section(
            "What it costs", [("by_position", "Rise by position", _by_position(evaluation))], [_losses(evaluation)]
        ),
        _section("How few edges", _edge_charts(evaluation), []),
        _section("Do these edges matter?", [], [_controls(evaluation)]),
        _section("The first token", _first_token(evaluation), []),
        _section("What it can still do", [], [_tasks(evaluation), _induction(evaluation), *_retrieval(evaluation)]),
        _section("Training", _training(evaluation, metrics), []),
    ]


def _section(
    title: str, charts: Sequence[tuple[str, str, go.Figure | None]], tables: Sequence[Numbers | None]
) -> Section:
    return {
        "title": title,
        "charts": [
            {"name": name, "title": words, "help": HELP[name], **plotly_json(figure)}
            for name, words, figure in charts
            if figure is not None
        ],
        "tables": [table for table in tables if table is not None],
    }


def _table(name: str, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], words: int = -1) -> Numbers:
    """A table as texts; column number `words` holds sentences."""
    texts = [[visible(cell) if cell else "" for cell in row] for row in rows]
    return {"title": title, "help": HELP[name], "head": list(head), "rows": texts, "words": words}


def _by_position(evaluation: Numbers) -> go.Figure | None:
    if evaluation["ce"]["base"] is None:
        return None
    bins = evaluation["ce_by_position"]
    names = [f"{b['first']}" if b["first"] == b["last"] else f"{b['first']}–{b['last']}" for b in bins]
    forms = {FORMS[form].label: [b[form] - b["base"] for b in bins] for form in ("hard", "opened")}
    return figures.by_position(names, forms)


def _losses(evaluation: Numbers) -> Numbers:
    ce = evaluation["ce"]
    rows = []
    for form, words in FORMS.items():
        if ce[form] is not None:
            over = "" if ce["base"] is None or form == "base" else signed(ce[form] - ce["base"])
            rows.append((words.label, f"{ce[form]:.4f}", over, words.says))
    allowed = allowed_loss(evaluation)
    if allowed is not None:
        over = "" if ce["base"] is None else signed(allowed - ce["base"])
        rows.append(("allowed", f"{allowed:.4f}", over, "What the loss with hard gates was to stay below."))
    return _table("losses", "Loss", ("form", "nats", "over the base", "what it is"), rows, words=3)


def _edge_charts(evaluation: Numbers) -> list[tuple[str, str, go.Figure | None]]:
    lengths, layers, by_layer = evaluation["lengths"], evaluation["layers"], evaluation["by_layer"]
    columns = {name: [row[name] for row in lengths] for name in ("length", "per_query", "expected_per_query")}
    shares = {"rows without an edge": by_layer["empty_rows"], "mass on closed edges": by_layer["leak"]}
    return [
        ("heads", "Edges per query, by head", figures.heads(layers, evaluation["by_head"]["per_query"])),
        ("lengths", "Edges by length", figures.by_length(*columns.values()) if len(lengths) > 1 else None),
        ("by_layer", "Empty rows and leak", figures.by_layer(layers, shares, "share")),
        ("distances", "How far edges reach", figures.distances(layers, by_layer["distance"])),
        ("empty_tiles", "Empty tiles", figures.empty_tiles(layers, evaluation["empty_tiles"])),
    ]


def _controls(evaluation: Numbers) -> Numbers:
    measured = evaluation["controls"]
    rows = [("hard gates", f"{measured['hard']:.4f}", "", "The sparse model, on the tokens of this table.")]
    if measured["base"] is not None:
        over = signed(measured["base"] - measured["hard"])
        rows.append(("dense base", f"{measured['base']:.4f}", over, "All edges, on the tokens of this table."))
    for name, words in CONTROLS.items():
        if measured[name] is not None:
            over = signed(measured[name] - measured["hard"])
            rows.append((words.label, f"{measured[name]:.4f}", over, words.says))
    head = ("which edges", "loss, nats", "over hard gates", "what it tells")
    title = f"Other edges, as many, on {evaluation['laid_out_tokens']:,} tokens"
    return _table("controls", title, head, rows, words=3)


def _first_token(evaluation: Numbers) -> list[tuple[str, str, go.Figure | None]]:
    first = evaluation["first_token"]
    shares = {} if first["base"] is None else {"dense base": first["base"]}
    shares |= {"before the gates": first["before_gates"], "after the gates": first["after_gates"]}
    shares |= {"rows without an edge": first["empty_rows"]}
    return [
        (
            "first_token",
            "Attention on the first token, by layer",
            figures.by_layer(evaluation["layers"], shares, "share"),
        )
    ]


def _tasks(evaluation: Numbers) -> Numbers:
    rows = []
    for name, found in evaluation["tasks"].items():
        words = name.replace("_", " ")
        if "refused" in found:
            rows.append((words, "", "", "", "", f"Not measured: {found['refused']}"))
            continue
        forms = ["–" if found[form] is None else share(found[form]["accuracy"]) for form in ("base", "hard", "opened")]
        base, hard = found["base"], found["hard"]
        change = ""
        if base is not None:
            change = (
                f"Mean logit difference {base['mean_difference']:.2f} in the base, {hard['mean_difference']:.2f} here."
            )
        rows.append((words, str(found["prompts"]), *forms, change.replace("-", "−")))
    head = ("task", "prompts", "dense base", "hard gates", "gates opened", "besides")
    return _table("tasks", "Tasks, prompts that are right", head, rows, words=5)


def _induction(evaluation: Numbers) -> Numbers:
    measured = evaluation["induction"]
    rows = [
        (FORMS[form].label, f"{measured[form]['first_half']:.3f}", f"{measured[form]['second_half']:.3f}")
        for form in ("base", "hard", "opened")
        if measured[form] is not None
    ]
    return _table("induction", "Random tokens said twice, loss", ("form", "first time", "second time"), rows)


def _retrieval(evaluation: Numbers) -> list[Numbers]:
    rows = []
    for kind, lengths in evaluation["retrieval"].items():
        for found in lengths:
            place = (kind, f"{found['length']:,}")
            if "refused" in found:
                rows.append((*place, "", "", "", f"Not measured: {found['refused']}"))
                continue
            forms = [
                "–" if found[form] is None else share(_mean(found[form]["exact"]))
                for form in ("base", "hard", "opened")
            ]
            depths = ", ".join(
                f"{share(depth)}: {share(exact)}"
                for depth, exact in zip(found["depths"], found["hard"]["exact"], strict=True)
            )
            rows.append((*place, *forms, f"Hard gates by depth of the text: {depths}."))
    if not rows:
        return []
    head = ("what is hidden", "tokens", "dense base", "hard gates", "gates opened", "besides")
    return [_table("retrieval", "Found in a long text", head, rows, words=5)]


def _training(evaluation: Numbers, metrics: Sequence[Numbers]) -> list[tuple[str, str, go.Figure | None]]:
    """The curves of a training; none without its metrics."""
    start = next((row["base_ce"] for row in metrics if "base_ce" in row), None)
    if start is None:
        return []
    training = evaluation["training"]
    hard_from = training["hard_from_tokens"]
    watched = [row for row in metrics if "held_out_ce" in row]
    steps = [row for row in metrics if "multiplier" in row]
    drawn = {"expected, batch": "edges", "drawn, batch": "open_edges"}
    edges = {name: _curve(steps, key) for name, key in drawn.items()}
    edges["held-out text, hard"] = _curve(watched, "held_out_edges")
    absolute = training["target"] is not None
    allowed = training["tolerance"] + (training["target"] if absolute else 0.0)
    tokens, violations = _curve(steps, "violation")  # what the constraint measured, less its limit
    batch = (tokens, [None if value is None else value + allowed for value in violations])
    at, losses = _curve(watched, "held_out_ce")
    held_out = (at, [None if loss is None else loss - (0.0 if absolute else start) for loss in losses])
    title = "Loss and its limit" if absolute else "Rise of the loss and its limit"
    rise = figures.training_rise(batch, held_out, allowed, hard_from, "nats" if absolute else "nats over the base")
    return [
        ("training_edges", "Open edges", figures.training_edges(edges, hard_from)),
        ("training_rise", title, rise),
        ("multiplier", "The multiplier", figures.multiplier(_curve(steps, "multiplier"))),
    ]


def _curve(rows: Sequence[Numbers], key: str) -> figures.Curve:
    return [row["tokens"] for row in rows], [brief(row[key]) for row in rows]


def _mean(values: Sequence[float | None] | None) -> float | None:
    known = [value for value in values or [] if value is not None]
    return sum(known) / len(known) if known else None
