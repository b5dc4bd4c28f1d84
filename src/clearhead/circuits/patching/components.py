"""Components: the heads, or heads and MLPs, that circuits of one model are made of, and where their outputs are.

A component's output is what a circuit overwrites: a head's is its slice of `z` (so that with grouped keys a query head
is one component and its keys and values, which others use too, are none), an MLP's is `mlp_out`. Everything else
(embedding, norms, biases, for the level `heads` also the MLPs) belongs to every circuit.

Not here: attention edges and graph edges, which have files of their own; patches of any site (patch.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.access import Model
from clearhead.units.unit import Unit

NodeKind = Literal["heads", "heads+mlps"]
NODE_KINDS: tuple[NodeKind, NodeKind] = ("heads", "heads+mlps")


@dataclass(frozen=True)
class Slot:
    """The components whose outputs lie in one site: the heads of a layer along the head axis of z, or one MLP."""

    site: str
    layer: int
    start: int
    """Index of the first one among all components."""
    stop: int

    @property
    def is_heads(self) -> bool:
        """Whether the site is z."""
        return self.site.startswith("z.")

    def spread(self, mask: Tensor) -> Tensor:
        """The slot's part of a mask [i, n], shaped to multiply its site: [i, 1, h, 1] for z, [i, 1, 1] for an MLP."""
        part = mask[:, self.start : self.stop]
        return part[:, None, :, None] if self.is_heads else part[:, None]


@dataclass(frozen=True)
class Components:
    """All components of one level, in order of depth."""

    name: NodeKind
    units: tuple[Unit, ...]
    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, model: Model, level: NodeKind) -> Self:
        """Every head of every layer with softmax attention, with `heads+mlps` also every MLP.

        Raises `UnknownNameError` for another level.
        """
        if level not in NODE_KINDS:
            raise UnknownNameError("level of components", level, NODE_KINDS)
        units: list[Unit] = []
        slots: list[Slot] = []
        for layer in range(model.n_layers):
            if layer in model.attention_layers:
                slots.append(Slot(f"z.{layer}", layer, len(units), len(units) + model.n_heads))
                units += [Unit("head", layer, head) for head in range(model.n_heads)]
            if level == "heads+mlps":
                slots.append(Slot(f"mlp_out.{layer}", layer, len(units), len(units) + 1))
                units.append(Unit("mlp", layer))
        return cls(level, tuple(units), tuple(slots))

    def __len__(self) -> int:
        return len(self.units)

    @property
    def names(self) -> list[str]:
        """The units' ids."""
        return [unit.id for unit in self.units]

    @property
    def sites(self) -> list[str]:
        """The sites that hold the outputs."""
        return [slot.site for slot in self.slots]

    def layers(self) -> Int64[Tensor, " n"]:
        """The layer of each component."""
        return torch.tensor([unit.layer for unit in self.units])

    def index(self, name: str) -> int:
        """The number of the component called `name`. Raises `UnknownNameError` with the nearest name."""
        if name not in self.names:
            raise UnknownNameError(f"component of level {self.name}", name, self.names)
        return self.names.index(name)

    def circuit(self, names: Iterable[str]) -> Bool[Tensor, "1 1 n"]:
        """The mask of a circuit given by names, as `Nodes.evaluate` takes it: one circuit, the same for all prompts.

        Raises `UnknownNameError` for a name that is no component, `ClearheadError` for a circuit without any.
        """
        places = [self.index(name) for name in names]
        if not places:
            raise ClearheadError("the circuit is empty: name at least one component, as in ['head.5.2']")
        keep = torch.zeros(1, 1, len(self), dtype=torch.bool)
        keep[0, 0, places] = True
        return keep
