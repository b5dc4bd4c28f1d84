"""Gated attention on a CUDA device: `gated.gated_attention` through the kernels of gated_triton_kernels.py.

Forward and a backward pass in two kernels, memory in proportion to positions, sums in float32, no atomics: the same
call gives the same bits. Gates do not depend on tile sizes: their noise is a hash of (seed, layer, batch, head, row,
column), and all kernels decide a gate by the same expression. `check=True` proves it in a run: each kernel adds up the
random words of its open edges, and the backward pass returns no gradients where the three sums differ.

Inputs are bfloat16, float16 or float32; heads are at most 256 wide (float32: 128), and any width but a power of two is
filled up with zeros. float16 can lose the penalty: what the expected number of edges sends to one score is below 10⁻⁸
once it is divided by the number of pairs.

Tile sizes are a table, not the result of a search. On the CPU the kernels run only in Triton's interpreter, for tests:
set TRITON_INTERPRET=1 before this module is imported.
"""

from typing import Any, NamedTuple

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from triton.runtime import JITFunction

from clearhead.errors import ClearheadError
from clearhead.ops import gated_triton_kernels as kernels
from clearhead.ops.gated import Estimator, Gated, Mode, Noise, check_arguments, noise_keys

INTERPRETED = not isinstance(kernels.forward, JITFunction)
CODES = {"open": kernels.OPEN.value, "hard": kernels.HARD.value, "sampled": kernels.SAMPLED.value}


class Tile(NamedTuple):
    """How a kernel cuts the pairs into tiles, and how many warps work on one with how many loads under way."""

    rows: int
    columns: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The tiles of the three kernels. Rows of at least 64 in all of them or in none: the same instruction forms q·k."""

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile


TILES = {
    64: Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)),
    128: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(128, 32, 8, 2)),
    256: Tiles(Tile(128, 32, 8, 2), Tile(128, 32, 8, 1), Tile(64, 16, 4, 1)),
}
"""For 16-bit inputs, by the largest width they serve: the largest tiles that Triton 3.6 and 3.7 compile for Hopper with
every value in registers (bench/aot.py). At width 256 no tile does, and a few dozen bytes per thread go to memory."""

FLOAT32_TILES = {width: Tiles(*[Tile(32, 32, 4, 1)] * 3) for width in (64, 128)}
"""For float32 inputs, which are for comparison: they are slow and spill at width 128."""


class Call(NamedTuple):
    """What one call of the kernels is, beside the tensors that may need a gradient."""

    tiles: Tiles
    scale: float
    slope: float
    keys: Tensor
    first: Tensor | None
    mode: int
    exact: bool
    check: bool


def gated_attention_triton(
    q: Float[Tensor, "b h t dh"],
    k: Float[Tensor, "b g t dh"],
    v: Float[Tensor, "b g t dv"],
    bias: Float[Tensor, " h"],
    *,
    mode: Mode,
    scale: float,
    noise: Noise | None = None,
    first: Int[Tensor, "b t"] | None = None,
    sink: Float[Tensor, " h"] | None = None,
    slope: float = 0.0,
    estimator: Estimator = "straight_through",
    check: bool = False,
) -> Gated:
    """`gated.gated_attention` by Triton kernels.

    Raises `ClearheadError` for tensors that the kernels do not take and, with `check`, in the backward pass when the
    gates of the three kernels differ.
    """
    check_arguments(q, k, v, bias, mode, noise, first, sink, estimator)
    reason = refusal(q, k, v)
    if reason is not None:
        raise ClearheadError(f"gated attention in Triton got {reason}; or set CLEARHEAD_BACKEND=torch")
    b, h, _, _ = q.shape
    width = v.shape[-1]
    q, k, v = (functional.pad(x, (0, padded_width(x.shape[-1]) - x.shape[-1])).contiguous() for x in (q, k, v))
    tables = FLOAT32_TILES if q.dtype == torch.float32 else TILES
    keys = torch.zeros(b, h, 2, dtype=torch.int32, device=q.device)
    if mode == "sampled" and noise is not None:
        keys = noise_keys(noise, b, h, q.device)
    call = Call(
        tiles=tables[min(w for w in tables if w >= max(q.shape[-1], v.shape[-1]))],
        scale=scale,
        slope=slope,
        keys=keys,
        first=None if first is None else first.int().contiguous(),
        mode=CODES[mode],
        exact=estimator == "exact",
        check=check,
    )
    out, lse, expected, opened, leak = _GatedAttention.apply(q, k, v, bias, sink, call)
    return Gated(out[..., :width], lse, expected, opened, leak)


class _GatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor | None, call: Call) -> Any:
        b, h, t, width = q.shape
        tile = call.tiles.forward
        out = q.new_empty(b, h, t, v.shape[-1])
        lse, expected, leak = (torch.empty(b, h, t, device=q.device) for _ in range(3))
        opened = torch.empty(b, h, t, dtype=torch.int32, device=q.device)
        sums = torch.empty_like(opened) if call.check else None
        _launch(
            kernels.forward, b * h * _tiles(t, tile.rows), tile,
            q, k, v, bias.float(), None if sink is None else sink.float(), call.first, call.keys,
            out, lse, expected, opened, leak, sums, t, h, h // k.shape[1], call.scale, call.slope,
            **_constants(call, width, v.shape[-1], sink), CHECK=call.check,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, bias, sink, out, lse, sums)
        ctx.call = call
        ctx.mark_non_differentiable(lse, opened, leak)
        return out, lse, expected, opened, leak

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _lse, dexpected, _opened, _leak):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, bias, sink, out, lse, sums = ctx.saved_tensors
        call: Call = ctx.call
        b, h, t, width = q.shape
        group = h // k.shape[1]
        dout, dexpected = dout.contiguous(), dexpected.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dbias = torch.empty_like(lse)
        terms = torch.empty(b, h, 4, t, device=q.device)
        constants = _constants(call, width, v.shape[-1], sink) | {"EXACT": call.exact, "CHECK": call.check}
        numbers = (t, h, group, call.scale, call.slope)
        query_sums, key_sums = (None if sums is None else torch.empty_like(sums) for _ in range(2))

        tile = call.tiles.query_gradient
        _launch(
            kernels.query_gradient, b * h * _tiles(t, tile.rows), tile,
            q, k, v, bias.float(), call.first, call.keys, out, lse, dout, dexpected, dq, dbias, terms, query_sums,
            *numbers, **constants,
        )  # fmt: skip
        tile = call.tiles.key_gradient
        end = None if call.first is None else last_rows(call.first, tile)
        _launch(
            kernels.key_gradient, b * k.shape[1] * _tiles(t, tile.columns), tile,
            q, k, v, bias.float(), call.keys, dout, terms, end, dk, dv, key_sums, *numbers, **constants,
        )  # fmt: skip
        if sums is not None and query_sums is not None and key_sums is not None:
            _compare(sums, query_sums, key_sums)
        dsink = None
        if sink is not None:
            dsink = -((sink.float()[:, None] - lse).exp() * terms[:, :, 1]).sum((0, 2)).to(sink.dtype)
        return dq, dk, dv, dbias.sum((0, 2)).to(bias.dtype), dsink, None


def last_rows(first: Int[Tensor, "b t"], tile: Tile) -> Int[Tensor, "b tiles"]:
    """For each tile of keys, how far the rows reach that see any of it; a multiple of the tile's rows."""
    b, t = first.shape
    row = torch.arange(t, device=first.device)
    sees = torch.where(first <= row, first, t)  # a row that sees nothing starts behind every key
    blocks = functional.pad(sees, (0, -t % tile.rows), value=t).view(b, -1, tile.rows).amin(-1)
    last_key = torch.arange(0, t, tile.columns, device=first.device) + tile.columns - 1
    reaches = blocks[:, :, None] <= last_key.clamp(max=t - 1)
    number = torch.arange(1, blocks.shape[1] + 1, device=first.device)[:, None]
    return ((reaches * number).amax(1) * tile.rows).int()


