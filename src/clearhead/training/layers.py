"""Train one dictionary per layer: the activations of all layers come from one forward pass, the trainings one by one.

    OUT/L           the run of layer L, exactly what a training of that layer alone leaves
    OUT/stores/L    its activations, float16 (`config.store` names another folder of stores instead)

What is finished is not done again, so the same call continues after an interruption. A layer that cannot be imitated
(attention without softmax in a hybrid model, a damaged store) costs the others nothing: its reason is part of the
result. Not here: several layers at once in one process, or one dictionary across layers (clt.py).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clearhead import configfile
from clearhead.config import TrainLorsa, TrainSae, TrainTranscoder
from clearhead.config.verb import resolve_layers
from clearhead.data.harvest import sources_of
from clearhead.data.store import write_stores
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.runs import read_json
from clearhead.training.session import open_accelerator
from clearhead.training.train_dictionary import IMMATERIAL, Recipe, train_blocks, train_dictionary

STORE_DTYPE = "float16"
"""Its rounding is a ten-millionth of the variance; what it cannot hold is refused, and then `clearhead harvest` can."""
OfLayer = TrainLorsa | TrainTranscoder | TrainSae


@dataclasses.dataclass(frozen=True)
class TrainedLayers:
    """What `train_layers` leaves: a directory with one run per layer."""

    out: Path
    summaries: Mapping[int, dict[str, Any]]
    """By layer, what its run's summary.json holds."""
    left_out: Mapping[int, str]
    """By layer, why it has no run."""


def train_layers(config: OfLayer, recipe: Recipe) -> TrainedLayers:
    """Train (or finish training) the layers that `config.layer` names.

    Raises `ClearheadError` when no layer could be trained, with the first reason, and when several processes would
    harvest; whatever was computed stays in the directory.
    """
    accelerator = open_accelerator(config.device, bf16=config.bf16)
    if accelerator.num_processes > 1 and config.store is None:
        raise ClearheadError(
            f"several processes cannot fill one store; type `clearhead harvest --layer {config.layer}` first, in one "
            f"process, and give its directory as --store"
        )
    model = Model.load(config.model, dtype=config.dtype, device=str(accelerator.device))
    layers = resolve_layers(config.layer, model.n_layers)
    one = recipe.resolve(dataclasses.replace(config, layer=layers[0]), model)
    out = directory_of(config, one)
    summaries, left_out = {}, {}
    unfinished = {}
    for layer in layers:
        own = dataclasses.replace(one, layer=layer, out=out / str(layer))
        if (out / str(layer) / "summary.json").exists():
            configfile.refuse_other_run(out / str(layer), own, IMMATERIAL)
            summaries[layer] = read_json(out / str(layer) / "summary.json")
        else:
            unfinished[layer] = own
    stores = config.store or out / "stores"
    if config.store is None and unfinished:
        left_out |= _harvest(model, config, list(unfinished), stores)
    for layer, own in unfinished.items():
        if layer in left_out:
            continue
        try:
            stored = dataclasses.replace(own, store=stores / str(layer))
            summaries[layer] = train_dictionary(stored, recipe, model)
        except ClearheadError as error:
            left_out[layer] = str(error)
    if not summaries:
        raise ClearheadError(f"no layer could be trained; layer {min(left_out)}: {left_out[min(left_out)]}")
    return TrainedLayers(out, dict(sorted(summaries.items())), dict(sorted(left_out.items())))


def directory_of(config: OfLayer, one: OfLayer) -> Path:
    """The directory of all layers' runs; `one` is the resolved configuration of one of them."""
    return config.out or dataclasses.replace(one, layer=config.layer, out=None).directory()


def _harvest(model: Model, config: OfLayer, layers: list[int], stores: Path) -> dict[int, str]:
    """Store what these layers are trained on, in float16; returns why some of them have nothing to store."""
    blocks = train_blocks(model, config)
    sources, left_out = sources_of(model, blocks, layers, sites=config.sites())
    if sources:
        write_stores({stores / str(layer): source for layer, source in sources.items()}, dtype=STORE_DTYPE)
    return left_out
