"""A grid of trainings at equal budgets: which runs it has, how large each is, and training one of them.

Equal size means an equal number of parameters: with H heads of G = c to a QK group, width d, a Lorsa has about 4 d H,
an SAE or transcoder of F features 2 d F, so that F is close to 2 H; the number of features that comes closest is taken.
All kinds see the same tokens: the order is a function of seed and step alone, for as many blocks of the same text.
Learning rates are each kind's default, found for it at this scale; everything else is the same.
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from clearhead.config import TrainDictionary, TrainLorsa, TrainSae, TrainSweep, TrainTranscoder, resolve_layers
from clearhead.dictionaries.init import lorsa_config
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.training.session import refuse_other_run
from clearhead.training.train import LORSA
from clearhead.training.train_dictionary import IMMATERIAL, train_dictionary
from clearhead.training.transcoder import SAE, TRANSCODER

RECIPES = {"lorsa": LORSA, "sae": SAE, "transcoder": TRANSCODER}
SHARED = ("model", "text", "context", "dtype", "device", "tokens")


@dataclasses.dataclass(frozen=True)
class Planned:
    """One training of a sweep."""

    name: str
    """Name of its directory in the sweep's."""
    kind: str
    layer: int
    units: int
    parameters: int
    config: TrainDictionary

    @property
    def directory(self) -> Path:
        """Where it lies."""
        return Path(str(self.config.out))

    def finished(self) -> bool:
        """Whether the directory holds this training's result; raises `ClearheadError` where it holds another run."""
        refuse_other_run(self.directory, self.config, resume=True, immaterial=IMMATERIAL)
        return (self.directory / "summary.json").exists() and (self.directory / self.kind / "config.json").exists()


def plan_sweep(config: TrainSweep, model: Model) -> list[Planned]:
    """Every training of the grid, by layer, seed and size; all layers are those with softmax attention.

    `model` may be without weights.

    Raises `ClearheadError` for a layer that does not exist, for more active units than there are, and for attention
    that a Lorsa cannot imitate.
    """
    planned = []
    asked = resolve_layers(config.layer, model.n_layers)
    for layer in model.attention_layers if config.layer == "all" else asked:
        for seed in config.seeds:
            for heads in _heads(config, model, layer):
                budget = lorsa_parameters(model, layer, heads)
                for k in config.k:
                    planned += _of_size(config, model, layer, seed, heads, budget, k)
    return planned


def _of_size(
    config: TrainSweep, model: Model, layer: int, seed: int, heads: int, budget: int, k: int
) -> Iterator[Planned]:
    """Every kind and initialisation at one size, sparsity and seed."""
    shared: dict[str, Any] = {field: getattr(config, field) for field in SHARED}
    shared |= {"layer": layer, "seed": seed, "k": k, "store": store_of(config, layer)}
    features = features_of(budget, model.d_model)
    for kind in config.kinds:
        for init in config.init if kind == "lorsa" else (None,):
            units = heads if kind == "lorsa" else features
            size = f"h{heads}" if kind == "lorsa" else f"f{features}"
            name = "-".join([str(layer), kind, size, f"k{k}", *([init] if init else []), f"s{seed}"])
            out = config.out / name
            if kind == "lorsa":
                one: Any = TrainLorsa(**shared, heads=heads, init=init or "data", out=out)
                one = one.resolved(
                    n_layers=model.n_layers, d_model=model.d_model, d_head=model.d_head, n_heads=model.n_heads
                )
            else:
                if kind == "sae":
                    one = TrainSae(**shared, features=features, site="attn_out", out=out)
                else:
                    one = TrainTranscoder(**shared, features=features, site="attention", out=out)
                one = one.resolved(n_layers=model.n_layers, d_model=model.d_model)
            parameters = budget if kind == "lorsa" else features_parameters(features, model.d_model)
            yield Planned(name, kind, layer, units, parameters, one)


def train(planned: Planned, model: Model | None = None) -> dict[str, Any]:
    """Train one of the grid, or finish it, on the model where it is loaded already; returns its summary."""
    return train_dictionary(planned.config, RECIPES[planned.kind], model)


def store_of(config: TrainSweep, layer: int) -> Path | None:
    """The store of one layer: the one given, or its folder in the one given."""
    if config.store is None or (config.store / "index.json").exists():
        return config.store
    own = config.store / str(layer)
    if not (own / "index.json").exists():
        raise ClearheadError(
            f"{config.store} is no activation store and holds none of layer {layer}, as {own} would be"
        )
    return own


def lorsa_parameters(model: Model, layer: int, heads: int) -> int:
    """Parameters of a Lorsa with that many heads and the derived number of QK groups."""
    sized = TrainLorsa(heads=heads, k=1, layer=layer).resolved(
        n_layers=model.n_layers, d_model=model.d_model, d_head=model.d_head, n_heads=model.n_heads
    )
    # the rotation has no parameters, and a model without storage has no frequencies to copy
    geometry = dataclasses.replace(model.geometry(layer), rope=None)
    shape = lorsa_config(geometry, model.d_model, heads=heads, groups=int(sized.groups or 0), k=1)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Lorsa(shape).parameters())


def features_parameters(features: int, d_model: int) -> int:
    """Parameters of an SAE or transcoder: encoder, decoder, and both biases."""
    return features * (2 * d_model + 1) + d_model


def features_of(parameters: int, d_model: int) -> int:
    """The number of features that comes closest to so many parameters."""
    return max(1, round((parameters - d_model) / (2 * d_model + 1)))


def _heads(config: TrainSweep, model: Model, layer: int) -> list[int]:
    """Lorsa heads of every size, whole QK groups of the layer's head width where parameters are given."""
    if not config.parameters:
        return sorted(config.heads) if config.heads else [4 * model.d_model]
    step = model.d_head
    found = []
    for budget in sorted(config.parameters):
        groups = range(1, max(3, budget // (2 * model.d_model * step)))
        above = bisect_left(groups, budget, key=lambda n: lorsa_parameters(model, layer, n * step))
        near = groups[max(0, above - 1) : above + 1]
        heads = step * min(near, key=lambda n: abs(lorsa_parameters(model, layer, n * step) - budget))
        _refuse_far(budget, lorsa_parameters(model, layer, heads))
        found.append(heads)
    return found


def _refuse_far(budget: int, nearest: int) -> None:
    if abs(nearest - budget) > 0.25 * budget:
        raise ClearheadError(f"--parameters {budget} is not possible: the nearest Lorsa of this layer has {nearest:,}")
