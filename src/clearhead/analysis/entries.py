"""Entries: the non-zero activations of a batch as a list of (unit, token, value), and how tokens are numbered.

A token is numbered by where it stands in the blocks: token = block · T + position, T the context. All streaming
statistics of `clearhead.analysis` consume entries, so their cost follows the number of active (token, unit) pairs,
k per token, and never the number of tokens times the number of units.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

from clearhead.dictionaries.lorsa import Codes
from clearhead.errors import NonFiniteError


class Entries(NamedTuple):
    """Active (unit, token) pairs in order of token; three arrays [entries] of one length."""

    unit: NDArray[np.int64]
    token: NDArray[np.int64]
    value: NDArray[np.float32]

    def where(self, kept: NDArray[np.bool_]) -> "Entries":
        """The entries at which the mask is true."""
        return Entries(self.unit[kept], self.token[kept], self.value[kept])


def entries_of(codes: Codes, blocks: Int[np.ndarray, " b"], first: int = 0) -> Entries:
    """The non-zero activations of `codes` [b, t, k], the batch being these blocks.

    Positions before `first` are left out. Raises `NonFiniteError` for an activation that is NaN or infinite.
    """
    values = codes.values.detach()
    if not bool(values.isfinite().all()):
        b, t = (int(i[0]) for i in (~values.isfinite().all(-1)).nonzero(as_tuple=True))
        raise NonFiniteError(f"an activation is not finite in block {int(blocks[b])} at position {t}")
    active = values != 0
    active[:, :first] = False
    b, t, _ = active.nonzero(as_tuple=True)
    token = np.asarray(blocks, dtype=np.int64)[b.cpu().numpy()] * values.shape[1] + t.cpu().numpy()
    return Entries(
        codes.heads[active].cpu().numpy().astype(np.int64, copy=False),
        token,
        values[active].float().cpu().numpy(),
    )
