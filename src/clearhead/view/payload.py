"""The data of a page: an atlas turned into one small index and many packed parts that the browser opens when needed.

The index (plain JSON) holds what the list of units, the search and the summary need. Parts are gzipped JSON in base64:
`units` parts with `UNITS_PER_PART` units and their examples, `texts` parts with `BLOCKS_PER_PART` token blocks. An
example stores a place in a block, not its words, so a text shown by a thousand units is embedded once. Tokens are
replaced by `visible.visible` and written once, in `index["vocab"]`.

What is left out to bound the size is counted in `index["limits"]`, which the page shows.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clearhead.atlas.read import Atlas, Row
from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.view.card_payload import Cards
from clearhead.view.packing import Vocabulary, brief, divide, group_by, pack
from clearhead.view.spread import host, spans

UNITS_PER_PART = 32
BLOCKS_PER_PART = 16
ARCS_PER_PATTERN = 32
"""Source tokens kept per pattern, by size; the sum of the others is added to the pattern's rest."""
CATEGORIES = ("top", "quantile", "negative")
FORMULAS = ("output", "weights", "routing")


@dataclass
class Payload:
    """Everything a page embeds: the index and the packed parts, in order."""

    index: dict[str, Any]
    units: list[str]
    texts: list[str]


def build_payload(atlas: Atlas, examples_per_category: int | None = None) -> Payload:
    """Read the atlas and pack it, with at most `examples_per_category` examples of each category per unit.

    Raises `ClearheadError` when the atlas holds no units, `CorruptFileError` when two examples disagree about a token.
    """
    units = atlas.sql("select * from units order by kind, layer, index, unit_id")
    if not units:
        raise ClearheadError(
            f"{atlas.path} holds no units; run `clearhead analyze` on a trained dictionary, or `clearhead spectral run`"
        )
    vocabulary = Vocabulary()
    cards = Cards(atlas)
    examples = _read_examples(atlas, examples_per_category)
    patterns = _read_patterns(atlas, examples_per_category)
    text_parts, part_of_block = _pack_texts(atlas, examples_per_category, vocabulary)
    details, previews = [], []
    trimmed = 0
    for unit in units:
        own = examples.get(unit["unit_id"], [])
        shown: dict[str, list[dict[str, Any]]] = {category: [] for category in CATEGORIES}
        for example in own:
            entry, cut = _example(example, patterns.get(example["example_id"], []), vocabulary)
            trimmed += cut
            shown[example["category"]].append(entry)
        details.append(_detail(unit, shown, vocabulary) | cards.detail(unit["unit_id"], vocabulary))
        previews.append(_preview(unit, own, patterns, vocabulary))
    index = {
        "units": _columns(units, previews) | cards.columns(units),
        "cards": cards.index(units, vocabulary),
        "unitsPerPart": UNITS_PER_PART,
        "partOfBlock": part_of_block,
        "limits": {"examples": examples_per_category, "held": _examples_held(atlas), "trimmed": trimmed},
    }
    parts = [pack(list(part)) for part in divide(details, UNITS_PER_PART)]
    # last, for packing the units may have added tokens
    index["vocab"] = vocabulary.entries
    return Payload(index=index, units=parts, texts=text_parts)


def _read_examples(atlas: Atlas, limit: int | None) -> dict[str, list[Row]]:
    rows = atlas.sql(
        """
        select example_id, unit_id, category, activation, document, block, position, start, len(tokens) as length,
            tokens[position - start + 1] as token,
            [i for i in range(len(activations)) if activations[i + 1] <> 0] as active,
            [a for a in activations if a <> 0] as activations
        from examples where $1 is null or rank < $1 order by unit_id, category, rank
        """,
        [limit],
    )
    unknown = {row["category"] for row in rows} - set(CATEGORIES)
    if unknown:
        raise CorruptFileError(f"{atlas.path} has examples of unknown category {min(unknown)!r}; use {CATEGORIES}")
    return group_by(rows, "unit_id")


def _read_patterns(atlas: Atlas, limit: int | None) -> dict[int, list[Row]]:
    rows = atlas.sql(
        """
        select p.example_id, p.query, p.keys, p.weights, p.rest, p.row_sum,
            [case when key >= e.start then e.tokens[key - e.start + 1] end for key in p.keys] as sources
        from patterns p join examples e using (example_id)
        where $1 is null or e.rank < $1 order by p.example_id, p.query
        """,
        [limit],
    )
    return group_by(rows, "example_id")


def _examples_held(atlas: Atlas) -> dict[str, int]:
    rows = atlas.sql("select category, max(rank) + 1 as n from examples group by category")
    return {row["category"]: row["n"] for row in rows}


_SHOWN_TOKENS = """
    with shown as (
        select block, start + generate_subscripts(tokens, 1) - 1 as position, unnest(tokens) as token
        from examples where $1 is null or rank < $1
    ), merged as (
        select block, position, min(token) as token, count(distinct token) as variants
        from shown group by block, position
    )
"""


