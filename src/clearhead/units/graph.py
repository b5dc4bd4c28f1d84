"""Graph: units joined by signed, weighted, directed edges, stored sparsely with their provenance.

An edge `source → target` of weight w says how much the source contributes to the target, in the unit of measure
its protocol names. The algebra is that of sparse matrices: `merge` adds, `diff` subtracts, `prune` keeps the
heaviest edges. Nothing here measures an effect; tracing and patching build graphs, pages draw them.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from clearhead.units.algebra import carriers, combine
from clearhead.units.annotations import AttentionTable, Loadings, Supernode, whole_numbers
from clearhead.units.order import topological_order
from clearhead.units.portable import from_entries, to_entries
from clearhead.units.provenance import Provenance
from clearhead.units.unit import Unit

NONE: Mapping[str, Any] = MappingProxyType({})


class Graph:
    """Units and edges: edge e goes from `units[source[e]]` to `units[target[e]]` with `weight[e]`.

    source, target: int64 [edges]; weight: float64 [edges]. Accepts anything numpy can read, torch tensors on the
    CPU included. Beside them, each optional:

    values: named numbers, float64 [units] each; NaN where a unit has no such number. Names that pages and exports
        know: `influence` (cumulative share 0 to 1, small for the most important), `probability` (of a logit).
    loadings: which heads carry each edge. attention: why heads look where they look.
    supernodes: named groups of units. scores: named numbers of the whole graph. tokens: strings of the prompt.
    labels: words for units by name, such as a logit's token or what a feature stands for.

    Raises `ClearheadError` for repeated units, repeated edges, edges to units that are not there, and arrays of
    different lengths; `NonFiniteError` for a weight or score that is NaN or infinite; `UnknownNameError` for a
    supernode of units that are not there. Cycles are allowed; `check_acyclic` refuses them where they do harm.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        source: ArrayLike,
        target: ArrayLike,
        weight: ArrayLike,
        provenance: Provenance,
        *,
        values: Mapping[str, ArrayLike] = NONE,
        loadings: Loadings | None = None,
        attention: Sequence[AttentionTable] = (),
        supernodes: Sequence[Supernode] = (),
        scores: Mapping[str, float] = NONE,
        tokens: Sequence[str] = (),
        labels: Mapping[str, str] = NONE,
    ):
        self.units = tuple(units)
        self.source = whole_numbers(source, "source")
        self.target = whole_numbers(target, "target")
        self.weight: NDArray[np.float64] = np.atleast_1d(np.asarray(weight, dtype=np.float64))
        self.provenance = provenance
        self.values = {name: np.asarray(array, dtype=np.float64) for name, array in values.items()}
        self.loadings = loadings
        self.attention = tuple(attention)
        self.supernodes = tuple(supernodes)
        self.scores = {name: float(score) for name, score in scores.items()}
        self.tokens = tuple(tokens)
        self.labels = dict(labels)
        self._place = {unit: place for place, unit in enumerate(self.units)}
        self._validate()
        self._validate_annotations()

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
            raise NonFiniteError(f"edge {edge} ({self.describe(edge)}) has weight {self.weight[edge]}")
        keys, first = np.unique(self._keys(), return_index=True)
        if len(keys) != len(self.weight):
            edge = int(np.setdiff1d(np.arange(len(self.weight)), first)[0])
            raise ClearheadError(f"the edge {self.describe(edge)} appears more than once; add its weights first")

    def _validate_annotations(self) -> None:
        for name, array in self.values.items():
            if array.shape != (len(self.units),):
                raise ClearheadError(f"values {name!r} have shape {array.shape}, but there are {len(self.units)} units")
            if np.isinf(array).any():
                raise NonFiniteError(f"{name} of {self.units[int(np.argmax(np.isinf(array)))]} is infinite")
        for name, score in self.scores.items():
            if not np.isfinite(score):
                raise NonFiniteError(f"the score {name!r} is {score}")
        if self.loadings is not None and len(self.loadings) and self.loadings.edge.max() >= len(self):
            raise ClearheadError(f"a loading names edge {self.loadings.edge.max()}, but there are {len(self)} edges")
        for what, names in (
            ("supernode", [group.name for group in self.supernodes]),
            ("attention table", [f"{table.unit} against {table.against}" for table in self.attention]),
        ):
            if len(set(names)) != len(names):
                raise ClearheadError(f"{what} {next(n for n in names if names.count(n) > 1)} appears more than once")
        for group in self.supernodes:
            for name in group.units:
                self.place(name)
        ids = self.provenance.token_ids
        if self.tokens and ids and len(self.tokens) != len(ids):
            raise ClearheadError(f"there are {len(self.tokens)} tokens but {len(ids)} token ids in the provenance")
        if self.tokens:
            for unit in self.units:
                if unit.position is not None and unit.position >= len(self.tokens):
                    raise ClearheadError(f"unit {unit} lies beyond the prompt of {len(self.tokens)} tokens")

    def _keys(self) -> NDArray[np.int64]:
        return self.source * len(self.units) + self.target

    def describe(self, edge: int) -> str:
        """An edge in words: `head.0.1 → logit.5@3`."""
        return f"{self.units[self.source[edge]]} → {self.units[self.target[edge]]}"

    def __len__(self) -> int:
        return len(self.weight)

    def __repr__(self) -> str:
        return f"Graph({len(self.units)} units, {len(self)} edges, {self.provenance.protocol!r})"

    def __contains__(self, unit: Unit | str) -> bool:
        return _unit(unit) in self._place

    @property
    def annotated(self) -> list[str]:
        """Names of what this graph says beside its units and edges."""
        names = ("values", "attention", "supernodes", "scores", "tokens", "labels")
        return [name for name in names if getattr(self, name)] + ["loadings"] * (self.loadings is not None)

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
        kept = carriers(self.weight, share)
        return self.select(np.unique(np.concatenate([self.source[kept], self.target[kept]])), kept)

    def restrict(self, units: Iterable[Unit | str]) -> "Graph":
        """These units and the edges between them, in the order stored; raises `UnknownNameError`."""
        keep = np.zeros(len(self.units), dtype=bool)
        keep[[self.place(unit) for unit in units]] = True
        return self.select(np.flatnonzero(keep), np.flatnonzero(keep[self.source] & keep[self.target]))

    def select(self, units: NDArray[np.int64], edges: NDArray[np.int64]) -> "Graph":
        """Some units and some of the edges between them, both as ascending places, with all that is said of them.

        A supernode keeps its units that are left. An attention table is dropped with its unit, or, where that is no
        unit of the graph, with the last loading on its head.
        """
        loadings = None if self.loadings is None else self.loadings.select(edges)
        left = [self.units[p] for p in units]
        before = after = set[str]()
        if self.attention:
            before, after = _explained(self.units, self.loadings), _explained(left, loadings)
        ids = {unit.id for unit in left}
        groups = [Supernode(group.name, tuple(u for u in group.units if u in ids)) for group in self.supernodes]
        return Graph(
            left,
            np.searchsorted(units, self.source[edges]),
            np.searchsorted(units, self.target[edges]),
            self.weight[edges],
            self.provenance,
            values={name: array[units] for name, array in self.values.items()},
            loadings=loadings,
            attention=[
                table for table in self.attention if after & _explained_by(table) or not before & _explained_by(table)
            ],
            supernodes=[group for group in groups if group.units],
            scores=self.scores,
            tokens=self.tokens,
            labels=self.labels,
        )

    def merge(self, *others: "Graph", mean: bool = False, from_end: bool = False) -> "Graph":
        """Union of units and edges; an edge has the sum of its weights in all graphs, or their mean.

        Values, scores and activations are means over the graphs that have them; loadings are kept where all graphs
        have them. `from_end` counts positions from the end of each prompt.
        """
        graphs = [self, *others]
        factor, word = (1 / len(graphs), "mean") if mean else (1.0, "sum")
        return Graph(**combine(graphs, [factor] * len(graphs), word, from_end))

    def diff(self, other: "Graph", *, from_end: bool = False) -> "Graph":
        """Subtract `other`: union of units and edges, weights subtracted; edges that cancel stay at 0.

        Values, scores and activations are subtracted where both graphs have them and missing elsewhere.
        """
        return Graph(**combine([self, other], [1.0, -1.0], "difference", from_end))

    def check_acyclic(self) -> NDArray[np.int64]:
        """Places of the units so that every edge goes to a later one; raises `ClearheadError` naming a cycle."""
        return topological_order(self)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain Python values for JSON and for the atlas; vectors are left out."""
        return to_entries(self)

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`, format 1 included; raises `CorruptFileError` for entries missing or not ours."""
        return cls(**from_entries(entries))


def _unit(unit: Unit | str) -> Unit:
    return Unit.parse(unit) if isinstance(unit, str) else unit


def _explained(units: Iterable[Unit], loadings: Loadings | None) -> set[str]:
    """Names of what attention tables of a graph may explain: its units, and heads that carry an edge."""
    heads = set() if loadings is None else {f"head.{layer}.{head}" for layer, head in loadings.by_head()}
    return {unit.id for unit in units} | heads


def _explained_by(table: AttentionTable) -> set[str]:
    unit = Unit.parse(table.unit)
    return {unit.id} if unit.kind == "lorsa" else {unit.id, f"head.{unit.layer}.{unit.index}"}
