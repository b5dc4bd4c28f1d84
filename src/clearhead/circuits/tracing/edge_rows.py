"""What was found out about each target of an attribution graph: its largest incoming edges, and the sums of all.

A row belongs to a target. All edges into a start are stored, of which there are few; of those into any other target the
`KEPT` largest by size, and of the rest only their sum. So memory is linear in what is stored, and no matrix of units by
units is ever formed. The sums over the whole row, by what the sources are, are taken before anything is dropped:

    token     embeddings                            readable   features and Lorsa heads, which read something themselves
    error     what dictionaries miss, whole MLPs    bias       constants

Nodes are numbered: first the sources of the prompt, then the targets that the graph starts from.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from clearhead.circuits.tracing.readers import EXPLAINED
from clearhead.errors import NonFiniteError
from clearhead.units import Unit

KEPT = 256
"""Edges stored per target."""
CLASSES = ("token", "error", "bias", "readable")
CLASS_OF = {
    "embedding": "token",
    "error": "error",
    "attn_error": "error",
    "mlp": "error",
    "bias": "bias",
} | dict.fromkeys(EXPLAINED, "readable")


def classes(units: tuple[Unit, ...]) -> NDArray[np.int64]:
    """The class of every source, as its place in CLASSES."""
    return np.array([CLASSES.index(CLASS_OF[unit.kind]) for unit in units], dtype=np.int64)


class Entries(NamedTuple):
    """Stored edges, as long as there are any: nodes and weight of each."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    weight: NDArray[np.float64]

    def where(self, kept: NDArray[np.bool_]) -> "Entries":
        """Some of them."""
        return Entries(self.source[kept], self.target[kept], self.weight[kept])

    def followed_by(self, other: "Entries") -> "Entries":
        """These, then those."""
        return Entries(
            np.concatenate([self.source, other.source]),
            np.concatenate([self.target, other.target]),
            np.concatenate([self.weight, other.weight]),
        )


@dataclass(eq=False)
class EdgeRows:
    """Rows of the targets explained so far; `add` appends to them."""

    units: tuple[Unit, ...]
    """Every node: the sources, then the starts."""
    n_sources: int
    kept: int = KEPT
    target: list[int] = field(default_factory=list)
    """Node of every row."""
    total: list[float] = field(default_factory=list)
    """Σ|edge| over a whole row."""
    mass: list[list[float]] = field(default_factory=list)
    """The same by class."""
    dropped: list[float] = field(default_factory=list)
    """Σ|edge| of those not stored."""
    error: list[float] = field(default_factory=list)
    """|Σ edge + constant − value| relative to Σ|edge|: how exactly a row adds up."""
    entries: Entries = Entries(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    """All stored edges."""

    def __post_init__(self) -> None:
        self.of_class = classes(self.units[: self.n_sources])

    def __len__(self) -> int:
        return len(self.target)

    def add(
        self, targets: list[int], edges: Float[Tensor, "m n"], constant: Float[Tensor, " m"], value: Float[Tensor, " m"]
    ) -> None:
        """Rows of new targets, all of them starts or none. Raises `NonFiniteError` for NaN or infinity."""
        if not bool(edges.isfinite().all()):
            row = int((~edges.isfinite()).any(1).nonzero()[0])
            raise NonFiniteError(f"an edge into {self.units[targets[row]]} is NaN or infinite")
        size = edges.abs()
        total = size.sum(1, dtype=torch.float64)
        one_hot = torch.nn.functional.one_hot(torch.as_tensor(self.of_class), len(CLASSES)).to(size)
        kept = edges.shape[1] if targets[0] >= self.n_sources else min(self.kept, edges.shape[1])
        largest = size.topk(kept, dim=1).indices
        stored = edges.gather(1, largest).double().cpu().numpy()
        self.target += targets
        self.total += total.tolist()
        self.mass += (size @ one_hot).double().tolist()
        self.dropped += (total - size.gather(1, largest).sum(1, dtype=torch.float64)).clamp_min(0).tolist()
        off = (edges.sum(1, dtype=torch.float64) + constant - value).abs()
        self.error += (off / total.clamp_min(torch.finfo(torch.float32).tiny)).tolist()
        there = stored != 0
        found = Entries(
            largest.cpu().numpy()[there],
            np.repeat(np.array(targets, dtype=np.int64), there.sum(1)),
            stored[there],
        )
        self.entries = self.entries.followed_by(found)

    def by_node(self, values: list[float] | NDArray[np.float64]) -> NDArray[np.float64]:
        """One number per row as one per node, 0 at nodes without a row."""
        spread = np.zeros(len(self.units))
        spread[self.target] = values
        return spread

    def shares(self) -> NDArray[np.float64]:
        """|weight| of every stored edge as a share of its target's whole row."""
        return np.abs(self.entries.weight) / self.by_node(self.total)[self.entries.target]

    def class_shares(self) -> NDArray[np.float64]:
        """What comes into every row by class, as shares of the whole row [r, 4]."""
        return np.array(self.mass) / np.maximum(np.array(self.total), np.finfo(np.float64).tiny)[:, None]