def _pack_texts(atlas: Atlas, limit: int | None, vocabulary: Vocabulary) -> tuple[list[str], dict[int, int]]:
    """Packed parts of `{block: [[first position, [vocab place, ...]], ...]}` and the part each block is in."""
    clash = atlas.sql(_SHOWN_TOKENS + "select block, position from merged where variants > 1 limit 1", [limit])
    if clash:
        raise CorruptFileError(
            f"{atlas.path}: two examples show different tokens at position {clash[0]['position']} of block "
            f"{clash[0]['block']}; the tables come from different texts, so run the analysis again"
        )
    rows = atlas.sql(
        _SHOWN_TOKENS
        + """
        select block, list(position order by position) as positions, list(token order by position) as tokens
        from merged group by block order by block
        """,
        [limit],
    )
    parts, part_of_block = [], {}
    for number, part in enumerate(divide(rows, BLOCKS_PER_PART)):
        texts = {}
        for row in part:
            part_of_block[row["block"]] = number
            texts[row["block"]] = _runs(row["positions"], row["tokens"], vocabulary)
        parts.append(pack(texts))
    return parts, part_of_block


def _runs(positions: Sequence[int], tokens: Sequence[str], vocabulary: Vocabulary) -> list[list[Any]]:
    runs: list[list[Any]] = []
    for position, token in zip(positions, tokens, strict=True):
        if not runs or position != runs[-1][0] + len(runs[-1][1]):
            runs.append([position, []])
        runs[-1][1].append(vocabulary.place(token))
    return runs


def _example(row: Row, patterns: list[Row], vocabulary: Vocabulary) -> tuple[dict[str, Any], int]:
    entry = {
        "activation": brief(row["activation"]),
        "document": vocabulary.place(row["document"]),
        "block": row["block"],
        "start": row["start"],
        "length": row["length"],
        "position": row["position"],
        "active": row["active"],
        "values": [brief(value) for value in row["activations"]],
    }
    kept = [_pattern(pattern) for pattern in patterns]
    entry["patterns"] = [pattern for pattern, _ in kept]
    return entry, sum(cut for _, cut in kept)


def _pattern(row: Row) -> tuple[dict[str, Any], int]:
    pairs = sorted(zip(row["keys"], row["weights"], strict=True), key=lambda pair: -abs(pair[1]))
    kept = sorted(pairs[:ARCS_PER_PATTERN])
    left_out = pairs[ARCS_PER_PATTERN:]
    entry = {
        "query": row["query"],
        "keys": [key for key, _ in kept],
        "weights": [brief(weight) for _, weight in kept],
        "rest": brief(row["rest"] + sum(weight for _, weight in left_out)),
        "sum": brief(row["row_sum"]),
    }
    return entry, len(left_out)


def _detail(unit: Row, shown: dict[str, list[dict[str, Any]]], vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "raised": vocabulary.effects(unit["raised"]),
        "lowered": vocabulary.effects(unit["lowered"]),
        "counts": unit["histogram"] or [],
        "edges": [brief(edge) for edge in unit["histogram_edges"] or []],
        "shares": {formula: [brief(p) for p in unit[f"share_{formula}"] or []] for formula in FORMULAS},
        "examples": shown,
    }


def _preview(
    unit: Row, examples: list[Row], patterns: dict[int, list[Row]], vocabulary: Vocabulary
) -> dict[str, list[int]]:
    """What the list shows and the search looks through, most frequent first.

    `fires`: tokens the unit is most active on; `reads`: the largest source of each, `distance` tokens back;
    `raises`: logits, largest first.
    """
    fires, reads, distance = [], [], []
    for example in examples:
        if example["category"] == "top":
            fires.append(example["token"])
            at = example["position"] - example["start"]
            for pattern in patterns.get(example["example_id"], []):
                if pattern["query"] == at and pattern["keys"]:
                    _, key, source = max(zip(pattern["weights"], pattern["keys"], pattern["sources"], strict=True))
                    distance.append(example["position"] - key)
                    reads += [source] if source is not None else []
    return {
        "fires": [vocabulary.place(token) for token, _ in Counter(fires).most_common()],
        "reads": [vocabulary.place(token) for token, _ in Counter(reads).most_common()],
        "raises": [vocabulary.place(effect["token"]) for effect in unit["raised"] or []],
        "distance": sorted(distance),
    }


def _columns(units: list[Row], previews: list[dict[str, Any]]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "id": [unit["unit_id"] for unit in units],
        "host": [host(unit["share_output"]) for unit in units],
        "spans": [spans(unit["share_output"]) for unit in units],
        "logit": [brief(max((e["logit"] for e in unit["raised"] or []), default=None)) for unit in units],
    }
    for name in ("kind", "layer", "index", "group", "n_tokens", "n_active", "dead"):
        columns[name] = [unit[name] for unit in units]
    measured = ["rate", "mean_activation", "max_activation", "decoder_norm"]
    for name in measured + [f"participation_{formula}" for formula in FORMULAS]:
        columns[name] = [brief(unit[name]) for unit in units]
    for name in ("fires", "reads", "raises"):
        columns[name] = [preview[name] for preview in previews]
    distances = [preview["distance"] for preview in previews]
    columns["distance"] = [distance[len(distance) // 2] if distance else None for distance in distances]
    return columns
