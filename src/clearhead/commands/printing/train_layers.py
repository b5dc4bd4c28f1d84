"""What the trainings print when several layers are asked for: the plan before, one table after.

The plan takes sizes from that of one layer. Its time is that of the harvest, measured on a few blocks through all the
layers, and that of one training times their number, measured on the lowest; initial weights come on top.
"""

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clearhead.commands.opening.structure import BYTES, without_weights
from clearhead.commands.opening.training_time import fits, free_memory, training_rate
from clearhead.commands.printing.table import duration, say, show_layers, size
from clearhead.config.verb import resolve_layers
from clearhead.data.harvest import layers_with, sources_of
from clearhead.data.store import write_stores
from clearhead.data.text import token_blocks
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.training.layers import STORE_DTYPE, OfLayer, directory_of, train_layers
from clearhead.training.train_dictionary import Recipe

MEASURED_BLOCKS = 2
COLUMNS = {"final_batch_fvu": "FVU (last batch)", "final_batch_l0": "L0", "tokens_per_second": "tokens/s"}


def run_layers(config: OfLayer, recipe: Recipe) -> None:
    """Train the layers, and print one table."""
    trained = train_layers(config, recipe)
    show_layers(trained.summaries, COLUMNS, trained.left_out, f"trained in {trained.out}, a directory for each layer")
    if config.store is None:
        say(f"their activations stay in {trained.out / 'stores'}; give it as --store to train others, or delete it")
    first = trained.out / str(min(trained.summaries))
    say(f"next: clearhead evaluate {trained.out}; clearhead analyze {trained.out}; clearhead view {first}")


def plan_layers(config: OfLayer, recipe: Recipe, sizes: Callable[[Any], tuple[dict[str, Any], int]]) -> dict[str, Any]:
    """The plan of several layers, from the `sizes` of the lowest of them."""
    model = without_weights(config.model)
    layers, left_out = layers_with(model, resolve_layers(config.layer, model.n_layers), config.sites())
    if not layers:
        raise ClearheadError("; ".join(left_out.values()))
    one = recipe.resolve(dataclasses.replace(config, layer=layers[0], store=None), model)
    out = directory_of(config, one)
    rows, memory = sizes(one)
    rows |= {"layer": f"{len(layers)}: {', '.join(map(str, layers))}", "directory": f"{out}, a folder for each layer"}
    rows |= {f"layer {layer} left out": reason for layer, reason in left_out.items()}
    place = config.store or out / "stores"
    bytes_ = len(layers) * config.tokens * (2 * model.d_model * BYTES[STORE_DTYPE] + 8)
    rows["activations"] = str(place) if config.store else f"at most {size(bytes_)} in {place}"
    if not fits(config, memory):
        return rows | {"time": f"not measured: only {size(free_memory())} are free"}
    seconds = len(layers) * config.tokens / training_rate(one, recipe)
    rows["time of the trainings"] = f"about {duration(seconds)}, and their initial weights"
    if config.store is None:
        rows["time of the harvest"] = f"about {duration(config.tokens / _harvest_rate(config, layers))}"
    return rows


def _harvest_rate(config: OfLayer, layers: list[int]) -> float:
    """Tokens per second of one forward pass that stores all the layers, over a few blocks."""
    model = Model.load(config.model, dtype=config.dtype, device=config.device, self_test=False)
    n_tokens = MEASURED_BLOCKS * config.context
    blocks = token_blocks(model, config.text, split="train", n_tokens=n_tokens, context=config.context, at_most=True)
    sources, _ = sources_of(model, blocks, layers, sites=config.sites())
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        write_stores({Path(folder) / str(layer): source for layer, source in sources.items()}, dtype=STORE_DTYPE)
        return n_tokens / (time.monotonic() - begun)
