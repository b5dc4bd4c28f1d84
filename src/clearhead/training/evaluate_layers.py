"""The fidelity of dictionaries of several layers from one forward pass: the numbers of evaluate.py, by layer.

A pass of the model up to layer L gives the activations of all layers below as well. What needs a pass of its own for
every layer, the loss through a dictionary, is not here.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.data.harvest import LiveActivations, batches
from clearhead.data.text import TokenBlocks
from clearhead.model.access import Model
from clearhead.runs import progress
from clearhead.training.evaluate import FidelityMeter, Metrics


@torch.no_grad()
def measure_layers(
    modules: Mapping[int, Any], model: Model, blocks: TokenBlocks, *, sites: tuple[str, str], batch_blocks: int = 8
) -> dict[int, tuple[Metrics, Float[Tensor, " d"]]]:
    """By layer, what `measure_fidelity` returns for its module and its activations: metrics and mean target."""
    sources = [LiveActivations(model, blocks, layer, sites=sites, micro_batch=batch_blocks) for layer in modules]
    meters = [FidelityMeter(model.d_model, module.n_units, blocks.context) for module in modules.values()]
    with progress("evaluate", blocks.tokens.numel()) as advance:
        for chosen in torch.arange(len(blocks)).split(batch_blocks):
            for module, meter, batch in zip(modules.values(), meters, batches(sources, chosen), strict=True):
                y, _, codes = module(batch.x)
                meter.add(batch.y, y, *codes)
            advance(len(chosen) * blocks.context)
    return {
        layer: ({"layer": layer, **meter.result()}, meter.mean_y) for layer, meter in zip(modules, meters, strict=True)
    }
