"""Train a transcoder or an SAE: what they add to the training of any dictionary (train_dictionary.py).

A transcoder reads mlp_in.L and predicts mlp_out.L (or attn_in.L and attn_out.L); an SAE predicts what it reads, and can
do so from a store that holds its site beside another. Sizes, scales and initial weights come from a sample of the
activations that are trained on.
"""

from pathlib import Path
from typing import Any

from clearhead.config import TrainSae, TrainTranscoder
from clearhead.data.harvest import Activations
from clearhead.data.order import indices
from clearhead.data.store import ActivationStore, store_of_layer
from clearhead.data.text import TokenBlocks
from clearhead.dictionaries.init_features import initialise_features
from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.model.access import Model
from clearhead.training.dictionary_task import DictionaryTask, Scales, measure_scales, ordinary
from clearhead.training.loop import Source
from clearhead.training.train_dictionary import SAMPLE_BLOCKS, Recipe, layer_of, open_layer, train_dictionary

OneLayer = TrainTranscoder | TrainSae


def train_transcoder(config: TrainTranscoder) -> dict[str, Any]:
    """Train (or finish training) one transcoder; returns the summary that the run directory also holds.

    Errors as for `train_dictionary`.
    """
    return train_dictionary(config, TRANSCODER)


def train_sae(config: TrainSae) -> dict[str, Any]:
    """Train (or finish training) one SAE; returns the summary that the run directory also holds.

    Errors as for `train_dictionary`.
    """
    return train_dictionary(config, SAE)


def open_source(model: Model, config: OneLayer) -> tuple[Source[Activations], TokenBlocks]:
    """The activations to train on, and the text they come from."""
    reads, writes = config.sites()
    held = None if config.store is None else stored_sites(store_of_layer(config.store, layer_of(config)))
    if held is None or reads != writes or reads not in held or held == (reads, writes):
        return open_layer(model, config, (reads, writes))
    source, blocks = open_layer(model, config, (held[0], held[1]))
    return OneSite(source, held.index(reads)), blocks


def stored_sites(path: Path) -> tuple[str, ...]:
    """The sites that a store holds, without their layer."""
    return tuple(site.partition(".")[0] for site in ActivationStore(path).index["sites"])


class OneSite:
    """Serves one of the two sites of a source as input and output: what an SAE trains on."""

    def __init__(self, source: Source[Activations], which: int):
        self.source = source
        self.which = which
        self.context: int = source.context

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, block_indices: Any) -> Activations:
        """Activations of these blocks, in this order."""
        tokens, *sites = self.source.batch(block_indices)
        return Activations(tokens, sites[self.which], sites[self.which])


def draw_pairs(source: Source[Activations], seed: int) -> Activations:
    """Activations of a sample of the blocks, on the CPU."""
    chosen = indices(seed, 0, min(SAMPLE_BLOCKS, len(source)), len(source))
    tokens, x, y = source.batch(chosen)
    return Activations(tokens, x.cpu(), y.cpu())


def empty(model: Model, config: OneLayer) -> Transcoder:
    """A module of the configured size, all weights 0."""
    shape = TranscoderConfig(
        d_in=model.d_model,
        d_out=model.d_model,
        n_features=int(config.features or 0),
        k=config.k,
        activation=config.activation,
        skip=isinstance(config, TrainTranscoder) and config.skip,
        unit_norm=config.activation in ("topk", "batchtopk"),
    )
    return Transcoder(shape) if isinstance(config, TrainTranscoder) else Sae(shape)


def initialise(module: Transcoder, _: Model, config: OneLayer, source: Source[Activations], __: TokenBlocks) -> Scales:
    """Initial weights from a sample of the source, in place; returns the scales."""
    sample = draw_pairs(source, config.seed)
    scales = measure_scales(sample.x, sample.y)
    counts = ordinary(sample.y[:, 1:])
    x, y = (part[:, 1:][counts] for part in (sample.x * scales.input, sample.y * scales.output))
    initialise_features(module, x, y, config.seed)
    return scales


def task(module: Any, scales: Scales, config: Any) -> DictionaryTask:
    """The loop's task."""
    return DictionaryTask(
        module,
        scales,
        aux_k=config.aux_k,
        dead_after_tokens=config.dead_after_tokens,
        sparsity=config.sparsity,
        pre_weight=config.pre_weight,
    )


def _resolve(config: OneLayer, model: Model) -> OneLayer:
    return config.resolved(n_layers=model.n_layers, d_model=model.d_model)


def _sizes(config: OneLayer) -> dict[str, Any]:
    return {"layer": config.layer, "features": config.features, "k": config.k}


def _sites(config: OneLayer, _: Model) -> dict[str, Any]:
    layer = layer_of(config)
    reads, writes = config.sites()
    return {"layer": layer, "input_site": f"{reads}.{layer}", "output_site": f"{writes}.{layer}"}


TRANSCODER = Recipe("transcoder", _resolve, open_source, empty, initialise, task, _sizes, _sites)
SAE = Recipe("sae", _resolve, open_source, empty, initialise, task, _sizes, _sites)
