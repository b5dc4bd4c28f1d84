"""`clearhead spectral features`: prints the features that one head compares, and keeps them in a run directory."""

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor

from clearhead.commands.opening.structure import without_weights
from clearhead.commands.printing.table import say, show
from clearhead.config import SpectralFeatures, resolve_layer
from clearhead.configfile import refuse_other_run
from clearhead.data.text import token_blocks
from clearhead.dictionaries.dictionary import save_tensors
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.runs import RunDirectory, write_json
from clearhead.spectral.features import HeadFeatures, Side, recover_features, refuse_missing_head
from clearhead.spectral.interference import measure_interference
from clearhead.spectral.nearest import Nearest, chance_cosine, nearest_rows, nearest_tokens
from clearhead.spectral.whiten import column_cosines

ENOUGH_PER_DIMENSION = 20
HEADER = ("strength", "q·k", "side", "split", "mean", "top 3", "energy", "nearest tokens by embedding; by unembedding")
LEGEND = """  strength: singular value times score scale; of a pair, the score it adds where both are one deviation up
  q·k: cosine of the two directions read; near 1 the head looks for the same thing on both sides
  split: cosine between halves of the text; mean, top 3: cosine with the mean input and its top 3 components
  *: singular values too close, or a Gaussian coefficient; c: in the cone that all inputs share"""


def plan(config: SpectralFeatures) -> dict[str, Any]:
    """What will be read and where the features go; no weights are loaded."""
    model = without_weights(config.model)
    layer = resolve_layer(config.layer, model.n_layers)
    geometry = model.geometry(layer)
    return {
        "model": config.model,
        "head": f"{layer}.{config.head}",
        "modes": min(config.modes, geometry.d_head),
        "text": f"{config.text} (train)",
        "tokens, at most": config.tokens,
        "tokens per dimension": config.tokens / model.d_model,
        "directory": config.directory(layer),
    }


def run(config: SpectralFeatures) -> None:
    """Recover, print the table, and write the run directory."""
    dictionary = None if config.dictionary is None else Lorsa.from_pretrained(config.dictionary)
    if dictionary is not None and dictionary.provenance.get("model") != config.model:
        raise ClearheadError(
            f"{config.dictionary} was trained on {dictionary.provenance.get('model')}, not on {config.model}; give a "
            "dictionary of the same model"
        )
    model = Model.load(config.model, dtype=config.dtype, device=config.device)
    layer = resolve_layer(config.layer, model.n_layers)
    refuse_missing_head(model, layer, config.head)
    config = dataclasses.replace(config, layer=layer, out=config.directory(layer))
    refuse_other_run(config.directory(layer), config, ("out", "device", "batch_blocks"))
    blocks = token_blocks(
        model, config.text, split="train", n_tokens=config.tokens, context=config.context, at_most=True
    )
    with RunDirectory(config.directory(layer)) as directory:
        directory.write_config(config.to_dict())
        start = time.monotonic()
        found = recover_features(
            model,
            layer,
            config.head,
            blocks.tokens,
            config.modes,
            ica=config.ica,
            shrinkage=config.shrinkage,
            seed=config.seed,
            batch_blocks=config.batch_blocks,
        )
        elements = None if dictionary is None else dictionary.W_O
        rows = _rows(model, found, elements, config)
        summary = _summary(found) | {
            "model": model.name,
            "model_note": model.note,
            "text": blocks.source,
            "text_sha256": blocks.sha256,
            "chance_cosine": chance_cosine(model.d_vocab, model.d_model),
            "seconds": time.monotonic() - start,
        }
        if elements is not None:
            summary["interference"] = _interference(elements, config.seed)
        save_tensors(directory.path / "features.safetensors", _tensors(found))
        write_json(directory.path / "features.json", rows)
        directory.write_summary(summary)
    _print(found, rows, summary)
    say(f"features: {directory.path}")


def _sides(found: HeadFeatures) -> list[tuple[str, Tensor, Tensor, list[tuple[str, Side]]]]:
    """Kind, strength, flag and sides of the modes and, where they were separated, of the pairs."""
    kinds = [("mode", found.sigma, found.degenerate, [("query", found.query), ("key", found.key)])]
    if found.pairs is not None and found.pair_query is not None and found.pair_key is not None:
        sides = [("query", found.pair_query), ("key", found.pair_key)]
        kinds.append(("pair", found.pairs.strength, found.pairs.gaussian, sides))
    return kinds


