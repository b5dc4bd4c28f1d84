"""The units of one attention layer: as `Unit`s with their vectors, and as rows of the atlas."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from torch import Tensor

from clearhead.analysis.activity import Activity
from clearhead.analysis.logits import LogitEffects
from clearhead.analysis.shares import frobenius, participation, value_weights
from clearhead.analysis.token_texts import Strings
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.model.access import Model
from clearhead.units.unit import Unit


def head_units(model: Model, layer: int) -> list[Unit]:
    """The original heads of a layer: read vectors are the columns of W_V, write vectors the rows of W_O, [dv, d]."""
    weights = model.weights(layer)
    W_V, W_O = value_weights(weights), weights.W_O.detach()
    return [Unit("head", layer, head, read=W_V[head].T, write=W_O[head]) for head in range(len(W_O))]


def lorsa_units(lorsa: Lorsa, layer: int) -> list[Unit]:
    """The heads of a Lorsa of this layer: read vector w_v [d], write vector w_o [d]."""
    read, write = lorsa.W_V.detach(), lorsa.W_O.detach()
    return [Unit("lorsa", layer, head, read=read[head], write=write[head]) for head in range(lorsa.n_heads)]


def lorsa_rows(
    lorsa: Lorsa,
    layer: int,
    n_tokens: int,
    activity: Activity,
    strongest: Float[np.ndarray, " n"],
    effects: LogitEffects,
    shares: Mapping[str, Float[Tensor, "n h"]],
    strings: Strings,
) -> dict[str, Any]:
    """Columns of table `units` for the heads of a Lorsa.

    strongest: the activation of largest magnitude; shares: by formula (`output`, `weights`, `routing`), NaN where a
    head has none; strings: the texts of an array of token ids.
    """
    n = lorsa.n_heads
    columns: dict[str, Any] = {
        "unit_id": [unit.id for unit in lorsa_units(lorsa, layer)],
        "kind": ["lorsa"] * n,
        "layer": np.full(n, layer),
        "index": np.arange(n),
        "group": np.arange(n) // lorsa.config.pattern_size,
        **activity_columns(activity, n_tokens, strongest),
        "decoder_norm": lorsa.W_O.detach().norm(dim=-1).float().cpu().numpy(),
        "raised": _effects(effects.raised, effects.raised_ids, strings),
        "lowered": _effects(effects.lowered, effects.lowered_ids, strings),
    }
    for name, share in shares.items():
        spread = participation(share)
        columns[f"share_{name}"] = _rows_or_empty(share)
        columns[f"participation_{name}"] = [None if value != value else value for value in spread.tolist()]
    return columns


def activity_columns(activity: Activity, n_tokens: int, strongest: Float[np.ndarray, " n"]) -> dict[str, Any]:
    """The columns of table `units` that say how often and how strongly units are active."""
    count = activity.count
    dead = count == 0
    return {
        "n_tokens": np.full(len(count), n_tokens),
        "n_active": count,
        "rate": count / n_tokens,
        "mean_activation": pa.array(activity.mean, pa.float32(), mask=dead),
        "max_activation": pa.array(strongest, pa.float32(), mask=dead),
        "dead": dead,
        "histogram": list(activity.histogram),
        "histogram_edges": list(activity.edges().astype(np.float32)),
    }


def head_rows(model: Model, layer: int) -> dict[str, Any]:
    """Columns of table `units` for the original heads; `decoder_norm` is |W_V W_O|_F."""
    weights = model.weights(layer)
    norms = frobenius(value_weights(weights).float(), weights.W_O.detach().float())
    n = len(norms)
    return {
        "unit_id": [unit.id for unit in head_units(model, layer)],
        "kind": ["head"] * n,
        "layer": np.full(n, layer),
        "index": np.arange(n),
        "decoder_norm": norms.cpu().numpy(),
    }


def _effects(logits: Float[Tensor, "n k"], ids: Tensor, strings: Strings) -> pa.ListArray:
    n, k = logits.shape
    flat = ids.reshape(-1).cpu().numpy()
    effects = pa.StructArray.from_arrays(
        [strings(flat), pa.array(flat), pa.array(logits.reshape(-1).float().cpu().numpy())],
        names=["token", "token_id", "logit"],
    )
    return pa.ListArray.from_arrays(np.arange(n + 1, dtype=np.int32) * k, effects)


def _rows_or_empty(rows: Float[Tensor, "n h"]) -> Sequence[list[float] | None]:
    empty = rows.isnan().any(-1).tolist()
    return [None if missing else row for missing, row in zip(empty, rows.tolist(), strict=True)]
