"""A rotary embedding as attention needs it: tables, and the rotation in plain torch.

    plane (x0, x1) of position t becomes (x0 cos - x1 sin, x1 cos + x0 sin)

The tables come from the host model (`clearhead.model.rope`), with its scale already multiplied in. `attend` takes a
`Rotation` so that the C kernel can turn queries and keys while it packs them.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Rotation(NamedTuple):
    """Tables of a rotary embedding: plane i of position t turns by the angle whose cosine is cos[t, i]."""

    cos: Float[Tensor, "t half"]
    sin: Float[Tensor, "t half"]
    interleaved: bool
    """Planes are components (2i, 2i+1) if true, else (i, i + half)."""


def rotate(x: Float[Tensor, "*b t dh"], rotation: Rotation) -> Float[Tensor, "*b t dh"]:
    """Turn the first 2 * half components of x; the others pass through."""
    cos, sin = rotation.cos.to(x.dtype), rotation.sin.to(x.dtype)
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    if rotation.interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
    else:
        first, second = turning[..., :half], turning[..., half:]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([turned, rest], -1)
