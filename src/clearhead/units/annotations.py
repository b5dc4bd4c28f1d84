"""What a graph says beside its edges: heads that carry an edge, reasons of an attention weight, groups of units.

`Loadings` splits edges over attention heads, `AttentionTable` splits one attention score over pairs of units,
`Supernode` names a group. They carry numbers that tracing computed, check that they are whole, and add up when graphs
are merged; nothing is computed from a model here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clearhead.errors import ClearheadError, CorruptFileError, NonFiniteError
from clearhead.units.unit import Unit

ROWS: dict[str, tuple[Any, ...]] = {
    "pairs": (str, str, (int, float)),
    "queries": (str, (int, float)),
    "keys": (str, (int, float)),
    "triples": (str, int, str, (int, float)),
}
"""Types of an entry of each list of an attention table."""


class Loadings:
    """Which heads carry which edge: entry x says that head `head[x]` of `layer[x]` carries `weight[x]` of `edge[x]`.

    edge, layer, head: int64 [x]; edge is a place among the graph's edges; weight: float64 [x], signed, in the unit of
    the edge. `kind` says what is counted, for example "order 1" where the entries of an edge add up over layers.
    Raises `ClearheadError` for lists of different lengths and an entry given twice, `NonFiniteError` for a weight that
    is NaN or infinite.
    """

    def __init__(self, edge: ArrayLike, layer: ArrayLike, head: ArrayLike, weight: ArrayLike, kind: str):
        self.edge = whole_numbers(edge, "edge of the loadings")
        self.layer = whole_numbers(layer, "layer of the loadings")
        self.head = whole_numbers(head, "head of the loadings")
        self.weight: NDArray[np.float64] = np.atleast_1d(np.asarray(weight, dtype=np.float64))
        self.kind = kind
        shapes = {name: array.shape for name, array in self.arrays().items()}
        if len(set(shapes.values())) > 1 or self.weight.ndim != 1:
            raise ClearheadError(f"edge, layer, head and weight of loadings must be lists of one length; got {shapes}")
        if not np.isfinite(self.weight).all():
            entry = int(np.argmin(np.isfinite(self.weight)))
            raise NonFiniteError(f"the loading of edge {self.edge[entry]} on {self._describe(entry)} is not finite")
        for name in ("edge", "layer", "head"):
            if (self.arrays()[name] < 0).any():
                raise ClearheadError(f"{name} of a loading counts from 0; got {self.arrays()[name].min()}")
        if len(_groups(self.edge, self.layer, self.head)[0]) != len(self):
            raise ClearheadError("an edge has two loadings on the same head; add them first")

    def _describe(self, entry: int) -> str:
        return f"head.{self.layer[entry]}.{self.head[entry]}"

    def __len__(self) -> int:
        return len(self.weight)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The four lists by name."""
        return {"edge": self.edge, "layer": self.layer, "head": self.head, "weight": self.weight}

    def of(self, edge: int) -> dict[tuple[int, int], float]:
        """The loadings of one edge by (layer, head)."""
        entries = np.flatnonzero(self.edge == edge)
        return {(int(self.layer[x]), int(self.head[x])): float(self.weight[x]) for x in entries}

    def select(self, edges: NDArray[np.int64]) -> "Loadings":
        """Loadings of some edges (ascending places), numbered as those edges are in `edges`."""
        kept = np.isin(self.edge, edges)
        place = np.searchsorted(edges, self.edge[kept])
        return Loadings(place, self.layer[kept], self.head[kept], self.weight[kept], self.kind)

    def by_head(self) -> dict[tuple[int, int], float]:
        """Σ|weight| over all edges of each (layer, head), the largest first."""
        first, where = _groups(self.layer, self.head)
        total = np.bincount(where, np.abs(self.weight), minlength=len(first))
        order = np.argsort(-total, kind="stable")
        return {(int(self.layer[first[h]]), int(self.head[first[h]])): float(total[h]) for h in order}

    @staticmethod
    def add(parts: Sequence["Loadings"], edges: Sequence[NDArray[np.int64]], factors: Sequence[float]) -> "Loadings":
        """Σ factor · loadings, where entry e of `edges[p]` is the new place of edge e of part p; one kind in all."""
        edge = np.concatenate([new[part.edge] for new, part in zip(edges, parts, strict=True)])
        layer, head = (np.concatenate([part.arrays()[name] for part in parts]) for name in ("layer", "head"))
        weight = np.concatenate([factor * part.weight for factor, part in zip(factors, parts, strict=True)])
        first, where = _groups(edge, layer, head)
        total = np.bincount(where, weight, minlength=len(first))
        return Loadings(edge[first], layer[first], head[first], total, parts[0].kind)


