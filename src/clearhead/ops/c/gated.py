"""The kernels of gated.c as the work of one pass over the tiles of gated attention (ops/gated_tiles.py).

Tensors are float32 on the CPU and dense. The arguments that all tiles share are laid out for C once per pass.
"""

import ctypes
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.ops.gated import Mode
from clearhead.ops.gated_tiles import Rows, Setting, Tile

FEW = 0.04
"""Share of open edges below which fetching their rows of v is faster than a product with all of them."""


class _Tile(ctypes.Structure):
    """`Tile` of gated.c."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("heads", "reps", "rows", "cols", "head0", "row0", "col0", "t", "groups")],
        *[(name, ctypes.c_int32) for name in ("mode", "exact", "threads")],
        ("slope", ctypes.c_float),
        *[(name, ctypes.c_void_p) for name in ("bias", "sink", "keys", "first", "top", "norm", "words", "lse")],
        *[(name, ctypes.c_void_p) for name in ("expected", "leak", "opened", "delta", "price", "dbias")],
    ]


class GatedPass:
    """A `Pass` in C."""

    def __init__(self, library: ctypes.CDLL, setting: Setting, rows: Rows):
        arrays = (setting.bias, setting.sink, setting.keys, setting.first, rows.top, rows.norm, rows.words, rows.lse)
        arrays += (rows.expected, rows.leak, rows.opened, rows.delta, rows.price, rows.dbias)
        self._library, self._keep = library, arrays
        self._tile = _Tile(
            *(0, rows.top.shape[1], 0, 0, 0, 0, 0, rows.top.shape[2], setting.groups),
            *(get_args(Mode).index(setting.mode), int(setting.exact), torch.get_num_threads(), setting.slope),
            *(None if x is None else x.data_ptr() for x in arrays),
        )
        self._at = ctypes.byref(self._tile)
        self._forward, self._sparse, self._n_open = library.gated_forward, setting.mode == "hard", 0
        self._forward.restype = ctypes.c_int64

    def forward(self, tile: Tile, scores: Float[Tensor, "m rows cols"]) -> None:
        """Scores -> weights, in place, and the rows' sums."""
        self._n_open = self._forward(self._point(tile), _pointer(scores))

    def mix(
        self,
        tile: Tile,
        weights: Float[Tensor, "m rows cols"],
        v: Float[Tensor, "n j d"],
        out: Float[Tensor, "n r t d"],
    ) -> None:
        """The tile's part of `out`; where few edges are open, only their rows of v are read."""
        width = ctypes.c_int64(v.shape[2])
        if self._sparse and self._n_open < FEW * weights.numel():
            keys = ctypes.c_int64(v.shape[1])
            self._library.gated_gather(self._point(tile), *map(_pointer, (weights, v, out)), keys, width)
            return
        mixed = torch.bmm(weights, v[tile.n0 : tile.n1, tile.j0 : tile.j1])
        self._library.gated_settle(self._point(tile), _pointer(mixed), _pointer(out), width)

    def backward(
        self, tile: Tile, scores: Float[Tensor, "m rows cols"], gradients: Float[Tensor, "m rows cols"]
    ) -> None:
        """Scores -> M P and G -> dS, in place, and the rows' share of the bias' gradient."""
        self._library.gated_backward(self._point(tile), _pointer(scores), _pointer(gradients))

    def _point(self, tile: Tile):
        at = self._tile
        at.heads, at.rows, at.cols = tile.n1 - tile.n0, tile.i1 - tile.i0, tile.j1 - tile.j0
        at.head0, at.row0, at.col0 = tile.n0, tile.i0, tile.j0
        return self._at


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())
