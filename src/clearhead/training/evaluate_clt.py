"""How faithful a cross-layer transcoder is, layer by layer and with the MLPs of all layers replaced at once.

Fidelity is that of evaluate.py for each layer's MLP output, and its mean over layers; L0 counts the features of all
layers that are active at a token. Downstream every MLP output is replaced by what the features of its own layer and of
those below write, computed from the MLP inputs of the same, already changed, run: errors accumulate as they would in
use.
"""

import torch
from torch import Tensor

from clearhead.data.harvest import LayeredActivations
from clearhead.data.text import TokenBlocks
from clearhead.dictionaries.clt import Clt
from clearhead.model.access import Model, Run
from clearhead.runs import progress
from clearhead.training.evaluate import FidelityMeter, Metrics, downstream_losses, first_blocks


@torch.no_grad()
def evaluate_clt(
    clt: Clt, model: Model, blocks: TokenBlocks, *, downstream_tokens: int = 20_000, batch_blocks: int = 8
) -> Metrics:
    """Fidelity over all of `blocks` and downstream loss over the first `downstream_tokens` of them."""
    clt.eval()
    layers, d = clt.n_layers, clt.config.d_model
    source = LayeredActivations(model, blocks)
    meters = [FidelityMeter(d, clt.n_units, source.context) for _ in range(layers)]
    with progress("evaluate", len(source) * source.context) as advance:
        for chosen in torch.arange(len(source)).split(batch_blocks):
            batch = source.batch(chosen)
            y, _, codes = clt(batch.x)
            for layer, meter in enumerate(meters):
                meter.add(batch.y[:, :, layer], y[:, :, layer], *codes)
            advance(len(chosen) * source.context)
    results = [meter.result() for meter in meters]
    counted = ("tokens", "l0", "dead_heads", "dead_share", "over_dense_heads", "over_dense_share")
    metrics = {
        **{name: results[0][name] for name in counted},
        "fvu": sum(result["fvu"] for result in results) / layers,
        "fvu_by_layer": [round(result["fvu"], 6) for result in results],
    }
    if downstream_tokens:
        means = {f"mlp_out.{layer}": meter.mean_y for layer, meter in enumerate(meters)}
        reads = [f"mlp_in.{layer}" for layer in range(layers)]
        replacements = {f"mlp_out.{layer}": _replacement(clt, layer) for layer in range(layers)}
        metrics |= downstream_losses(
            model, first_blocks(blocks, downstream_tokens), replacements, means, reads, batch_blocks
        )
    return metrics


def _replacement(clt: Clt, layer: int):
    """The edit of one layer's MLP output: what all features below and of this layer write to it."""

    def replace(y: Tensor, run: Run) -> Tensor:
        total = clt.b_dec[layer]
        for source in range(layer + 1):
            codes = clt.encode(source, run[f"mlp_in.{source}"].to(clt.b_dec.dtype))
            total = total + clt.writes(source, codes)[..., layer - source, :]
        return total.to(y.dtype)

    return replace