def _launch(kernel: Any, programs: int, tile: Tile, *arguments: Any, **constants: Any) -> None:
    # Triton launches on the current device, which need not be that of the tensors
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](
            *arguments, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps, num_stages=tile.stages, **constants
        )


def _constants(call: Call, width: int, out_width: int, sink: Tensor | None) -> dict[str, Any]:
    return {
        "D": width,
        "DV": out_width,
        "MODE": call.mode,
        "SINK": sink is not None,
        "FIRST": call.first is not None,
        "SLOPED": call.slope != 0,
    }


def _compare(forward: Tensor, query: Tensor, key: Tensor) -> None:
    """Raises `ClearheadError` where the passes did not open the same edges; the sums are modulo 2³²."""
    whole = torch.stack([x.sum(-1) & 0xFFFFFFFF for x in (forward, query, key)])
    differs = (whole != whole[0]).any(0)
    if differs.any():
        batch, head = differs.nonzero()[0].tolist()
        raise ClearheadError(
            f"gated attention: the backward pass opened other edges than the forward pass in {int(differs.sum())} of "
            f"{differs.numel()} heads, first in batch {batch}, head {head} (checksums of forward, query gradient, key "
            f"gradient: {whole[:, batch, head].tolist()}). The gradients would be wrong; report it with the device"
            f" and triton {triton.__version__}; CLEARHEAD_BACKEND=torch does without these kernels"
        )


def refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernels do not take these tensors, or None."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    if q.dtype not in dtypes or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q {q.dtype}, k {k.dtype}, v {v.dtype}; expected one of bfloat16, float16, float32 for all three"
    if INTERPRETED and q.dtype == torch.bfloat16:
        return (
            "bfloat16 in Triton's interpreter, which computes with its raw bits and is silently wrong; use float16, "
            "float32 or a GPU without TRITON_INTERPRET"
        )
    if not INTERPRETED and not (q.is_cuda and k.device == v.device == q.device):
        return (
            f"tensors on {q.device}, {k.device}, {v.device}; expected one CUDA device. On the CPU use gated_attention, "
            "or Triton's interpreter (TRITON_INTERPRET=1 before the import)"
        )
    widest = max(FLOAT32_TILES if q.dtype == torch.float32 else TILES)
    if max(q.shape[-1], v.shape[-1]) > widest:
        return f"heads of width {q.shape[-1]} and {v.shape[-1]} in {q.dtype}; expected at most {widest}"
    return None


def _tiles(length: int, size: int) -> int:
    return -(-length // size)


def padded_width(width: int) -> int:
    """The width that the kernels run with: a power of two, at least the 16 that a product of tiles takes."""
    return max(16, 1 << (width - 1).bit_length())
