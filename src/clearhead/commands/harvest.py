"""`clearhead harvest`: stores the inputs and outputs of one attention layer, MLP or site."""

from typing import Any

from clearhead.commands.structure import BYTES, without_weights
from clearhead.commands.table import say, size
from clearhead.config import Harvest, resolve_layer
from clearhead.data.harvest import LiveActivations
from clearhead.data.store import write_store
from clearhead.data.text import token_blocks
from clearhead.model.access import Model


def plan(config: Harvest) -> dict[str, Any]:
    """Where the store will lie and how large it will be; no weights are loaded."""
    model = without_weights(config.model)
    layer = resolve_layer(config.layer, model.n_layers)
    return {
        "model": config.model,
        "sites": ", ".join(f"{site}.{layer}" for site in config.sites()),
        "text": f"{config.text} ({config.split})",
        "tokens, at most": config.tokens,
        "on disk, at most": size(config.tokens * (2 * model.d_model * BYTES[config.store_dtype] + 8)),
        "directory": config.directory(layer),
    }


def run(config: Harvest) -> None:
    """Harvest, and print where the store lies."""
    model = Model.load(config.model, dtype=config.dtype, device=config.device)
    layer = resolve_layer(config.layer, model.n_layers)
    blocks = token_blocks(
        model, config.text, split=config.split, n_tokens=config.tokens, context=config.context, at_most=True
    )
    source = LiveActivations(model, blocks, layer, sites=config.sites())
    store = write_store(config.directory(layer), source, batch_blocks=config.batch_blocks, dtype=config.store_dtype)
    say(f"store: {store.path}, {len(store):,} blocks of {store.context} tokens")
    trains = {"attention": "lorsa", "mlp": "transcoder"}.get(config.site, f"sae --site {config.site}")
    say(f"next: clearhead train {trains} --model {config.model} --layer {layer} --store {store.path}")
