"""Rotary position embeddings, read from the model itself and applied cheaply.

    rotate(x_i) = R(i) x_i,   R(i) = blocks of  s·[[cos iω, −sin iω], [sin iω, cos iω]]  on the first `rotary_dim` axes
    rotate(q_i)·rotate(k_j) = q_iᵀ relative(j − i) k_j

Frequencies ω (`inv_freq`) and scale s are those of the transformers module, so every type whose frequencies are fixed
(default, linear, llama3, yarn, proportional, per-layer bases) needs no knowledge here. Types that change frequencies
with the length of the text (dynamic, longrope) are exact up to the length where they would change, and refuse beyond
it. Not done here: multi-dimensional rotations of image tokens, learned or ALiBi positions (see geometry.py).

Source of the rotation: Su et al., RoFormer, arXiv 2104.09864, eq. 15.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from clearhead.errors import ClearheadError


@dataclass(frozen=True, eq=False)
class RopeSpec:
    """One layer's rotation: `x [..., t, d_head]`, of which the first `rotary_dim` components turn."""

    inv_freq: Float[Tensor, " half"]
    """Angle per position of each plane, radians, float32; negative where a family turns the other way."""
    scaling: float
    """Factor on the turned components (yarn, longrope); 1 otherwise."""
    interleaved: bool
    """Planes are components (2i, 2i+1) if true (GPT-J, Cohere, GLM), else (i, i + rotary_dim/2) (Llama, NeoX)."""
    rotary_dim: int
    """Components that turn; the rest pass through."""
    limit: int | None = None
    """First position at which the model would switch to other frequencies; None if it never does."""

    def tables(
        self, positions: Int[Tensor, "*b t"], dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "*b t half"], Float[Tensor, "*b t half"]]:
        """Cosines and sines at `positions`, times the scale, one column per plane.

        Angles are formed in float32 whatever `dtype`, as transformers does, so that tables equal the model's own.
        Raises `ClearheadError` at positions where the model would use other frequencies.
        """
        if self.limit is not None and positions.numel() and int(positions.max()) >= self.limit:
            raise ClearheadError(
                f"position {int(positions.max())} lies beyond {self.limit}, where this model's rotary frequencies "
                f"change with the length of the text; use texts of at most {self.limit} tokens"
            )
        angles = positions[..., None].float() * self.inv_freq.to(positions.device)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; float32 frequencies survive the round trip bit for bit."""
        return {
            "inv_freq": self.inv_freq.tolist(),
            "scaling": self.scaling,
            "interleaved": self.interleaved,
            "rotary_dim": self.rotary_dim,
            "limit": self.limit,
        }

    @classmethod
    def from_dict(cls, values: Mapping) -> "RopeSpec":
        """The inverse of `to_dict`."""
        frequencies = torch.tensor(values["inv_freq"], dtype=torch.float32)
        if 2 * len(frequencies) != values["rotary_dim"]:
            raise ClearheadError(
                f"a rotation of {values['rotary_dim']} components needs {values['rotary_dim'] // 2} frequencies, "
                f"got {len(frequencies)}"
            )
        return cls(frequencies, values["scaling"], values["interleaved"], values["rotary_dim"], values["limit"])


def rotate(
    x: Float[Tensor, "*b t dh"], cos: Float[Tensor, "*#b #t half"], sin: Float[Tensor, "*#b #t half"], spec: RopeSpec
) -> Float[Tensor, "*b t dh"]:
    """Turns the first `spec.rotary_dim` components of `x` by the tables of `spec.tables`.

    Tables broadcast against `x` (for `x [b, h, t, dh]` and per-row positions give them as `[b, 1, t, half]`).
    Differentiable in `x` to any order; tables are constants. No intermediate of the size of `x` is made or kept.
    """
    if x.shape[-1] < spec.rotary_dim:
        raise ClearheadError(
            f"the rotation turns {spec.rotary_dim} components, but x has only {x.shape[-1]} (shape {tuple(x.shape)})"
        )
    return _Rotation.apply(x, cos.to(x.dtype), sin.to(x.dtype), spec.interleaved)  # pyright: ignore[reportReturnType]


class _Rotation(torch.autograd.Function):
    """The rotation as one linear operation whose transpose is the rotation by −sin.

    Written into one output with fused multiply-adds, because the textbook form (negate, concatenate, two products,
    sum) makes four temporaries and keeps two of them for the backward pass.
    """

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        rotary_dim = 2 * cos.shape[-1]
        out = torch.empty_like(x)
        (first, second), (to_first, to_second) = (
            _planes(x, rotary_dim, interleaved),
            _planes(out, rotary_dim, interleaved),
        )
        torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=to_second).addcmul_(first, sin)
        if rotary_dim < x.shape[-1]:
            out[..., rotary_dim:] = x[..., rotary_dim:]
        return out

    @staticmethod
    def setup_context(ctx, inputs, output):  # noqa: ARG004
        _, cos, sin, ctx.interleaved = inputs
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(gradients[0], cos, -sin, ctx.interleaved), None, None, None

    @staticmethod
    def jvp(ctx, *tangents: Tensor | None):
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(tangents[0], cos, sin, ctx.interleaved)

    @staticmethod
    def vmap(info, in_dims, *args):
        *tensors, interleaved = args
        rank = tensors[0].ndim - (in_dims[0] is not None)
        x, cos, sin = (
            tensor[None] if axis is None else tensor.movedim(axis, 0)
            for tensor, axis in zip(tensors, in_dims[:3], strict=True)
        )
        x = x.expand(info.batch_size, *x.shape[1:])
        # a table's batch axis must line up with that of x, across the axes of x that the table lacks
        cos, sin = (table[(slice(None), *[None] * (rank + 1 - table.ndim))] for table in (cos, sin))
        return _Rotation.apply(x, cos, sin, interleaved), 0


def _planes(x: Tensor, rotary_dim: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the two coordinates of every plane."""
    if interleaved:
        return x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    return x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]


