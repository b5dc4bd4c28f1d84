"""Sources: everything that writes into the stream of one prompt, as units whose writes add up to the stream.

    embedding.v@t     the stream before the first layer
    feature.L.i@t     a_i W_dec[i], for every feature of a transcoder that is active at t; that of a cross-layer
                      transcoder writes behind every MLP from layer L on
    lorsa.L.i@t       z_i w_o[i], for every Lorsa head that is active at t
    error.L@t         mlp_out − what the dictionary predicts;   attn_error.L@t   attn_out − what the Lorsa predicts
    mlp.L@t           the whole MLP where no dictionary stands, and a transcoder's skip connection where one does
    bias.L            what layer L writes whatever it reads, at all positions: decoder biases and frozen.py's constants

Every write enters through the norm behind its module, if there is one, with the scale held frozen. Attention without a
Lorsa is no source: the frozen model carries it. An entry is one write at one depth and position; a unit has one or
several. Pushed through the frozen model, all entries together are the stream at every depth, to rounding.

Edges in two ways, with the same result: `Sources.edges` from a target's gradients (backward, for few targets), and
`components` of every unit (forward, for all targets of a short prompt).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.tracing.frozen import Frozen
from clearhead.circuits.tracing.writers import Code, refuse_infinite, write_entries
from clearhead.errors import ClearheadError
from clearhead.model.norms import Norm
from clearhead.spectral.writes import Parts, Stream
from clearhead.units import Unit


class _Block(NamedTuple):
    """Entries of one depth at successive positions, equally many at each."""

    start: int
    """Its first entry."""
    position: int
    stop: int
    each: int


@dataclass(frozen=True, eq=False)
class Sources:
    """Units and their writes, entries sorted by depth and position."""

    units: tuple[Unit, ...]
    unit: Int[Tensor, " e"]
    """Which unit an entry belongs to."""
    depth: Int[Tensor, " e"]
    position: Int[Tensor, " e"]
    write: Float[Tensor, "e d"]

    def __len__(self) -> int:
        return len(self.units)

    @cached_property
    def place(self) -> dict[Unit, int]:
        """Number of each unit."""
        return {unit: place for place, unit in enumerate(self.units)}

    @cached_property
    def _blocks(self) -> dict[int, list[_Block]]:
        """Per depth, the positions with equally many entries each."""
        blocks: dict[int, list[_Block]] = {}
        keys = torch.stack([self.depth, self.position]).cpu()
        places, counts = torch.unique_consecutive(keys, dim=1, return_counts=True)
        start = 0
        for (depth, position), count in zip(places.T.tolist(), counts.tolist(), strict=True):
            there = blocks.setdefault(depth, [])
            if there and there[-1].each == count and there[-1].stop == position:
                there[-1] = there[-1]._replace(stop=position + 1)
            else:
                there.append(_Block(start, position, position + 1, count))
            start += count
        return blocks

    def edges(self, gradients: Iterable[tuple[int, Float[Tensor, "m t d"]]]) -> Float[Tensor, "m n"]:
        """What every unit contributes to m targets, from the gradients that `Frozen.pull` yields for them."""
        total = None
        for depth, gradient in gradients:
            if total is None:
                total = gradient.new_zeros(len(gradient), len(self.units))
            for block in self._blocks.get(depth, ()):
                entries = slice(block.start, block.start + (block.stop - block.position) * block.each)
                written = self.write[entries].unflatten(0, (-1, block.each))
                met = gradient[:, block.position : block.stop].transpose(0, 1) @ written.mT
                total.index_add_(1, self.unit[entries], met.permute(1, 0, 2).flatten(1))
        if total is None:
            raise ClearheadError("no gradients were given, so there is no target to explain")
        return total

    def components(self, frozen: Frozen) -> Iterator[tuple[int, Float[Tensor, "n t d"]]]:
        """What every unit is in the stream, at every depth from 0 up: n · t · d numbers at a time."""
        return frozen.push(self.write, self.depth, self.position, self.unit)


@dataclass(frozen=True, eq=False)
class Opened:
    """One prompt, opened for tracing."""

    stream: Stream
    dictionaries: Dictionaries
    frozen: Frozen
    mlp: dict[int, Code]
    """By layer, what the transcoder there says."""
    attention: dict[int, Code]
    """By layer, what the Lorsa there says."""
    sources: Sources

    @property
    def parts(self) -> Parts:
        """The model's weights and norms."""
        return self.stream.parts

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return len(self.stream)

    def norm_at(self, depth: int) -> Norm | None:
        """The norm through which the stream is read at a depth; None where it is read as it is."""
        layer, second = divmod(depth, 2)
        if layer == self.stream.n_layers:
            return self.parts.final_norm
        parts = self.parts.layers[layer]
        return parts.mlp_norm if second else parts.norm


@torch.no_grad()
def open_prompt(parts: Parts, tokens: Int[Tensor, "1 t"], dictionaries: Dictionaries | None = None) -> Opened:
    """Runs the model on one prompt and names everything that writes into its stream.

    Raises `ClearheadError` for no tokens, more than the model's context, or dictionaries of another model;
    `NonFiniteError` where the forward or a dictionary gives NaN or infinity.
    """
    if dictionaries is None:
        dictionaries = Dictionaries(parts.model)
    _check(parts, tokens, dictionaries)
    stream = Stream(parts, tokens)
    frozen = Frozen(stream, replaced=dictionaries.attention)
    for depth in range(frozen.top + 1):
        refuse_infinite(frozen.state(depth), f"the stream of {parts.model.name} at depth {depth}")
    mlp, attention = {}, {}
    for layer in dictionaries.mlp_layers:
        x = read_normed(parts.layers[layer].mlp_norm, frozen.state(2 * layer + 1))
        mlp[layer] = Code(x, *dictionaries.encode_mlp(layer, x))
    for layer, lorsa in dictionaries.attention.items():
        x = read_normed(parts.layers[layer].norm, frozen.state(2 * layer))
        values, heads = lorsa.encode(x[None])
        attention[layer] = Code(x, values[0], heads[0])
    sources = Sources(*write_entries(frozen, dictionaries, mlp, attention))
    return Opened(stream, dictionaries, frozen, mlp, attention, sources)


def read_normed(norm: Norm | None, stream: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """The stream as a module reads it."""
    return stream if norm is None else norm(stream).detach()


def _check(parts: Parts, tokens: Tensor, dictionaries: Dictionaries) -> None:
    model, length = parts.model, tokens.shape[-1]
    if length == 0:
        raise ClearheadError("the prompt has no tokens; give a text")
    if model.n_ctx is not None and length > model.n_ctx:
        raise ClearheadError(f"the prompt has {length} tokens and {model.name} reads {model.n_ctx}: give a shorter one")
    if dictionaries.model is not model:
        raise ClearheadError(f"the dictionaries stand in {dictionaries.model.name}, and {model.name} is traced")
