"""Graph: units joined by signed, weighted, directed edges, stored sparsely with their provenance.

An edge `source → target` of weight w says how much the source contributes to the target, in the unit of measure
its protocol names. The algebra is that of sparse matrices: `merge` adds, `diff` subtracts, `prune` keeps the
heaviest edges. Nothing here measures an effect; tracing and patching build graphs, pages draw them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clearhead.errors import ClearheadError, CorruptFileError, NonFiniteError, UnknownNameError
from clearhead.units.unit import Unit

FORMAT = 1
"""Version of the exported dictionary."""


@dataclass(frozen=True)
class Provenance:
    """Where a graph's numbers come from: enough to compute them again."""

    model: str
    protocol: str
    """What a weight means and how it was measured."""
    prompt: str = ""
    token_ids: tuple[int, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    parents: tuple["Provenance", ...] = ()
    """Provenance of the graphs this one was computed from."""

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`; raises `UnknownNameError` for an entry that does not exist."""
        known = {f.name for f in fields(cls)}
        for name in entries:
            if name not in known:
                raise UnknownNameError("provenance entry", name, known)
        for name in ("model", "protocol"):
            if name not in entries:
                raise CorruptFileError(f"provenance without {name!r}; has {', '.join(sorted(entries)) or 'nothing'}")
        return cls(
            **{
                **entries,
                "token_ids": tuple(entries.get("token_ids", ())),
                "parents": tuple(cls.from_dict(parent) for parent in entries.get("parents", ())),
            }
        )


class Graph:
    """Units and edges: edge e goes from `units[source[e]]` to `units[target[e]]` with `weight[e]`.

    source, target: int64 [edges]; weight: float64 [edges]. Accepts anything numpy can read, torch tensors on the
    CPU included. Raises `ClearheadError` for repeated units, repeated edges, edges to units that are not there, and
    arrays of different lengths; `NonFiniteError` for a weight that is NaN or infinite.
    """

    def __init__(
        self, units: Sequence[Unit], source: ArrayLike, target: ArrayLike, weight: ArrayLike, provenance: Provenance
    ):
        self.units = tuple(units)
        self.source = _places(source, "source")
        self.target = _places(target, "target")
        self.weight: NDArray[np.float64] = np.atleast_1d(np.asarray(weight, dtype=np.float64))
        self.provenance = provenance
        self._place = {unit: place for place, unit in enumerate(self.units)}
        self._validate()

    def _validate(self) -> None:
        if len(self._place) != len(self.units):
            repeated = next(unit for place, unit in enumerate(self.units) if self._place[unit] != place)
            raise ClearheadError(f"unit {repeated} appears more than once in one graph")
        if not self.source.shape == self.target.shape == self.weight.shape or self.weight.ndim != 1:
            raise ClearheadError(
                f"source, target and weight must be lists of one length; got shapes {self.source.shape}, "
                f"{self.target.shape}, {self.weight.shape}"
            )
        for name, places in (("source", self.source), ("target", self.target)):
            outside = np.flatnonzero((places < 0) | (places >= len(self.units)))
            if outside.size:
                raise ClearheadError(
                    f"edge {outside[0]} has {name} {places[outside[0]]}, but there are {len(self.units)} units"
                )
        finite = np.isfinite(self.weight)
        if not finite.all():
            edge = int(np.argmin(finite))
            raise NonFiniteError(f"edge {edge} ({self._describe(edge)}) has weight {self.weight[edge]}")
        keys, first = np.unique(self._keys(), return_index=True)
        if len(keys) != len(self.weight):
            edge = int(np.setdiff1d(np.arange(len(self.weight)), first)[0])
            raise ClearheadError(f"the edge {self._describe(edge)} appears more than once; add its weights first")

    def _keys(self) -> NDArray[np.int64]:
        return self.source * len(self.units) + self.target

    def _describe(self, edge: int) -> str:
        return f"{self.units[self.source[edge]]} → {self.units[self.target[edge]]}"

    def __len__(self) -> int:
        return len(self.weight)

    def __repr__(self) -> str:
        return f"Graph({len(self.units)} units, {len(self)} edges, {self.provenance.protocol!r})"

    def __contains__(self, unit: Unit | str) -> bool:
        return _unit(unit) in self._place

    def unit(self, unit: Unit | str) -> Unit:
        """The graph's own unit of this name, with its vectors and activation; raises `UnknownNameError`."""
        return self.units[self.place(unit)]

    def place(self, unit: Unit | str) -> int:
        """Number of the unit in `units`; raises `UnknownNameError` when it is not in the graph."""
        unit = _unit(unit)
        if unit not in self._place:
            raise UnknownNameError("unit of this graph", unit.id, (known.id for known in self.units))
        return self._place[unit]

    def weights_between(self, source: Unit | str, target: Unit | str) -> float:
        """Weight of the edge, 0 when both units are in the graph and no edge joins them."""
        found = (self.source == self.place(source)) & (self.target == self.place(target))
        return float(self.weight[found].sum())

    def prune(self, share: float) -> "Graph":
        """The fewest edges that carry `share` of Σ|weight|, and the units they touch.

        Heaviest first, equal weights in the order stored; share in [0, 1]. Pruned weights are dropped, not
        redistributed.
        """
        if not 0 <= share <= 1:
            raise ClearheadError(f"share must lie in [0, 1], as in prune(0.9) for 90 % of the weight; got {share}")
        size = np.abs(self.weight)
        order = np.argsort(-size, kind="stable")
        before = np.concatenate([[0.0], np.cumsum(size[order])[:-1]]) if len(order) else size
        # an edge is kept while those heavier than it fall short of the share; zero edges carry nothing
        kept = np.sort(order[(before < share * size.sum() * (1 - 1e-12)) & (size[order] > 0)])
        return self._restrict(kept)

    def _restrict(self, edges: NDArray[np.int64]) -> "Graph":
        source, target, weight = self.source[edges], self.target[edges], self.weight[edges]
        places = np.unique(np.concatenate([source, target]))
        return Graph(
            [self.units[p] for p in places],
            np.searchsorted(places, source),
            np.searchsorted(places, target),
            weight,
            self.provenance,
        )

    def merge(self, other: "Graph") -> "Graph":
        """Union of units and edges; an edge in both has the sum of the two weights."""
        return self._add(other, 1.0, "sum")

    def diff(self, other: "Graph") -> "Graph":
        """Subtract `other`: union of units and edges, weights subtracted; edges that cancel stay at 0."""
        return self._add(other, -1.0, "difference")

    def _add(self, other: "Graph", sign: float, word: str) -> "Graph":
        units = list(dict.fromkeys([*self.units, *other.units]))
        place = {unit: p for p, unit in enumerate(units)}
        moved = np.array([place[unit] for unit in other.units], dtype=np.int64)
        keys = np.concatenate(
            [
                self.source * len(units) + self.target,
                moved[other.source] * len(units) + moved[other.target],
            ]
        )
        edges, where = np.unique(keys, return_inverse=True)
        weight = np.bincount(where, np.concatenate([self.weight, sign * other.weight]), minlength=len(edges))
        parents = (self.provenance, other.provenance)
        protocol = parents[0].protocol if parents[0].protocol == parents[1].protocol else "mixed protocols"
        model = parents[0].model if parents[0].model == parents[1].model else "several models"
        joined = Provenance(model=model, protocol=f"{word} of two graphs: {protocol}", parents=parents)
        return Graph(units, edges // max(len(units), 1), edges % max(len(units), 1), weight, joined)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain Python values for JSON and for the atlas; vectors are left out."""
        return {
            "format": FORMAT,
            "provenance": asdict(self.provenance),
            "units": [unit.id for unit in self.units],
            "activation": [None if unit.activation is None else float(unit.activation) for unit in self.units],
            "source": self.source.tolist(),
            "target": self.target.tolist(),
            "weight": self.weight.tolist(),
        }

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; raises `CorruptFileError` for missing entries or a format that is not ours."""
        if entries.get("format") != FORMAT:
            raise CorruptFileError(
                f"this graph has format {entries.get('format')!r}; this version of clearhead reads format {FORMAT}"
            )
        missing = {"provenance", "units", "activation", "source", "target", "weight"} - set(entries)
        if missing:
            raise CorruptFileError(f"this graph lacks {', '.join(sorted(missing))}")
        if len(entries["activation"]) != len(entries["units"]):
            raise CorruptFileError(
                f"this graph has {len(entries['units'])} units but {len(entries['activation'])} activations"
            )
        units = [_with_activation(*pair) for pair in zip(entries["units"], entries["activation"], strict=True)]
        provenance = Provenance.from_dict(entries["provenance"])
        return cls(units, entries["source"], entries["target"], entries["weight"], provenance)


def _unit(unit: Unit | str) -> Unit:
    return Unit.parse(unit) if isinstance(unit, str) else unit


def _with_activation(name: str, activation: float | None) -> Unit:
    unit = Unit.parse(name)
    return Unit(unit.kind, unit.layer, unit.index, unit.position, unit.part, activation=activation)


def _places(values: ArrayLike, name: str) -> NDArray[np.int64]:
    array = np.atleast_1d(np.asarray(values))
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ClearheadError(f"{name} holds places of units, whole numbers; got {array.dtype}")
    return array.astype(np.int64)