def relative(spec: RopeSpec, offset: int, d_head: int) -> Float[Tensor, "dh dh"]:
    """The matrix M with rotate(q_i)·rotate(k_j) = q_iᵀ M k_j for j − i = `offset`, float64, on the spec's device.

    M = s² R(offset) on the turned components, the identity on the rest.
    """
    angles = offset * spec.inv_freq.double()
    cos, sin = angles.cos() * spec.scaling**2, angles.sin() * spec.scaling**2
    # row r of rotate(I) is R e_r, that is column r of R
    identity = torch.eye(d_head, dtype=torch.float64, device=angles.device)
    return rotate(identity, cos[None], sin[None], spec).T


def rope_spec(hf: PreTrainedModel, rotary: nn.Module | None, attention: nn.Module, layer: int) -> RopeSpec | None:
    """The rotation of one layer, or None where it uses none (learned positions, ALiBi, NoPE layers).

    `rotary` is the model's rotary module, `attention` the layer's attention module. Raises `ClearheadError` for a
    layout of planes that is not one of the two known.
    """
    family = hf.config.model_type
    if rotary is None or not _USES_ROPE.get(family, lambda _: True)(attention):
        return None
    if family in ("gptj", "codegen"):
        return _sinusoid_spec(rotary, family)
    layer_types = hf.config.to_dict().get("layer_types")
    layer_type = layer_types[layer] if layer_types else None
    buffers = dict(rotary.named_buffers(recurse=False))
    prefix = f"{layer_type}_" if f"{layer_type}_inv_freq" in buffers else ""
    rope_type = vars(rotary)["rope_type"]
    if prefix:
        rope_type = rope_type[layer_type]
    limit, changing = None, rope_type in ("dynamic", "longrope")
    if changing:
        limit = _switching_length(hf, rope_type, layer_type if prefix else None)
    # transformers overwrites `inv_freq` of a changing type after a long text; the original stays
    inv_freq = buffers[f"{prefix}original_inv_freq" if changing else f"{prefix}inv_freq"]
    interleaved, sign = _plane_layout(attention, family)
    scaling = float(vars(rotary)[f"{prefix}attention_scaling"])
    return RopeSpec(sign * inv_freq.detach().float(), scaling, interleaved, 2 * inv_freq.numel(), limit)


_USES_ROPE = {
    "smollm3": lambda attention: bool(attention.use_rope),
    "cohere2": lambda attention: attention.sliding_window is not None,
    "exaone4": lambda attention: attention.sliding_window is None or attention.is_sliding,
    "falcon": lambda attention: not attention.config.alibi,
}
"""Families with layers that do not rotate, and how their attention module says so."""


def _switching_length(hf: PreTrainedModel, rope_type: str, layer_type: str | None) -> int:
    parameters = hf.config.rope_parameters if layer_type is None else hf.config.rope_parameters[layer_type]
    if rope_type == "longrope":
        return parameters["original_max_position_embeddings"]
    return hf.config.max_position_embeddings


def _plane_layout(attention: nn.Module, family: str) -> tuple[bool, int]:
    """(interleaved, sign) as the family's own rotation function shows on the vector (1, 2, 3, 4)."""
    functions = vars(sys.modules[type(attention).__module__])
    turned: tuple[float, ...] = ()
    if "rotate_half" in functions:
        turned = tuple(functions["rotate_half"](torch.arange(1.0, 5.0).view(1, 1, 1, 4)).flatten().tolist())
    elif family == "gpt_oss":  # turns halves in one function, without rotate_half
        turned = (-3.0, -4.0, 1.0, 2.0)
    layouts: dict[tuple[float, ...], tuple[bool, int]] = {
        (-3.0, -4.0, 1.0, 2.0): (False, 1),
        (3.0, 4.0, -1.0, -2.0): (False, -1),
        (-2.0, 1.0, -4.0, 3.0): (True, 1),
    }
    if turned not in layouts:
        raise ClearheadError(
            f"{type(attention).__name__} rotates queries and keys in a way clearhead does not know; "
            "its attention can be read, but not rebuilt from weights"
        )
    return layouts[turned]


def _sinusoid_spec(rotary: nn.Module, family: str) -> RopeSpec:
    """GPT-J and CodeGen keep a table of sines and cosines instead of frequencies."""
    table = rotary.get_buffer("embed_positions").float()  # [position, sines | cosines]
    half = table.shape[1] // 2
    inv_freq = 1.0 / 10000 ** (torch.arange(0, 2 * half, 2, dtype=torch.int64, device=table.device) / (2 * half))
    spec = RopeSpec(inv_freq, 1.0, True, 2 * half)
    cos, sin = spec.tables(torch.arange(len(table), device=table.device))
    if not torch.equal(torch.cat((sin, cos), -1), table):
        worst = float((torch.cat((sin, cos), -1) - table).abs().max())
        raise ClearheadError(f"this {family} model's position table is not the sinusoid of base 10000 (by {worst:.1e})")
    return spec
