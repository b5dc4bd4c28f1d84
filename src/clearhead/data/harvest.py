"""The inputs and outputs of one layer's module, computed from token blocks as they are needed.

    x = attn_in.L [b, t, d]    what the attention module receives, after the norm
    y = attn_out.L [b, t, d]   what it returns, before it is added to the residual stream

or any other two sites of the residual width: mlp_in.L and mlp_out.L for a transcoder, one site twice for an SAE.
`LayeredActivations` serves the MLPs of all layers at once, [b, t, l, d], and `batches` several layers apart, from one
forward pass. Only the layers needed are run. Every batch is
checked: a NaN or an infinity is an error that names the site, the block and the position, never a number in a result.
The store (store.py) serves the same batches from disk.
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

ATTENTION = ("attn_in", "attn_out")
"""The sites of the attention module's input and output."""
MLP = ("mlp_in", "mlp_out")
"""The sites of the MLP's input and output."""


class Activations(NamedTuple):
    """A batch of blocks with a layer's input and output (or those of all layers) at every token."""

    tokens: Int64[Tensor, "b t"]
    x: Float[Tensor, "b t *l d"]
    y: Float[Tensor, "b t *l d"]


class LiveActivations:
    """Serves activations of numbered blocks by running the model; batches larger than `micro_batch` run in parts.

    `sites` are those of x and y without their layer. x and y come in float32 where the model computes in a 16-bit
    format, else in the model's own, and on its device. Raises `ClearheadError` for a layer that does not exist or has
    no such site (in hybrid models not every layer has softmax attention), and `UnknownNameError` for a site.
    """

    def __init__(
        self,
        model: Model,
        blocks: TokenBlocks,
        layer: int,
        *,
        sites: tuple[str, str] = ATTENTION,
        micro_batch: int = 8,
    ):
        if micro_batch < 1:
            raise ClearheadError(f"micro_batch: expected at least 1 block, got {micro_batch}")
        self.model = model
        self.blocks = blocks
        for site in sites:
            model.places.refuse_unavailable(parse(f"{site}.{layer}", model.n_layers))
        self.layer = layer % model.n_layers
        self.sites = (f"{sites[0]}.{self.layer}", f"{sites[1]}.{self.layer}")
        self.context: int = blocks.context
        self.d: int = model.d_model
        self.micro_batch = micro_batch

    def __len__(self) -> int:
        return len(self.blocks)

    def batch(self, block_indices: Int64[Tensor, " b"] | Sequence[int]) -> Activations:
        """Activations of these blocks, in this order. Raises `NonFiniteError` for NaN or infinity."""
        return batches([self], block_indices)[0]


def batches(
    sources: Sequence[LiveActivations], block_indices: Int64[Tensor, " b"] | Sequence[int]
) -> list[Activations]:
    """What each of several sources of one model and text serves for these blocks, from one forward pass.

    Raises `NonFiniteError` for NaN or infinity.
    """
    first = sources[0]
    chosen = check_indices(block_indices, len(first))
    tokens = first.blocks.tokens[chosen]
    sites = list(dict.fromkeys(site for source in sources for site in source.sites))
    values = _read(first.model, tokens, sites, first.micro_batch)
    for site in sites:
        refuse_non_finite(values[site], site, chosen)
    return [Activations(tokens, *(values[site] for site in source.sites)) for source in sources]


def layers_with(
    model: Model, layers: Sequence[int], sites: tuple[str, str] = ATTENTION
) -> tuple[list[int], dict[int, str]]:
    """Those of `layers` that have the sites, and why the others have not. `model` may be without weights."""
    refused = {}
    for layer in layers:
        try:
            for site in sites:
                model.places.refuse_unavailable(parse(f"{site}.{layer}", model.n_layers))
        except ClearheadError as error:
            refused[layer] = str(error)
    return [layer for layer in layers if layer not in refused], refused


def sources_of(
    model: Model, blocks: TokenBlocks, layers: Sequence[int], *, sites: tuple[str, str] = ATTENTION
) -> tuple[dict[int, LiveActivations], dict[int, str]]:
    """A source for every one of `layers` that has the sites, and why the others have none."""
    having, refused = layers_with(model, layers, sites)
    return {layer: LiveActivations(model, blocks, layer, sites=sites) for layer in having}, refused


class LayeredActivations:
    """Serves the inputs and outputs of all layers' MLPs, [b, t, l, d], as `LiveActivations` does for one module."""

    def __init__(self, model: Model, blocks: TokenBlocks, *, micro_batch: int = 8):
        self.model = model
        self.blocks = blocks
        self.sites = tuple([f"{name}.{layer}" for layer in range(model.n_layers)] for name in MLP)
        self.context: int = blocks.context
        self.micro_batch = micro_batch

    def __len__(self) -> int:
        return len(self.blocks)

    def batch(self, block_indices: Int64[Tensor, " b"] | Sequence[int]) -> Activations:
        """Activations of these blocks, in this order. Raises `NonFiniteError` for NaN or infinity."""
        chosen = check_indices(block_indices, len(self))
        tokens = self.blocks.tokens[chosen]
        values = _read(self.model, tokens, [*self.sites[0], *self.sites[1]], self.micro_batch)
        batch = Activations(tokens, *(torch.stack([values[site] for site in sites], 2) for sites in self.sites))
        for sites, values in zip(self.sites, batch[1:], strict=True):
            for layer, site in enumerate(sites):
                refuse_non_finite(values[:, :, layer], site, chosen)
        return batch


def _read(
    model: Model, tokens: Int64[Tensor, "b t"], sites: Sequence[str], micro_batch: int
) -> dict[str, Float[Tensor, "b t d"]]:
    """These sites of a forward pass that runs `micro_batch` blocks at a time, in float32 at least."""
    parts: dict[str, list[Tensor]] = {site: [] for site in sites}
    for part in tokens.split(micro_batch):
        run = model.run(part, read=tuple(sites))
        for site in sites:
            parts[site].append(_at_least_float32(run[site]))
    return {site: torch.cat(gathered) for site, gathered in parts.items()}


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
