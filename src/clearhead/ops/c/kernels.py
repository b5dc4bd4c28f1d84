"""The C kernels as functions of tensors.

Tensors are float32 on the CPU, and all but q and k dense; heads are int64 and are trusted to lie in range. Which op
runs here is decided in `ops/dispatch.py`; gradients are put together in `ops/lorsa.py`, `ops/sparse.py` and
`ops/gated_cpu.py`.
"""

import ctypes

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from clearhead.ops.c.gated import GatedPass
from clearhead.ops.gated_tiles import Rows, Setting
from clearhead.ops.rotation import Rotation


class _Attention(ctypes.Structure):
    """`Attention` of attention.c."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("b", "g", "t", "dh", "size", "window", "half", "interleaved")],
        *[(f"{x}_{axis}", ctypes.c_int64) for x in "qk" for axis in "bgt"],
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
        *[(name, ctypes.c_void_p) for name in ("q", "k", "v", "cos", "sin", "sink")],
    ]


class Kernels:
    """A loaded library; each method is one kernel with freshly allocated results."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library

    def topk(self, z: Float[Tensor, "r n"], k: int, signed: bool) -> tuple[Float[Tensor, "r k"], Int64[Tensor, "r k"]]:
        """Exact top-K of each row; heads ascend, ties go to the lowest heads."""
        z = z.contiguous()
        values = z.new_empty(z.shape[0], k)
        heads = torch.empty(z.shape[0], k, dtype=torch.int64)
        self._call("topk_rows", z, *z.shape, k, int(signed), values, heads)
        return values, heads

    def decode(self, values: Tensor, heads: Tensor, weight: Tensor) -> Float[Tensor, "r d"]:
        """Weighted sums of rows of `weight`."""
        y = values.new_empty(values.shape[0], weight.shape[1])
        self._call("decode_rows", weight, values, heads, *values.shape, weight.shape[1], y)
        return y

    def decode_values(self, dy: Tensor, heads: Tensor, weight: Tensor) -> Float[Tensor, "r k"]:
        """Products of each row of dy with the rows of `weight` it names."""
        dvalues = dy.new_empty(heads.shape)
        self._call("decode_values", weight, dy, heads, *heads.shape, dy.shape[1], dvalues)
        return dvalues

    def decode_weights(self, dy: Tensor, values: Tensor, heads: Tensor, n: int) -> Float[Tensor, "n d"]:
        """Sums of values * dy over the rows that name each head."""
        dw = dy.new_empty(n, dy.shape[1])
        self._call("decode_weights", values, heads, dy, *heads.shape, dy.shape[1], n, dw)
        return dw

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **geometry) -> Float[Tensor, "b t n"]:
        """Pre-activations; `geometry` holds scale, window, sink and rotation as in `ops.lorsa.attend`."""
        z = torch.empty_like(v)
        arguments, _keep = _attention(q, k, v, **geometry)
        self._check(self._library.attend_forward(ctypes.byref(arguments), _pointer(z)))
        return z

    def attend_backward(
        self,
        dz: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        entries: tuple[Tensor, Tensor] | None = None,
        *,
        consume: bool = False,
        **geometry,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k, v and the sink; cheap where the gradient of z is mostly zero.

        That gradient is `dz` plus `entries`: values [b * t, k] at heads [b * t, k], ascending in each row. `consume`:
        write the gradients over v, and over q and k where those are laid out as [b, t, g, dh].
        """
        b, g, t, dh = q.shape
        rows = (t * g * dh, dh, g * dh, 1)
        # the kernel reads every query, key and value for the last time before it writes that one's gradient
        dq, dk = (x if consume and x.stride() == rows else x.new_empty(b, t, g, dh).transpose(1, 2) for x in (q, k))
        dv = v if consume else torch.empty_like(v)
        dsink = None if geometry["sink"] is None else q.new_empty(b, g)
        arguments, _keep = _attention(q, k, v, **geometry)
        values, heads = entries or (None, None)
        n_entries = 0 if values is None else values.shape[1]
        sources, results = [_pointer(x) for x in (dz, values, heads)], [_pointer(x) for x in (dq, dk, dv, dsink)]
        run = self._library.attend_backward
        self._check(run(ctypes.byref(arguments), *sources, ctypes.c_int64(n_entries), *results))
        return dq, dk, dv, None if dsink is None else dsink.sum(0)

    def gated(self, setting: Setting, rows: Rows) -> GatedPass:
        """The elementwise work of one pass of gated attention."""
        return GatedPass(self._library, setting, rows)

    def turned(self, x: Float[Tensor, "n i d"]) -> Float[Tensor, "n d i"]:
        """The transposes, laid out: products with them are faster than with x read across."""
        turned = x.new_empty(x.shape[0], x.shape[2], x.shape[1])
        sizes = (ctypes.c_int64(size) for size in x.shape)
        self._library.gated_turn(_pointer(x), *sizes, _pointer(turned), ctypes.c_int(torch.get_num_threads()))
        return turned

    def _call(self, name: str, *arguments: Tensor | int) -> None:
        given = [
            _pointer(x) if isinstance(x, Tensor) else ctypes.c_int64(x) for x in (*arguments, torch.get_num_threads())
        ]
        self._check(self._library[name](*given))

    def _check(self, failed: int) -> None:
        if failed:
            raise MemoryError("a C kernel could not allocate its working memory; use smaller batches")


def _pointer(x: Tensor | None) -> ctypes.c_void_p | None:
    return None if x is None else ctypes.c_void_p(x.data_ptr())


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, sink: Tensor | None, rotation: Rotation | None
) -> tuple[_Attention, list[Tensor]]:
    """The argument struct and the tensors it points into, which must outlive the call."""
    b, g, t, dh = q.shape
    half = 0 if rotation is None else rotation.cos.shape[-1]
    tables = [q.new_empty(0)] * 2 if rotation is None else [table.float().contiguous() for table in rotation[:2]]
    keep = [q, k, v, *tables] + ([] if sink is None else [sink.contiguous()])
    arguments = _Attention(
        *(b, g, t, dh, v.shape[2] // g, t if window is None else min(window, t), half),
        int(rotation is not None and rotation.interleaved),
        *q.stride()[:3],
        *k.stride()[:3],
        scale,
        torch.get_num_threads(),
        *(x.data_ptr() for x in keep),
    )
    return arguments, keep
