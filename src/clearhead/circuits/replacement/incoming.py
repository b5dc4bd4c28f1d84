"""Edges into the units of one kind and layer, all of them, and their sums over groups of units.

An edge is a mean over tokens of what one unit gives to another, so the edge between two groups is the sum over their
members: weight[group, group'] = Σ_{u in group} Σ_{v in group'} weight[u, v], exactly, whatever cancels in it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.units import Unit


@dataclass(frozen=True, eq=False)
class Incoming:
    """All edges into some units of one kind and layer."""

    sources: list[Unit]
    targets: list[Unit]
    weight: Float[Tensor, "u m"]

    def summed(self, group: Callable[[Unit], Unit]) -> "Incoming":
        """Edges between the groups that units belong to, in the order of each group's first member."""
        weight = self.weight
        sources, rows = _grouped(self.sources, group)
        targets, columns = _grouped(self.targets, group)
        rows, columns = rows.to(weight.device), columns.to(weight.device)
        weight = weight.new_zeros(len(sources), weight.shape[1]).index_add_(0, rows, weight)
        weight = weight.new_zeros(len(sources), len(targets)).index_add_(1, columns, weight)
        return Incoming(sources, targets, weight)


def _grouped(units: list[Unit], group: Callable[[Unit], Unit]) -> tuple[list[Unit], Tensor]:
    """The groups, and by unit the place of its own."""
    groups = [group(unit) for unit in units]
    place = {unit: number for number, unit in enumerate(dict.fromkeys(groups))}
    return list(place), torch.tensor([place[unit] for unit in groups])
