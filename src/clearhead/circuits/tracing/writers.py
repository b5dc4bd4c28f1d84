"""The units that write into the stream of one prompt, and their writes: what sources.py is made of.

Layer by layer: what active features and Lorsa heads write, what their dictionaries miss, what no dictionary explains,
and constants. The parts of each module's output add up to that output, in the format of the sums. A module's parts
enter through the norm behind it with the scale frozen (`Frozen.mlp_write`, `Frozen.attention_write`), whose bias is
among the frozen model's constants.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.tracing.frozen import Frozen
from clearhead.dictionaries import lorsa
from clearhead.errors import NonFiniteError
from clearhead.units import Unit


class Code(NamedTuple):
    """What one dictionary says about the prompt at one layer."""

    x: Float[Tensor, "t d"]
    """What it reads: the normalised stream."""
    values: Float[Tensor, "t k"]
    units: Int[Tensor, "t k"]


class Entries(NamedTuple):
    """Units, and their writes sorted by depth and position."""

    units: tuple[Unit, ...]
    unit: Int[Tensor, " e"]
    depth: Int[Tensor, " e"]
    position: Int[Tensor, " e"]
    write: Float[Tensor, "e d"]


def write_entries(
    frozen: Frozen, dictionaries: Dictionaries, mlp: dict[int, Code], attention: dict[int, Code]
) -> Entries:
    """Everything that writes into the stream, given what the dictionaries say by layer.

    Raises `NonFiniteError` where a dictionary writes NaN or infinity.
    """
    return _Writers(frozen, dictionaries, mlp, attention).entries()


def refuse_infinite(values: Float[Tensor, "*n d"], what: str) -> None:
    """Raise `NonFiniteError` for the first row of `values` that holds NaN or infinity."""
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        raise NonFiniteError(f"{what} is {float(values[tuple(bad[0])])} at position {int(bad[0, 0])}")


class _Writers:
    """Collects the units of one prompt and their entries."""

    def __init__(self, frozen: Frozen, dictionaries: Dictionaries, mlp: dict[int, Code], attention: dict[int, Code]):
        self.frozen, self.dictionaries, self.mlp, self.attention = frozen, dictionaries, mlp, attention
        self.t = len(frozen)
        self.positions = torch.arange(self.t)
        self.units: dict[Unit, int] = {}
        self.columns: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.missed: dict[int, Tensor] = {}
        """By layer, what of the MLP's output the dictionary has not explained yet."""

    def entries(self) -> Entries:
        """All of them."""
        tokens = self.frozen.stream.tokens
        self._add([Unit("embedding", index=v, position=t) for t, v in enumerate(tokens)], 0, self.frozen.state(0))
        self.missed = {layer: self.frozen.stream.site("mlp_out", layer) for layer in self.mlp}
        for layer in range(self.frozen.n_layers):
            self._attention(layer)
            self._mlp(layer)
        for constant in self.frozen.constants:
            self._bias(constant.layer, constant.depth, constant.write)
        unit, depth, position, write = (torch.cat(column) for column in zip(*self.columns, strict=True))
        refuse_infinite(write, "what the dictionaries write")
        order = torch.argsort(depth * self.t + position, stable=True)
        return Entries(tuple(self.units), unit[order], depth[order], position[order], write[order])

    def _attention(self, layer: int) -> None:
        if layer not in self.attention:
            return
        code, heads = self.attention[layer], self.dictionaries.attention[layer]
        depth = self.frozen.attention_depth(layer)
        position, value, index = _active(code)
        pieces = self.frozen.attention_write(layer, value[:, None] * heads.W_O[index], position)
        self._add(_units("lorsa", layer, index, position, value), depth, pieces)
        error = self.frozen.stream.site("attn_out", layer) - heads.decode(lorsa.Codes(code.values, code.units))
        self._whole("attn_error", layer, depth, self.frozen.attention_write(layer, error, self.positions))
        bias = heads.b_D.expand_as(error)
        self._bias(layer, depth, self.frozen.attention_write(layer, bias, self.positions))

    def _mlp(self, layer: int) -> None:
        depth = 2 * layer + 2
        if layer not in self.mlp:
            out = self.frozen.stream.site("mlp_out", layer)
            self._whole("mlp", layer, depth, self.frozen.mlp_write(layer, out, self.positions))
            return
        code = self.mlp[layer]
        position, value, index = _active(code)
        units = _units("feature", layer, index, position, value)
        for above, W_dec in self.dictionaries.decoders(layer):
            written = value[:, None] * W_dec[index]
            self._add(units, 2 * above + 2, self.frozen.mlp_write(above, written, position))
            self.missed[above] = self.missed[above].index_add(0, position, written, alpha=-1)
        skip = self.dictionaries.skip(layer, code.x)
        if skip is not None:
            self._whole("mlp", layer, depth, self.frozen.mlp_write(layer, skip, self.positions))
            self.missed[layer] = self.missed[layer] - skip
        bias = self.dictionaries.mlp_bias(layer).expand_as(code.x)
        self._bias(layer, depth, self.frozen.mlp_write(layer, bias, self.positions))
        error = self.missed[layer] - bias
        self._whole("error", layer, depth, self.frozen.mlp_write(layer, error, self.positions))

    def _whole(self, kind: str, layer: int, depth: int, write: Tensor) -> None:
        self._add([Unit(kind, layer, position=t) for t in range(self.t)], depth, write)

    def _bias(self, layer: int, depth: int, write: Tensor) -> None:
        self._add([Unit("bias", layer)] * self.t, depth, write, self.positions)

    def _add(self, units: list[Unit], depth: int, write: Tensor, position: Tensor | None = None) -> None:
        if position is None:
            position = torch.tensor([unit.position for unit in units], dtype=torch.int64)
        unit = torch.tensor([self.units.setdefault(unit, len(self.units)) for unit in units], dtype=torch.int64)
        device = write.device
        self.columns.append((unit.to(device), torch.full_like(unit, depth).to(device), position.to(device), write))


def _active(code: Code) -> tuple[Int[Tensor, " e"], Float[Tensor, " e"], Int[Tensor, " e"]]:
    """Position, value and index of everything that is active."""
    position, column = (code.values != 0).nonzero(as_tuple=True)
    return position, code.values[position, column], code.units[position, column]


def _units(kind: str, layer: int, index: Tensor, position: Tensor, value: Tensor) -> list[Unit]:
    rows = zip(index.tolist(), position.tolist(), value.tolist(), strict=True)
    return [Unit(kind, layer, i, t, activation=a) for i, t, a in rows]
