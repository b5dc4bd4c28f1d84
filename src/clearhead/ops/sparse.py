"""Decoding a sparse code: y[r] = sum_k values[r, k] * W_O[heads[r, k]].

Forward and backward read and write only the K rows of W_O that each token names:

    d values[r, k] = dy[r] . W_O[heads[r, k]]
    d W_O[h]       = sum of values[r, k] * dy[r] over all (r, k) with heads[r, k] = h

dW_O itself is dense [n, d]. Not here: the bias, sums over several dictionaries.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.errors import ClearheadError
from clearhead.ops.dispatch import kernels
from clearhead.ops.topk import topk


def decode(
    values: Float[Tensor, "r k"], heads: Int64[Tensor, "r k"], W_O: Float[Tensor, "n d"]
) -> Float[Tensor, "r d"]:
    """The weighted sum of K rows of W_O for each token, in W_O's dtype.

    Raises `ClearheadError` when values and heads differ in shape or a head does not exist.
    """
    if values.shape != heads.shape or values.ndim != 2:
        raise ClearheadError(
            f"decode got values {tuple(values.shape)} and heads {tuple(heads.shape)}; expected two of [tokens, k]"
        )
    if heads.numel() and heads.device.type == "cpu" and not 0 <= int(heads.min()) <= int(heads.max()) < len(W_O):
        raise ClearheadError(
            f"decode got heads from {int(heads.min())} to {int(heads.max())}, but W_O has rows 0 to {len(W_O) - 1}"
        )
    if (run := kernels(values, W_O)) is not None:
        return _Decode.apply(run, values, heads, W_O)  # pyright: ignore[reportReturnType]
    return F.embedding_bag(heads, W_O, per_sample_weights=values.to(W_O.dtype), mode="sum")


def topk_decode(
    z: Float[Tensor, "r n"], k: int, W_O: Float[Tensor, "n d"], *, signed: bool = False
) -> tuple[Float[Tensor, "r k"], Int64[Tensor, "r k"], Float[Tensor, "r d"]]:
    """`topk` and `decode` in one: values, heads and y. All gradients that reach z meet in one scatter."""
    values, heads = topk(z, k, signed=signed)
    return values, heads, decode(values, heads, W_O)


def decode_reference(
    values: Float[Tensor, "r k"], heads: Int64[Tensor, "r k"], W_O: Float[Tensor, "n d"]
) -> Float[Tensor, "r d"]:
    """`decode` in float64 by gathering the rows: what every fast path is tested against."""
    return torch.einsum("rk,rkd->rd", values.double(), W_O.double()[heads])


class _Decode(torch.autograd.Function):
    """Decoding by the C kernels."""

    @staticmethod
    def forward(ctx, run, values, heads, weight):  # pyright: ignore[reportIncompatibleMethodOverride]
        values, heads, weight = values.contiguous(), heads.contiguous(), weight.contiguous()
        ctx.save_for_backward(values, heads, weight)
        ctx.run = run
        return run.decode(values, heads, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        values, heads, weight = ctx.saved_tensors
        run, dy = ctx.run, dy.contiguous()
        dvalues = run.decode_values(dy, heads, weight) if ctx.needs_input_grad[1] else None
        dweight = run.decode_weights(dy, values, heads, len(weight)) if ctx.needs_input_grad[3] else None
        return None, dvalues, None, dweight