@dataclass(frozen=True)
class AttentionTable:
    """Why one query looks at one key: the attention score split over pairs of a query-side and a key-side unit.

    A unit's name may be of one that was pruned from the graph. Raises `ClearheadError` for a name that is none and
    for a unit that has no attention of its own, `NonFiniteError` for numbers that are NaN or infinite.
    """

    unit: str
    """What is explained: `edge.L.h.k@q` for query q and key k of a head, `lorsa.L.i@q` for a Lorsa head."""
    score: float
    """The score that is explained, before the softmax."""
    total: float
    """Sum over all pairs, those that are not listed included."""
    against: int | None = None
    """Key whose score was subtracted; None where the mean key or no key was, as the graph's protocol says."""
    pairs: tuple[tuple[str, str, float], ...] = ()
    """(query-side unit, key-side unit, contribution), the largest first."""
    queries: tuple[tuple[str, float], ...] = ()
    """(query-side unit, its contribution summed over all keys' units)."""
    keys: tuple[tuple[str, float], ...] = ()
    """(key-side unit, its contribution summed over all queries' units)."""
    triples: tuple[tuple[str, int, str, float], ...] = ()
    """(query-side unit, singular mode of the head, key-side unit, contribution)."""

    def __post_init__(self) -> None:
        for name, types in ROWS.items():
            for entry in getattr(self, name):
                if len(entry) != len(types) or not all(map(isinstance, entry, types)):
                    raise ClearheadError(
                        f"{name} of the attention table of {self.unit} have {len(types)} parts, names of units first, "
                        f"a number last; got {entry}"
                    )
        if Unit.parse(self.unit).kind not in ("edge", "lorsa"):
            raise ClearheadError(
                f"an attention table explains an attention edge (edge.L.h.k@q) or a Lorsa head (lorsa.L.i@q); got "
                f"{self.unit}"
            )
        for name in self.names():
            Unit.parse(name)
        if not all(map(math.isfinite, self._numbers())):
            raise NonFiniteError(f"the attention table of {self.unit} holds a number that is not finite")

    def names(self) -> list[str]:
        """Names of the units that contribute, each once."""
        parts = (part for name in ROWS for entry in getattr(self, name) for part in entry[:-1])
        return list(dict.fromkeys(part for part in parts if isinstance(part, str)))

    def _numbers(self) -> list[float]:
        return [self.score, self.total, *(entry[-1] for name in ROWS for entry in getattr(self, name))]

    def changed(self, rename: Callable[[str], str], factor: float, by: int) -> "AttentionTable":
        """Units renamed, contributions multiplied, the key compared with moved `by` positions."""

        def rows(entries: Any) -> Any:
            return tuple(
                (*(rename(part) if isinstance(part, str) else part for part in entry[:-1]), factor * entry[-1])
                for entry in entries
            )

        return AttentionTable(
            rename(self.unit),
            factor * self.score,
            factor * self.total,
            None if self.against is None else self.against + by,
            **{name: rows(getattr(self, name)) for name in ROWS},
        )

    def plus(self, other: "AttentionTable") -> "AttentionTable":
        """The sum of two tables of the same unit, contributions of the same units added, the largest first."""
        summed: dict[str, Any] = {}
        for name in ROWS:
            total: dict[Any, float] = {}
            for *key, weight in (*getattr(self, name), *getattr(other, name)):
                total[tuple(key)] = total.get(tuple(key), 0.0) + weight
            order = sorted(total, key=lambda key: -abs(total[key]))
            summed[name] = tuple((*key, total[key]) for key in order)
        return AttentionTable(self.unit, self.score + other.score, self.total + other.total, self.against, **summed)

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`, lists in place of tuples allowed."""
        known = [f.name for f in fields(cls)]
        check_entries("attention table", entries, known, required=("unit", "score", "total"))
        rows = {name: entries.get(name, []) for name in ROWS}
        for name, given in rows.items():
            if not isinstance(given, list | tuple) or not all(isinstance(row, list | tuple) for row in given):
                raise CorruptFileError(f"{name} of an attention table: expected a list of lists, got {given!r}")
        for name in ("score", "total"):
            if not isinstance(entries[name], int | float):
                raise CorruptFileError(f"{name} of an attention table: expected a number, got {entries[name]!r}")
        if not isinstance(entries["unit"], str):
            raise CorruptFileError(f"unit of an attention table: expected a name, got {entries['unit']!r}")
        if not isinstance(entries.get("against"), int | None):
            raise CorruptFileError(f"against of an attention table: expected a key, got {entries['against']!r}")
        return cls(**{**entries, **{name: tuple(map(tuple, given)) for name, given in rows.items()}})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Supernode:
    """A named group of units."""

    name: str
    units: tuple[str, ...]


def _groups(*columns: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows that agree in all columns: the first row of every group, sorted by columns, and each row's group."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    first = code[:0]
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        # numbered anew at every column, so that no product outgrows an int64
        _, first, code = np.unique(code * len(values) + place, return_index=True, return_inverse=True)
    return first, code


def whole_numbers(values: ArrayLike, name: str) -> NDArray[np.int64]:
    """`values` as an int64 list; raises `ClearheadError` where they are no whole numbers."""
    array = np.atleast_1d(np.asarray(values))
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ClearheadError(f"{name} holds places or numbers that count, whole numbers; got {array.dtype}")
    return array.astype(np.int64)


def check_entries(what: str, entries: Any, known: Sequence[str], required: Sequence[str]) -> None:
    """Raise `CorruptFileError` unless `entries` is a table with all `required` names and none but `known`."""
    if not isinstance(entries, Mapping):
        raise CorruptFileError(f"{what}: expected a table of names and values, got {type(entries).__name__}")
    unknown = sorted(set(entries) - set(known))
    if unknown:
        raise CorruptFileError(f"{what}: unknown entry {unknown[0]!r}; known are {', '.join(known)}")
    missing = [name for name in required if name not in entries]
    if missing:
        raise CorruptFileError(f"{what} lacks {', '.join(missing)}")
