"""Unit: one component of a model, with where it reads, where it writes, and how active it is.

A unit is named by kind and place, written `kind.numbers` and, when bound to one token position, `@position`:

    head.5.3        original attention head 3 of layer 5          numbers: layer, index
    lorsa.12.345    Lorsa head 345 of layer 12                    layer, index
    feature.4.17    transcoder or SAE feature 17 of layer 4       layer, index
    mode.5.3.0      singular mode 0 of head 3 of layer 5          layer, index, part
    edge.5.3.2@7    head 3 of layer 5, query 7 attending to key 2 layer, index, part
    kvhead.5.1      key-value head 1 of layer 5, with the query heads that share it
                                                                  layer, index
    head_q.5.3      what head 3 of layer 5 receives to form its queries; head_k and head_v its keys and its values
                                                                  layer, index
    attn.5  mlp.5   all that the attention, the MLP of layer 5 writes                   layer
    attn_error.5    what the Lorsa heads of layer 5 leave of its attention's output     layer
    features.5.2    the features of layer 5 that one source feeds most, numbered by source     layer, index
    error.5         what the transcoder features of layer 5 leave of its MLP's output   layer
    bias.5          every constant that layer 5 writes            layer
    embedding.11@0  logit.42@7  vocabulary entries 11 and 42      index
    input           the embeddings of all tokens together         none
    positions       the embeddings of all positions together      none
    target.0        a number of the user's own, as a logit difference or a probe        index

The name is the identity: two units are equal when their names are. Vectors and activation ride along and are not
part of it. This module names and carries; it computes nothing and knows no model.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Self

from clearhead.errors import ClearheadError, UnknownNameError

KINDS: dict[str, tuple[str, ...]] = {
    "head": ("layer", "index"),
    "kvhead": ("layer", "index"),
    "head_q": ("layer", "index"),
    "head_k": ("layer", "index"),
    "head_v": ("layer", "index"),
    "lorsa": ("layer", "index"),
    "feature": ("layer", "index"),
    "mode": ("layer", "index", "part"),
    "edge": ("layer", "index", "part"),
    "attn": ("layer",),
    "mlp": ("layer",),
    "attn_error": ("layer",),
    "features": ("layer", "index"),
    "error": ("layer",),
    "bias": ("layer",),
    "embedding": ("index",),
    "logit": ("index",),
    "input": (),
    "positions": (),
    "target": ("index",),
}
"""Which numbers name a unit of each kind, in the order they are written."""

# at most 18 digits: what an int64 holds
_ID = re.compile(r"([a-z_]+)((?:\.[0-9]{1,18})*)(?:@([0-9]{1,18}))?")


@dataclass(frozen=True)
class Unit:
    """A named component; hashable and comparable by name.

    Raises `UnknownNameError` for a kind that does not exist and `ClearheadError` for numbers that are missing,
    negative, or that the kind does not have.
    """

    kind: str
    layer: int | None = None
    index: int | None = None
    position: int | None = None
    """Token position this instance of the unit is bound to; None for the unit at all positions."""
    part: int | None = None
    """Mode number of a singular mode, key position of an edge."""
    read: Any = field(default=None, compare=False, repr=False)
    """Read vectors in the residual stream: array [d], or [r, d] for a unit of rank r."""
    write: Any = field(default=None, compare=False, repr=False)
    """Write vectors in the residual stream, same shape as `read`."""
    activation: float | None = field(default=None, compare=False, repr=False)
    """How active the unit is at its position."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownNameError("kind of unit", self.kind, KINDS)
        for name in ("layer", "index", "part"):
            number = getattr(self, name)
            if (number is None) == (name in KINDS[self.kind]):
                raise ClearheadError(
                    f"a unit of kind {self.kind!r} is named by {_named_by(self.kind)}; got {name}={number}"
                )
        for name in ("layer", "index", "part", "position"):
            number = getattr(self, name)
            if number is not None and number < 0:
                raise ClearheadError(f"{name} of a unit counts from 0; got {name}={number}")

    @property
    def id(self) -> str:
        """The name: `lorsa.12.345`, `head.5.3@7`."""
        name = ".".join([self.kind, *(str(getattr(self, name)) for name in KINDS[self.kind])])
        return name + ("" if self.position is None else f"@{self.position}")

    def __str__(self) -> str:
        return self.id

    @classmethod
    def parse(cls, text: str) -> Self:
        """The unit with this name, `Unit.parse(unit.id) == unit`; raises like the constructor."""
        match = _ID.fullmatch(text)
        if match is None:
            raise ClearheadError(f"{text!r} does not name a unit; a name looks like lorsa.12.345 or head.5.3@7")
        kind, numbers, position = match.group(1), match.group(2).split(".")[1:], match.group(3)
        if kind not in KINDS:
            raise UnknownNameError("kind of unit", kind, KINDS)
        if len(numbers) != len(KINDS[kind]):
            raise ClearheadError(
                f"a unit of kind {kind!r} is named by {_named_by(kind)}, as in "
                f"{kind}{'.0' * len(KINDS[kind])}; got {text!r}"
            )
        place = dict(zip(KINDS[kind], map(int, numbers), strict=True))
        return cls(kind, **place, position=None if position is None else int(position))


def _named_by(kind: str) -> str:
    return " and ".join(KINDS[kind]) or "no number"
