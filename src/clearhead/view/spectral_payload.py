"""The data of the spectral page: an atlas of heads turned into one small index and packed parts.

The index holds what the list, the map and the search need: one column per number of table `spectra`, S under every
control and its distance from S, and the tokens of each head's leading modes. Parts, opened when needed: `heads` (what
the view of one head shows, with its firings in columns), `prompts` (their tokens), `layers` (what heads share).

To bound the size, a head's firings may be thinned: those kept are spread evenly over the order of attention, so that
the strongest, the usual and the weakest are all there. The page says so; every number is of all firings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clearhead.atlas.read import Atlas, Row
from clearhead.errors import CorruptFileError
from clearhead.view.packing import Vocabulary, brief, divide, group_by, pack
from clearhead.view.spectral_explanations import OTHER, VERDICTS, order_controls
from clearhead.view.spectral_figures import gaussian_sparsity
from clearhead.view.spectral_reasons import give_reasons
from clearhead.view.visible import visible

HEADS_PER_PART = 16
PROMPTS_PER_PART = 16
LAYERS_PER_PART = 8
MODES_IN_INDEX = 3
"""Leading modes of a head whose tokens the search looks through."""

_WHOLE = ("layer", "head", "n_firings", "n_sink", "rank", "degenerate")
_MEASURED = (
    *("sparsity", "n_recon", "cancellation", "largest_rank", "energy_query", "energy_key"),
    *("previous", "duplicate", "induction", "sink", "error"),
)


@dataclass
class SpectralPayload:
    """Everything the page embeds: the index and the packed parts, in order."""

    index: dict[str, Any]
    heads: list[str]
    prompts: list[str]
    layers: list[str]


def build_spectral_payload(atlas: Atlas, firings_per_head: int | None = None) -> SpectralPayload:
    """Read the atlas and pack it, with at most `firings_per_head` firings of each head (and as many on the sink).

    Raises `CorruptFileError` when a head stands twice in the atlas, or firings belong to a head or a token it lacks.
    """
    _refuse_contradictions(atlas)
    vocabulary = Vocabulary()
    heads = atlas.sql("select * from spectra order by layer, head")
    controls = group_by(_read_controls(atlas), "layer", "head")
    modes = group_by(atlas.sql("select * from modes order by layer, head, share desc, mode"), "layer", "head")
    known = {row["control"] for some in controls.values() for row in some}
    prompts = atlas.sql("select prompt, name, tokens from prompts order by prompt")
    place_of = {row["prompt"]: place for place, row in enumerate(prompts)}
    details = []
    rotated = _rotated_layers(atlas)
    for layer, of_layer in group_by(heads, "layer").items():
        firings = group_by(_read_firings(atlas, layer, firings_per_head), "head")
        along = None if layer in rotated else _directions(atlas, layer)
        for head in of_layer:
            at = (layer, head["head"])
            own = sorted(controls.get(at, []), key=lambda row: order_controls(known).index(row["control"]))
            details.append(
                {
                    "reasons": give_reasons(head, own),
                    "by_offset": layer in rotated,
                    "sigma": [brief(value) for value in head["sigma"]],
                    "reference": brief(gaussian_sparsity(head["sigma"])),
                    "controls": [_control(row) for row in own],
                    "modes": [_mode(row, along, vocabulary) for row in modes.get(at, [])],
                    "firings": _firing_columns(firings.get(head["head"], []), place_of),
                }
            )
    layers = _layers(atlas, [head["layer"] for head in heads])
    texts = [[vocabulary.place(row["name"]), [vocabulary.place(token) for token in row["tokens"]]] for row in prompts]
    verdicts = order_verdicts(heads)
    index = {
        "heads": _columns(heads, controls, modes, verdicts, vocabulary),
        "controls": order_controls(known),
        "verdicts": [_verdict(name, heads) for name in verdicts],
        "layers": list(layers),
        "headsPerPart": HEADS_PER_PART,
        "promptsPerPart": PROMPTS_PER_PART,
        "layersPerPart": LAYERS_PER_PART,
        "limits": {"firings": firings_per_head, **_held(atlas)},
    }
    # last, for everything above may have added tokens
    index["vocab"] = vocabulary.entries
    return SpectralPayload(
        index=index,
        heads=[pack(some) for some in divide(details, HEADS_PER_PART)],
        prompts=[pack(some) for some in divide(texts, PROMPTS_PER_PART)],
        layers=[pack(some) for some in divide(layers.values(), LAYERS_PER_PART)],
    )


def order_verdicts(heads: Sequence[Row]) -> list[str]:
    """The verdicts that heads have: known ones strongest first, then others by name."""
    present = {head["verdict"] for head in heads}
    return [name for name in VERDICTS if name in present] + sorted(present - set(VERDICTS))


def _read_controls(atlas: Atlas) -> list[Row]:
    return [row | {"control": visible(row["control"])} for row in atlas.sql("select * from controls")]


def _refuse_contradictions(atlas: Atlas) -> None:
    twice = atlas.sql("select layer, head from spectra group by layer, head having count(*) > 1 limit 1")
    if twice:
        raise CorruptFileError(
            f"{atlas.path}: head {twice[0]['layer']}.{twice[0]['head']} stands twice in `spectra`; run it again"
        )
    lost = atlas.sql(
        """
        select f.layer, f.head, f.prompt, f.query, f.key
        from firings f left join spectra s using (layer, head) left join prompts p using (prompt)
        where s.layer is null or p.prompt is null
            or least(f.query, f.key) < 0 or greatest(f.query, f.key) >= len(p.tokens)
        limit 1
        """
    )
    if lost:
        row = lost[0]
        raise CorruptFileError(
            f"{atlas.path}: a firing of head {row['layer']}.{row['head']} at query {row['query']}, key {row['key']} of "
            f"text {row['prompt']} has no such head or token; the tables come from different runs, so run it again"
        )


def _read_firings(atlas: Atlas, layer: int, limit: int | None) -> list[Row]:
    """Firings of one layer, strongest attention first, thinned evenly to `limit` per head and per kind."""
    return atlas.sql(
        """
        select * from (
            select *,
                row_number() over (partition by head, sink order by attention desc, prompt, query, key) - 1 as place,
                count(*) over (partition by head, sink) as n
            from firings where layer = $1
        )
        where $2 is null or n <= $2 or place = 0 or (place * $2) // n > ((place - 1) * $2) // n
        order by head, sink, place
        """,
        [layer, limit],
    )


def _directions(atlas: Atlas, layer: int) -> dict[tuple[int, int], tuple[int, int]]:
    """By head and mode: in how many firings it is among the largest, and in how many of them A is positive."""
    rows = atlas.sql(
        """
        select head, mode, count(*) as n, count(*) filter (where side > 0) as along
        from (select head, unnest(modes) as mode, unnest(query_side) as side from firings where layer = ? and not sink)
        group by head, mode
        """,
        [layer],
    )
    return {(row["head"], row["mode"]): (row["n"], row["along"]) for row in rows}


def _rotated_layers(atlas: Atlas) -> set[int]:
    """Layers whose modes differ from offset to offset, in number k their direction and its sign.

    The basis `offset` is that of the unrotated product wherever a layer does not rotate, singular values included.
    """
    if atlas.about.get("basis") != "offset":
        return set()
    rows = atlas.sql(
        """
        select distinct layer from modes join spectra s using (layer, head)
        where abs(modes.sigma - s.sigma[mode + 1]) > 1e-5 * s.sigma[1]
        """
    )
    return {row["layer"] for row in rows}


def _held(atlas: Atlas) -> dict[str, int]:
    """Firings in the atlas, and the most that one head has."""
    rows = atlas.sql("select count(*) as n from firings group by layer, head, sink")
    counts = [row["n"] for row in rows]
    return {"most": max(counts, default=0), "held": sum(counts)}


def _firing_columns(rows: Sequence[Row], place_of: Mapping[int, int]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in ("query", "key", "n_recon", "modes")}
    columns["prompt"] = [place_of[row["prompt"]] for row in rows]
    columns["sink"] = [int(row["sink"]) for row in rows]
    for name in ("attention", "score", "relative", "sparsity", "cancellation", "largest_rank", "rest"):
        columns[name] = [brief(row[name]) for row in rows]
    for name in ("contributions", "query_side"):
        columns[name] = [[float(f"{value:.3g}") for value in row[name]] for row in rows]
    return columns


def _control(row: Row) -> dict[str, Any]:
    numbers = {name: brief(row[name]) for name in ("sparsity", "n_recon", "effect", "low", "high", "p", "q")}
    return {"control": row["control"], "draws": row["draws"], **numbers}


def _mode(row: Row, along: Mapping[tuple[int, int], tuple[int, int]] | None, vocabulary: Vocabulary) -> dict[str, Any]:
    """`along` is None where the sign of a direction differs from firing to firing."""
    n, positive = (None, None) if along is None else along.get((row["head"], row["mode"]), (0, 0))
    return {
        "mode": row["mode"],
        "sigma": brief(row["sigma"]),
        "degenerate": row["degenerate"],
        "share": brief(row["share"]),
        "n": n,
        "along": positive,
        "query": vocabulary.effects(row["query_tokens"]),
        "key": vocabulary.effects(row["key_tokens"]),
    }


def _columns(
    heads: Sequence[Row],
    controls: Mapping[Any, Sequence[Row]],
    modes: Mapping[Any, Sequence[Row]],
    verdicts: Sequence[str],
    vocabulary: Vocabulary,
) -> dict[str, list[Any]]:
    places = [(head["layer"], head["head"]) for head in heads]
    columns: dict[str, list[Any]] = {name: [head[name] for head in heads] for name in _WHOLE}
    columns |= {name: [brief(head[name]) for head in heads] for name in _MEASURED}
    columns["id"] = [f"head.{layer}.{head}" for layer, head in places]
    columns["width"] = [len(head["sigma"]) for head in heads]
    columns["verdict"] = [verdicts.index(head["verdict"]) for head in heads]
    for name in {row["control"] for some in controls.values() for row in some}:
        own = {place: row for place, some in controls.items() for row in some if row["control"] == name}
        columns[f"under_{name}"] = [brief(own[place]["sparsity"]) if place in own else None for place in places]
        columns[f"effect_{name}"] = [brief(own[place]["effect"]) if place in own else None for place in places]
    for side in ("query", "key"):
        columns[f"{side}_tokens"] = [
            [
                vocabulary.place(entry["token"])
                for mode in modes.get(place, [])[:MODES_IN_INDEX]
                for entry in mode[f"{side}_tokens"]
            ]
            for place in places
        ]
    return columns


def _verdict(name: str, heads: Sequence[Row]) -> dict[str, Any]:
    style = VERDICTS.get(name, OTHER)
    return {
        "name": visible(name),
        "count": sum(head["verdict"] == name for head in heads),
        "mark": style.mark,
        "colour": style.colour,
        "meaning": style.meaning,
    }


def _layers(atlas: Atlas, layers: Sequence[int]) -> dict[int, dict[str, Any]]:
    """By layer: pairs of heads in columns, per side, and how many modes are shared."""
    pairs = group_by(atlas.sql("select * from shared_modes order by layer, side, head_a, head_b"), "layer")
    metrics = {layer: numbers for (layer, kind), numbers in atlas.layers().items() if kind == "mode"}
    found = {}
    for layer in dict.fromkeys(layers):
        sides = group_by(pairs.get(layer, []), "side")
        found[layer] = {
            "sides": {visible(side): _pair_columns(rows) for side, rows in sides.items()},
            "shared": metrics.get(layer, {}).get("shared_modes"),
            "by_chance": metrics.get(layer, {}).get("shared_modes_rotated"),
        }
    return found


def _pair_columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in ("head_a", "head_b")}
    return columns | {name: [brief(row[name]) for row in rows] for name in ("overlap", "random")}
