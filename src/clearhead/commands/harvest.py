"""`clearhead harvest`: stores the inputs and outputs of attention layers, MLPs or a site, from one forward pass."""

from typing import Any

from clearhead.commands.opening.structure import BYTES, without_weights
from clearhead.commands.printing.table import say, size
from clearhead.config import Harvest
from clearhead.config.verb import resolve_layers
from clearhead.data.harvest import sources_of
from clearhead.data.repeats import mixed_blocks
from clearhead.data.store import write_stores
from clearhead.errors import ClearheadError
from clearhead.model.access import Model


def plan(config: Harvest) -> dict[str, Any]:
    """Where the stores will lie and how large they will be; no weights are loaded."""
    model = without_weights(config.model)
    layers = resolve_layers(config.layer, model.n_layers)
    sites = ", ".join(f"{site}.{layers[0]}" for site in config.sites())
    on_disk = len(layers) * config.tokens * (2 * model.d_model * BYTES[config.store_dtype] + 8)
    return {
        "model": config.model,
        "sites": sites if len(layers) == 1 else f"{sites} and those of {len(layers) - 1} more layers",
        "text": f"{config.text} ({config.split})",
        "tokens, at most": config.tokens,
        **({"of it repeated tokens": f"{config.repeat_share:.3g}"} if config.repeat_share else {}),
        "on disk, at most": size(on_disk),
        "directory": config.directory(layers[0]) if len(layers) == 1 else config.directory(layers[0]).parent,
    }


def run(config: Harvest) -> None:
    """Harvest, and print where the stores lie; layers without the sites are named and left out."""
    model = Model.load(config.model, dtype=config.dtype, device=config.device)
    blocks = mixed_blocks(
        model,
        config.text,
        split=config.split,
        n_tokens=config.tokens,
        context=config.context,
        repeat_share=config.repeat_share,
    )
    layers = resolve_layers(config.layer, model.n_layers)
    sources, left_out = sources_of(model, blocks, layers, sites=config.sites())
    if not sources:
        raise ClearheadError("; ".join(left_out.values()))
    for reason in left_out.values():
        say(f"left out: {reason}")
    paths = {config.directory(layer): source for layer, source in sources.items()}
    stores = write_stores(paths, batch_blocks=config.batch_blocks, dtype=config.store_dtype)
    for store in stores:
        say(f"store: {store.path}, {len(store):,} blocks of {store.context} tokens")
    trains = {"attention": "lorsa", "mlp": "transcoder"}.get(config.site, f"sae --site {config.site}")
    several = isinstance(config.layer, str)
    given, place = (config.layer, stores[0].path.parent) if several else (layers[0], stores[0].path)
    text = "" if config.text == type(config).text else f" --text {config.text}"
    share = f" --repeat-share {config.repeat_share}" if config.repeat_share else ""
    say(
        f"next: clearhead train {trains} --model {config.model} --layer {given} --context {config.context}{text}"
        f"{share} --store {place}"
    )
