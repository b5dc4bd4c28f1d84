"""The inputs and outputs of one attention layer, computed from token blocks as they are needed.

    x = attn_in.L [b, t, d]    what the attention module receives, after the norm
    y = attn_out.L [b, t, d]   what it returns, before it is added to the residual stream

Only layers 0..L are run. Every batch is checked: a NaN or an infinity is an error that names the site, the block and
the position, never a number in a result. The store (store.py) serves the same batches from disk.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from clearhead.data.text import TokenBlocks
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.model.access import Model
from clearhead.model.sites import parse


class Activations(NamedTuple):
    """A batch of blocks with a layer's input and output at every token."""

    tokens: Int64[Tensor, "b t"]
    x: Float[Tensor, "b t d"]
    y: Float[Tensor, "b t d"]


class LiveActivations:
    """Serves activations of numbered blocks by running the model; batches larger than `micro_batch` run in parts.

    x and y come in float32 where the model computes in a 16-bit format, else in the model's own, and on its device.
    Raises `ClearheadError` for a layer that does not exist.
    """

    def __init__(
        self,
        model: Model,
        blocks: TokenBlocks,
        layer: int,
        *,
        micro_batch: int = 8,
    ):
        if micro_batch < 1:
            raise ClearheadError(f"micro_batch: expected at least 1 block, got {micro_batch}")
        self.model = model
        self.blocks = blocks
        for site in attention_sites(layer):
            parse(site, model.n_layers)
        self.layer = layer % model.n_layers
        self.sites = attention_sites(self.layer)
        self.context: int = blocks.context
        self.d: int = model.d_model
        self.micro_batch = micro_batch

    def __len__(self) -> int:
        return len(self.blocks)

    def batch(self, block_indices: Int64[Tensor, " b"] | Sequence[int]) -> Activations:
        """Activations of these blocks, in this order. Raises `NonFiniteError` for NaN or infinity."""
        chosen = check_indices(block_indices, len(self))
        tokens = self.blocks.tokens[chosen]
        x, y = [], []
        for part in tokens.split(self.micro_batch):
            run = self.model.run(part, read=self.sites)
            x.append(_at_least_float32(run[self.sites[0]]))
            y.append(_at_least_float32(run[self.sites[1]]))
        batch = Activations(tokens, torch.cat(x), torch.cat(y))
        refuse_non_finite(batch.x, self.sites[0], chosen)
        refuse_non_finite(batch.y, self.sites[1], chosen)
        return batch


def attention_sites(layer: int) -> tuple[str, str]:
    """The sites of a layer's input x and output y."""
    return f"attn_in.{layer}", f"attn_out.{layer}"


def check_indices(block_indices: Int64[Tensor, " b"] | Sequence[int], n: int) -> Int64[Tensor, " b"]:
    """Block indices as a tensor; raises `ClearheadError` for one outside 0..n-1 or none at all."""
    chosen = torch.as_tensor(block_indices, dtype=torch.int64).flatten()
    if not len(chosen) or int(chosen.min()) < 0 or int(chosen.max()) >= n:
        raise ClearheadError(f"block indices must be 0 to {n - 1} and at least one, got {chosen.tolist()[:8]}")
    return chosen


def refuse_non_finite(values: Float[Tensor, "b t d"], site: str, blocks: Int64[Tensor, " b"], hint: str = "") -> None:
    """Raise `NonFiniteError` naming site, block, place in the batch and position of the first value not finite."""
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return
    entry, position, dimension = (int(i) for i in torch.nonzero(~finite)[0])
    value = float(values[entry, position, dimension])
    raise NonFiniteError(
        f"{site} is {value} in block {int(blocks[entry])} (entry {entry} of the batch) at position {position}, "
        f"dimension {dimension}. {hint or 'Load the model with dtype float32, or check its weights.'}"
    )


def _at_least_float32(values: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
