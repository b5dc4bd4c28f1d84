"""A census with its controls as an atlas, and its headline numbers.

`summarise` says what a reader asks first, `write_spectral_atlas` fills the tables `prompts`, `spectra`, `controls`,
`firings`, `modes` and `shared_modes` (docs/reference/atlas-schema.md).
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.atlas.write import AtlasWriter
from clearhead.model.access import Model
from clearhead.spectral.census import Census, LayerCensus
from clearhead.spectral.controls import Separation
from clearhead.spectral.firings import Firings, Prompts
from clearhead.spectral.judging import Judged, Place
from clearhead.spectral.nearest import chance_cosine, nearest_tokens
from clearhead.spectral.shared import SharedModes, find_shared, overlaps, random_overlap
from clearhead.spectral.sparsity import cancellation, largest_rank, n_recon, rolls_tovee
from clearhead.spectral.verdicts import VERDICTS
from clearhead.units.unit import Unit

MODES_PER_FIRING = 8
MODES_PER_HEAD = 6
NEAREST = 6


def summarise(census: Census, separations: Mapping[Place, Mapping[str, Separation]], judged: Judged) -> dict[str, Any]:
    """Headline numbers: firings, S against every control, N_recon, shares of heads, time."""
    places = [place for place, numbers in judged.numbers.items() if numbers.sparsity is not None]
    counts = torch.cat(
        [n_recon(f.firings.where(~f.firings.sink).contributions) for f in census.layers.values()]
    ).double()
    verdicts = Counter(judged.verdicts.values())
    measured = verdicts["not separated"] + verdicts["sparse but cancelling"] + verdicts["sparse, separated"]
    summary: dict[str, Any] = {
        "heads": len(judged.numbers),
        "heads_with_firings": len(places),
        "firings": int(sum(int(found.n_firings.sum()) for found in census.layers.values())),
        "firings_on_sinks": int(sum(int(found.n_sink.sum()) for found in census.layers.values())),
        "threshold": census.threshold,
        "verdicts": {name: verdicts[name] for name in VERDICTS if verdicts[name]},
        "refused_layers": len(census.refused),
        "seconds": {name: round(value, 2) for name, value in census.seconds.items()},
    }
    if measured:
        separated = verdicts["sparse but cancelling"] + verdicts["sparse, separated"]
        summary["separated_share"] = separated / measured
    if places:
        own = torch.tensor([judged.numbers[place].sparsity for place in places], dtype=torch.float64)
        summary["sparsity_of_heads"] = _quartiles(own)
        # at most `firings.KEEP` per head, so that busy heads do not drown the others
        summary["n_recon_of_kept_firings"] = _quartiles(counts)
        summary["n_recon_of_kept_up_to_4"] = float((counts <= 4).double().mean())
        for name in sorted({name for some in separations.values() for name in some}):
            of = [some[name] for some in separations.values() if name in some]
            drawn = torch.tensor([one.sparsity for one in of], dtype=torch.float64)
            q = [judged.q[key] for key in judged.q if key[2] == name]
            summary[f"control_{name}"] = {
                "heads": len(of),
                "sparsity": _quartiles(drawn),
                "heads_sparser": sum(one.low > 0 for one in of) / len(of),
                **({"heads_with_q_up_to_0.05": sum(value <= 0.05 for value in q)} if q else {}),
            }
    return summary


def _quartiles(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()]


def write_spectral_atlas(
    path: Path,
    model: Model,
    prompts: Prompts,
    census: Census,
    separations: Mapping[Place, Mapping[str, Separation]],
    judged: Judged,
    about: Mapping[str, Any],
    seed: int,
) -> dict[int, SharedModes]:
    """Write every table, whole or not at all; returns the shared modes per layer, whose counts are in the atlas too."""
    shared: dict[int, SharedModes] = {}
    generator = torch.Generator().manual_seed(seed)
    with AtlasWriter(path, {**about, "refused_layers": {str(k): v for k, v in census.refused.items()}}) as atlas:
        atlas.append(
            "prompts",
            {
                "prompt": list(range(len(prompts.tokens))),
                "name": list(prompts.names),
                "tokens": [_strings(model, row) for row in prompts.tokens],
                "token_ids": [row.tolist() for row in prompts.tokens],
            },
        )
        for layer, found in census.layers.items():
            atlas.append("spectra", _spectra(layer, found, judged))
            _append(atlas, "controls", _controls(layer, separations, judged))
            _append(atlas, "firings", _firings(layer, found.firings))
            _append(atlas, "modes", _modes(model, layer, found))
            _append(atlas, "shared_modes", _shared(layer, found))
            shared[layer] = find_shared(found.modes, generator)
            atlas.append_metrics(
                layer,
                "mode",
                {"shared_modes": shared[layer].n_modes, "shared_modes_rotated": shared[layer].in_rotated},
            )
    return shared


def _append(atlas: AtlasWriter, table: str, columns: dict[str, Any]) -> None:
    if columns and len(next(iter(columns.values()))):
        atlas.append(table, columns)


def _strings(model: Model, row: Tensor) -> list[str]:
    return model.token_strings(row) if model.tokenizer is not None else [str(int(token)) for token in row]


def _spectra(layer: int, found: LayerCensus, judged: Judged) -> dict[str, Any]:
    h = found.modes.n_heads
    numbers = [judged.numbers[layer, head] for head in range(h)]
    return {
        "layer": [layer] * h,
        "head": list(range(h)),
        "verdict": [judged.verdicts[layer, head] for head in range(h)],
        "n_firings": found.n_firings.tolist(),
        "n_sink": found.n_sink.tolist(),
        **{
            name: [getattr(one, name) for one in numbers]
            for name in ("sparsity", "n_recon", "cancellation", "largest_rank")
        },
        "energy_query": found.energy_query.tolist(),
        "energy_key": found.energy_key.tolist(),
        **{name: values.tolist() for name, values in found.behaviour.items()},
        "rank": found.modes.svd.rank.tolist(),
        "degenerate": found.modes.svd.degenerate.sum(-1).tolist(),
        "error": found.modes.svd.error.tolist(),
        "sigma": found.modes.svd.S.tolist(),
    }


def _controls(layer: int, separations: Mapping[Place, Mapping[str, Separation]], judged: Judged) -> dict[str, Any]:
    rows = [
        {
            "layer": layer,
            "head": head,
            **{name: getattr(one, name) for name in _CONTROL_COLUMNS},
            "q": judged.q.get((layer, head, one.control)),
        }
        for (at, head), some in separations.items()
        if at == layer
        for one in some.values()
    ]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


_CONTROL_COLUMNS = ("control", "draws", "sparsity", "n_recon", "effect", "low", "high", "p")


def _firings(layer: int, firings: Firings) -> dict[str, Any]:
    n, c = len(firings), firings.contributions
    if not n:
        return {}
    size = min(MODES_PER_FIRING, c.shape[-1])
    modes = c.abs().topk(size, -1).indices
    largest = c.gather(-1, modes)
    return {
        "layer": [layer] * n,
        **{name: getattr(firings, name).tolist() for name in ("head", "prompt", "query", "key", "sink")},
        "attention": firings.attention.numpy(),
        "score": firings.score.numpy(),
        "relative": c.sum(-1).numpy(),
        "sparsity": rolls_tovee(c).numpy(),
        "n_recon": n_recon(c).numpy(),
        "cancellation": cancellation(c).numpy(),
        "largest_rank": largest_rank(c).numpy(),
        "modes": modes.tolist(),
        "contributions": largest.tolist(),
        "query_side": firings.A.gather(-1, modes).tolist(),
        "rest": (c.sum(-1) - largest.sum(-1)).numpy(),
    }


def _modes(model: Model, layer: int, found: LayerCensus) -> dict[str, Any]:
    """The modes that carry most of each head's contributions, with the tokens nearest to their directions."""
    rows: dict[str, list[Any]] = {
        name: [] for name in ("unit_id", "layer", "head", "mode", "sigma", "degenerate", "share")
    }
    for head in range(found.modes.n_heads):
        own = found.firings.of_head(head)
        size = own.contributions.abs().sum(0)
        if not float(size.sum()) or not int(found.modes.svd.rank[head]):
            continue
        share = size / size.sum()
        for mode in share.topk(min(MODES_PER_HEAD, len(share))).indices.tolist():
            rows["unit_id"].append(Unit("mode", layer, head, part=mode).id)
            rows["layer"].append(layer)
            rows["head"].append(head)
            rows["mode"].append(mode)
            rows["sigma"].append(float(own.S[:, mode].mean()))
            rows["degenerate"].append(bool(found.modes.svd.degenerate[head, mode]))
            rows["share"].append(float(share[mode]))
    if not rows["mode"]:
        return {}
    columns: dict[str, Any] = dict(rows)
    heads, modes = torch.tensor(rows["head"]), torch.tensor(rows["mode"])
    for name, vectors in (("query_tokens", found.modes.svd.U), ("key_tokens", found.modes.svd.V)):
        if found.basis == "offset":  # a mode of that number is another direction at every offset
            columns[name] = [[] for _ in rows["mode"]]
        else:
            columns[name] = _tokens_above_chance(model, layer, vectors.cpu()[heads, :, modes].T)
    return columns


def _tokens_above_chance(model: Model, layer: int, directions: Float[Tensor, "d m"]) -> list[list[dict[str, Any]]]:
    """The embeddings nearest to each direction, if nearer than for all but one in a hundred random directions."""
    near = nearest_tokens(model, layer, directions, NEAREST).embedding
    chance = chance_cosine(model.d_vocab, model.d_model, 0.99)
    return [
        [
            {"token": token, "token_id": int(number), "logit": float(cosine)}
            for token, number, cosine in zip(_strings(model, ids), ids, cosines, strict=True)
            if abs(float(cosine)) > chance
        ]
        for ids, cosines in zip(near.ids, near.cosines, strict=True)
    ]


def _shared(layer: int, found: LayerCensus) -> dict[str, Any]:
    h = found.modes.n_heads
    expected, rows = random_overlap(found.modes), []
    for side, overlap in overlaps(found.modes).items():
        rows += [
            (layer, side, a, b, float(overlap[a, b]), float(expected[a, b])) for a in range(h) for b in range(a + 1, h)
        ]
    names = ("layer", "side", "head_a", "head_b", "overlap", "random")
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}
