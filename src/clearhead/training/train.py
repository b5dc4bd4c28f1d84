"""Train a Lorsa: what it adds to the training of any dictionary (train_dictionary.py).

Derives geometry and sizes from the model, and draws a sample for scales and initial weights, which come from the
model's own attention.
"""

from typing import Any

from clearhead.config import TrainLorsa
from clearhead.data.harvest import ATTENTION, Activations
from clearhead.data.order import indices
from clearhead.data.text import TokenBlocks, token_blocks
from clearhead.dictionaries.init import draw_sample, initialise, lorsa_config, start_sinks
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.dictionaries.narrow import narrow
from clearhead.model.access import Model
from clearhead.model.geometry import AttentionGeometry, attention_geometry, verify_scores
from clearhead.model.weights import AttentionWeights, attention_weights
from clearhead.training.dictionary_task import Scales, measure_scales
from clearhead.training.loop import Source
from clearhead.training.lorsa import LorsaTask
from clearhead.training.train_dictionary import SAMPLE_BLOCKS, Recipe, layer_of, open_layer, train_dictionary

NARROW_BLOCKS = 8  # what single numbers about scores are measured on


def train_lorsa(config: TrainLorsa) -> dict[str, Any]:
    """Train (or finish training) one Lorsa; returns the summary that the run directory also holds.

    Raises `ClearheadError` when the directory holds another configuration, when the text is too short for one batch,
    or when a Lorsa cannot imitate the layer; whatever was computed stays in the run directory.
    """
    return train_dictionary(config, LORSA)


def open_source(model: Model, config: TrainLorsa) -> tuple[Source[Activations], TokenBlocks]:
    """The activations to train on, and the text they come from."""
    return open_layer(model, config, ATTENTION)


def empty_lorsa(model: Model, config: TrainLorsa) -> Lorsa:
    """A Lorsa of the configured size with the geometry of the layer, all weights 0."""
    shape = lorsa_config(
        _attention(model, config)[1],
        model.d_model,
        heads=int(config.heads or 0),
        groups=int(config.groups or 0),
        k=config.k,
        activation=config.activation,
        patterns_per_group=config.patterns_per_group,
        sink=config.sink,
    )
    return Lorsa(shape)


def _attention(model: Model, config: TrainLorsa) -> tuple[AttentionWeights, AttentionGeometry]:
    """The layer's own queries, keys and values, narrowed to --qk-width on the first blocks of the text."""
    layer = layer_of(config)
    weights, geometry = attention_weights(model, layer), attention_geometry(model, layer)
    if config.qk_width is None:
        return weights, geometry
    few = NARROW_BLOCKS * config.context
    blocks = token_blocks(model, config.text, split="train", n_tokens=few, context=config.context, at_most=True)
    return narrow(weights, geometry, config.qk_width, draw_sample(model, layer, blocks.tokens).x)


def initialise_lorsa(
    lorsa: Lorsa, model: Model, config: TrainLorsa, _: Source[Activations], blocks: TokenBlocks
) -> Scales:
    """Fill the initial weights of `lorsa`, in place, and return the scales of the layer.

    Whatever starts from the model's own queries and keys first rebuilds the model's scores from them: a rotation or
    norm read wrongly would otherwise start, and stay, as a quietly wrong pattern.
    """
    layer = layer_of(config)
    if config.init != "random":
        verify_scores(model, layer)
    chosen = indices(config.seed, 0, min(SAMPLE_BLOCKS, len(blocks)), len(blocks))
    sample = draw_sample(model, layer, blocks.tokens[chosen])
    scales = measure_scales(sample.x, sample.y)
    weights, geometry = _attention(model, config)
    initialise(lorsa, config.init, weights, sample, scales.input, scales.output, config.seed)
    if config.sink and not geometry.sinks:
        start_sinks(lorsa, sample.x[:NARROW_BLOCKS] * scales.input)
    return scales


def _resolve(config: TrainLorsa, model: Model) -> TrainLorsa:
    return config.resolved(n_layers=model.n_layers, d_model=model.d_model, d_head=model.d_head, n_heads=model.n_heads)


def _task(lorsa: Lorsa, scales: Scales, config: TrainLorsa) -> LorsaTask:
    return LorsaTask(
        lorsa,
        scales,
        aux_k=config.aux_k,
        dead_after_tokens=config.dead_after_tokens,
        qk_lr_factor=config.qk_lr_factor,
        l0_weight=config.l0_weight,
        added_sinks=config.sink,
    )


def _sizes(config: TrainLorsa) -> dict[str, Any]:
    return {"layer": config.layer, "heads": config.heads, "groups": config.groups, "k": config.k}


def _sites(config: TrainLorsa, _: Model) -> dict[str, Any]:
    layer = layer_of(config)
    return {"layer": layer, "input_site": f"attn_in.{layer}", "output_site": f"attn_out.{layer}"}


LORSA = Recipe("lorsa", _resolve, open_source, empty_lorsa, initialise_lorsa, _task, _sizes, _sites)
