"""Train a cross-layer transcoder: what it adds to the training of any dictionary (train_dictionary.py).

Inputs and outputs of the MLPs of all layers come together, each layer with scales of its own, and the loss is the sum
over layers. Feature n of layer l starts from one token, as a transcoder's does, and writes what the MLP of its own
layer wrote there; its decoders for the layers above start at 0.
"""

from typing import Any

import torch

from clearhead.config import TrainClt
from clearhead.data.harvest import Activations, LayeredActivations
from clearhead.data.text import TokenBlocks
from clearhead.dictionaries.clt import Clt, CltConfig
from clearhead.dictionaries.init_features import initialise_features
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.model.access import Model
from clearhead.training.dictionary_task import Scales, measure_scales, ordinary
from clearhead.training.loop import Source
from clearhead.training.train_dictionary import Recipe, train_blocks, train_dictionary
from clearhead.training.transcoder import draw_pairs, task


def train_clt(config: TrainClt) -> dict[str, Any]:
    """Train (or finish training) one cross-layer transcoder; returns the summary that the run directory also holds.

    Errors as for `train_dictionary`.
    """
    return train_dictionary(config, CLT)


def open_source(model: Model, config: TrainClt) -> tuple[Source[Activations], TokenBlocks]:
    """The activations to train on, computed from the text as they are needed."""
    blocks = train_blocks(model, config)
    return LayeredActivations(model, blocks), blocks


def empty(model: Model, config: TrainClt) -> Clt:
    """A module of the configured size, all weights 0."""
    shape = CltConfig(
        d_model=model.d_model,
        n_layers=model.n_layers,
        n_features=int(config.features or 0),
        k=config.k,
        activation=config.activation,
        unit_norm=config.activation in ("topk", "batchtopk"),
    )
    return Clt(shape)


@torch.no_grad()
def initialise(module: Clt, _: Model, config: TrainClt, source: Source[Activations], __: TokenBlocks) -> Scales:
    """Initial weights from a sample of the source, in place; returns the scales, [l, 1] each."""
    sample = draw_pairs(source, config.seed)
    scales = measure_scales(sample.x, sample.y)
    counts = ordinary(sample.y[:, 1:]).all(2)
    x, y = (part[:, 1:][counts] for part in (sample.x * scales.input, sample.y * scales.output))
    c = module.config
    shape = TranscoderConfig(d_in=c.d_model, d_out=c.d_model, n_features=c.n_features, k=c.k)
    for layer in range(c.n_layers):
        own = Transcoder(shape)
        initialise_features(own, x[:, layer], y[:, layer], config.seed + layer)
        module.W_enc[layer].copy_(own.W_enc)
        module.b_enc[layer].copy_(own.b_enc)
        module.W_dec[layer][:, 0].copy_(own.W_dec)
        module.b_dec[layer].copy_(own.b_dec)
    return scales


def _resolve(config: TrainClt, model: Model) -> TrainClt:
    return config.resolved(d_model=model.d_model)


def _sizes(config: TrainClt) -> dict[str, Any]:
    return {"features": config.features, "k": config.k}


def _sites(_: TrainClt, model: Model) -> dict[str, Any]:
    return {"layer": None, "layers": model.n_layers, "input_site": "mlp_in.*", "output_site": "mlp_out.*"}


CLT = Recipe("clt", _resolve, open_source, empty, initialise, task, _sizes, _sites)
