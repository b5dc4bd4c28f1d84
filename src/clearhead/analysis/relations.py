"""Rows of the atlas' table `relations`: what a unit reads and writes, what makes it look, which modes it uses.

    reads    what moves the value v of the unit, through w_v             reads_writes.py
    writes   what its write vector moves directly, through w_o            reads_writes.py
    query    the tokens or features at which it looks                     looking.py, score_parts.py
    key      the tokens, features and distances it looks at               looking.py, score_parts.py
    modes    the singular modes of its host head that its QK uses         host_modes.py

A relation of one unit may hold several kinds of `other`, whose values cannot be compared: the largest of each kind come
first, then the second of each, and so on; `rank` counts through them.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


class Related(NamedTuple):
    """Findings of one relation and one kind of `other`; arrays [findings] in any order."""

    relation: str
    unit: NDArray[np.int64]
    """Index of the unit."""
    other: NDArray[np.str_] | pa.Array
    """Name of what it relates to."""
    label: pa.Array
    value: NDArray[np.float64]
    order: NDArray[np.float64] | None = None
    """What findings are ordered by, descending; |value| where not given."""
    share: NDArray[np.float64] | None = None
    """Share of the unit's examples in which it was seen, where it was seen in examples."""


def relation_rows(names: Sequence[str], found: Iterable[Related]) -> dict[str, Any]:
    """Columns of table `relations`; `names` are the ids of all units, by index.

    Ordered by relation as they come first, by unit, by place within the kind, by kind as given; ties in size by the
    order they came in.
    """
    parts = [part for part in found if len(part.unit)]
    relations = list(dict.fromkeys(part.relation for part in parts))
    columns: dict[str, list[Any]] = {"unit": [], "other": [], "label": [], "value": [], "order": [], "share": []}
    kinds, relation = [], []
    for kind, part in enumerate(parts):
        n = len(part.unit)
        kinds.append(np.full(n, kind))
        relation.append(np.full(n, relations.index(part.relation)))
        columns["unit"].append(part.unit)
        columns["other"].append(part.other if isinstance(part.other, pa.Array) else pa.array(part.other, pa.string()))
        columns["label"].append(part.label)
        columns["value"].append(part.value.astype(np.float64))
        columns["order"].append(np.abs(part.value) if part.order is None else part.order)
        columns["share"].append(np.full(n, np.nan) if part.share is None else part.share)
    if not parts:
        return {name: [] for name in ("unit_id", "relation", "rank", "other", "label", "value", "share")}
    unit, value, order, share = (np.concatenate(columns[name]) for name in ("unit", "value", "order", "share"))
    which, place = np.concatenate(relation), np.concatenate(kinds)
    by_kind = np.lexsort((-order, place, unit, which))  # stable: ties stay as they came
    within = _ranks(which[by_kind], unit[by_kind], place[by_kind])
    sequence = by_kind[np.lexsort((place[by_kind], within, unit[by_kind], which[by_kind]))]
    taken = pa.array(sequence)
    return {
        "unit_id": pa.array(names, pa.string()).take(pa.array(unit[sequence])),
        "relation": pa.array(relations, pa.string()).take(pa.array(which[sequence])),
        "rank": _ranks(which[sequence], unit[sequence]),
        "other": pa.concat_arrays(columns["other"]).take(taken),
        "label": pa.concat_arrays(columns["label"]).take(taken),
        "value": value[sequence],
        "share": pa.array(share[sequence], pa.float64(), mask=np.isnan(share[sequence])),
    }


def _ranks(*keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Place of each row within its run of equal keys."""
    starts = np.r_[True, np.any([key[1:] != key[:-1] for key in keys], axis=0)]
    first = np.flatnonzero(starts)
    return np.arange(len(starts)) - first[np.cumsum(starts) - 1]
