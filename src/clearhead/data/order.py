"""Which blocks a training step reads: a pure function of (seed, step).

The stream of all steps is one permutation of the n blocks per epoch, one after another; step s takes entries
[s·B, (s+1)·B) of that stream, so a batch may span two epochs, no block recurs within an epoch, and a resumed run needs
to know nothing but its step. With several processes, rank r of w takes entries r, r+w, ... of the step's batch:
together they read exactly what one process would.

The permutation of an epoch sorts the blocks by a 64-bit hash of (seed, epoch, block): plain integer arithmetic, equal
on every machine and in every version of every library.
"""

from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.ops.hash_rng import mix


def indices(seed: int, step: int, batch: int, n: int, rank: int = 0, world: int = 1) -> Int64[Tensor, " b"]:
    """The blocks of step `step` (from 0) for process `rank` of `world`; [batch / world] numbers in 0..n-1.

    Raises `ClearheadError` when `batch` is not a multiple of `world`, or a number is out of range.
    """
    if n < 1 or batch < 1 or step < 0 or not 0 <= rank < world:
        raise ClearheadError(f"no order exists for step {step}, batch {batch} of {n} blocks, rank {rank} of {world}")
    if batch % world:
        raise ClearheadError(
            f"a batch of {batch} blocks does not divide among {world} processes; "
            f"take {batch // world * world or world} or {(batch // world + 1) * world} blocks"
        )
    chosen = []
    for place in range(step * batch + rank, (step + 1) * batch, world):
        epoch, entry = divmod(place, n)
        chosen.append(_permutation(seed, epoch, n)[entry])
    return torch.from_numpy(np.array(chosen, dtype=np.int64))


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    key = mix(mix(np.array([seed % 2**64], dtype=np.uint64)) ^ np.uint64(epoch))
    hashes = mix(key ^ np.arange(n, dtype=np.uint64))
    # mix is a bijection of 64-bit numbers, so no two blocks tie
    return np.argsort(hashes)