def _rows(model: Model, found: HeadFeatures, elements: Tensor | None, config: SpectralFeatures) -> list[dict[str, Any]]:
    """One record per mode or pair and side, in the order they are printed."""
    top = config.neighbours
    records: list[dict[str, Any]] = []
    for kind, strength, doubtful, sides in _sides(found):
        named, same = [], column_cosines(sides[0][1].reads, sides[1][1].reads)
        for name, side in sides:
            compared = side.outside_cone if config.outside_cone else side.features
            tokens = nearest_tokens(model, found.layer, compared, min(top, model.d_vocab))
            near = {
                "embedding": _named(tokens.embedding, model),
                "unembedding": _named(tokens.unembedding, model),
            }
            if elements is not None:
                close = nearest_rows(compared, elements, min(top, len(elements)))
                near["elements"] = [
                    [{"element": int(i), "cos": float(c)} for i, c in zip(ids, cosines, strict=True)]
                    for ids, cosines in zip(close.ids, close.cosines, strict=True)
                ]
            named.append((name, side, near))
        records += [
            {
                "kind": kind,
                "number": k,
                "side": name,
                "strength": float(strength[k]),
                "query_key": float(same[k]),
                "doubtful": bool(doubtful[k]),
                **{field: float(getattr(side, field)[k]) for field in MEASURES},
                "in_cone": bool(side.in_cone[k]),
                **{what: lists[k] for what, lists in near.items()},
            }
            for k in range(len(strength))
            for name, side, near in named
        ]
    return records


MEASURES = ("turned", "stability", "cone_mean", "cone_component", "energy", "unused")


def _named(near: Nearest, model: Model) -> list[list[dict[str, Any]]]:
    return [
        [
            {"token": token, "id": int(i), "cos": float(c)}
            for token, i, c in zip(model.token_strings(ids), ids, cosines, strict=True)
        ]
        for ids, cosines in zip(near.ids, near.cosines, strict=True)
    ]


def _summary(found: HeadFeatures) -> dict[str, Any]:
    covariance = found.covariance
    summary: dict[str, Any] = {
        "layer": found.layer,
        "head": found.head,
        "rank": found.rank,
        "modes": len(found.sigma),
        "positions": found.positions._asdict(),
        "samples_per_dimension": covariance.per_dimension,
        "condition": covariance.condition,
        "shrinkage": covariance.amount,
        "unused_share": found.unused_share,
        "stability_median": float(torch.cat([found.query.stability, found.key.stability]).median()),
    }
    if found.pairs is not None:
        summary |= {"pairs_converged": found.pairs.converged, "pairs_concentration": found.pairs.concentration}
    return summary


def _interference(elements: Tensor, seed: int) -> dict[str, Any]:
    norms = measure_interference(elements, seed)
    return {
        "features": norms.n_features,
        "zero_features": norms.n_zero,
        **{name: getattr(norms, name)._asdict() for name in ("found", "edges", "sampled")},
    }


def _tensors(found: HeadFeatures) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for kind, strength, _, sides in _sides(found):
        tensors[f"{kind}.strength"] = strength
        for name, side in sides:
            parts = {"reads": side.reads, "features": side.features, "outside_cone": side.outside_cone}
            tensors |= {f"{kind}.{name}.{part}": tensor for part, tensor in parts.items()}
    return tensors


def _print(found: HeadFeatures, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    title = f"head {found.layer}.{found.head} of {summary['model']}: {len(found.sigma)} of {found.rank} modes"
    show(
        {
            "positions used": found.positions.used,
            "left out": f"{found.positions.first} first, {found.positions.special} special, "
            f"{found.positions.massive} massive",
            "per dimension": summary["samples_per_dimension"],
            "condition number": summary["condition"],
            "shrinkage": summary["shrinkage"],
            "Ω without token energy": found.unused_share,
        },
        title,
    )
    if found.covariance.per_dimension < ENOUGH_PER_DIMENSION:
        say(f"  few positions: {ENOUGH_PER_DIMENSION} per dimension are recommended; trust only a split near 1")
    for kind in ("mode", "pair"):
        mine = [row for row in rows if row["kind"] == kind]
        if mine:
            say("")
            _print_table(kind, mine)
    if found.pairs is not None:
        still = "came to rest" if found.pairs.converged else "did not come to rest: directions may turn with the seed"
        say(f"  separation {still}; {found.pairs.concentration:.2f} of the coupling is on these pairs")
    say(f"  a random direction's nearest token has |cos| {summary['chance_cosine']:.2f}")
    say(LEGEND)


def _print_table(kind: str, rows: list[dict[str, Any]]) -> None:
    lines: list[tuple[str, ...]] = [(kind, *HEADER)]
    for row in rows:
        marks = ("*" if row["doubtful"] else "") + ("c" if row["in_cone"] else "")
        lines.append(
            (
                f"{row['number']}{marks}",
                f"{row['strength']:.3f}",
                f"{row['query_key']:+.2f}",
                row["side"],
                f"{row['stability']:.2f}",
                f"{row['cone_mean']:+.2f}",
                f"{row['cone_component']:.2f}",
                f"{row['energy']:.2f}",
                "; ".join(_spelled(row[what]) for what in ("embedding", "unembedding", "elements") if what in row),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1] + [0]
    for line in lines:
        say("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


def _spelled(near: list[dict[str, Any]]) -> str:
    """The nearest three, as in `+0.61 ' the'`; quoted, so that spaces show and no control code reaches the terminal."""
    names = [repr(item["token"]) if "token" in item else f"#{item['element']}" for item in near]
    return ", ".join(f"{item['cos']:+.2f} {name}" for item, name in list(zip(near, names, strict=True))[:3])
