"""The heads that carry one edge, or the edges of several sources into one target taken together.

With sources s, a target t, and the loadings of paths whose last head is h of layer l (loadings.py, "last"),

    edge = Σ_s edge(s → t) = direct + Σ_lh w_lh,   w_lh = Σ_s loading(s → t; l, h)

The heads that carry a share of the edge are the fewest that hold that share of Σ_lh |w_lh|. Taken together are, for
example, all units at one token: embedding, features, heads and errors there. What they say is what is written at that
position, whatever wrote it. Not here: which key and query of a head (loadings.split_edge).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from clearhead.circuits.tracing.loadings import split_edges
from clearhead.circuits.tracing.readers import Reads
from clearhead.circuits.tracing.sources import Opened
from clearhead.errors import ClearheadError
from clearhead.units.algebra import carriers


@dataclass(frozen=True)
class CarriedEdge:
    """One edge over the heads that carry it."""

    weight: float
    direct: float
    """What passes no head."""
    heads: dict[tuple[int, int], float]
    """By layer and head, the largest first; those that carry nothing are left out."""

    def count(self, share: float) -> int:
        """The fewest heads that hold `share` of Σ|w|."""
        return len(carriers(np.array(list(self.heads.values())), share))


def carry_edge(opened: Opened, reads: Reads, sources: Sequence[int], target: int) -> CarriedEdge:
    """What heads carry from some sources to one target.

    sources: places among `opened.sources.units`; target: place among `reads.targets`. Raises `ClearheadError` for no
    sources.
    """
    if not sources:
        raise ClearheadError("give at least one source of the edge")
    device = reads.vector.device
    source = torch.tensor(list(sources), device=device)
    weight = reads.edges(opened)[target, source]
    split = split_edges(opened, reads, source, torch.full_like(source, target), weight, "last")
    total = split.weight.sum(0)
    layer, head = total.nonzero(as_tuple=True)
    order = total[layer, head].abs().argsort(descending=True, stable=True)
    columns = (column[order].tolist() for column in (layer, head, total[layer, head]))
    heads = {(at, number): carried for at, number, carried in zip(*columns, strict=True)}
    return CarriedEdge(float(weight.sum()), float(split.direct.sum()), heads)


def sources_named(opened: Opened, name: str) -> list[int]:
    """Places of the sources that a name stands for: one unit, or `@7` for all that write at position 7.

    Raises `ClearheadError` for a position outside the prompt and for a unit that writes nothing in it.
    """
    units = opened.sources.units
    if not name.startswith("@"):
        places = [place for place, unit in enumerate(units) if unit.id == name]
        if not places:
            raise ClearheadError(f"{name} writes nothing in this prompt; give a unit of its graph, or @7 for a token")
        return places
    if not name[1:].isdecimal() or int(name[1:]) >= len(opened):
        raise ClearheadError(f"{name} is none of the prompt's tokens @0 to @{len(opened) - 1}")
    return [place for place, unit in enumerate(units) if unit.position == int(name[1:])]
