"""Prompts of tiny models opened with dictionaries of random weights, for the tests of tracing."""

from functools import cache

import pytest
import torch
from torch import nn

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.tracing.sources import Opened, open_prompt
from clearhead.dictionaries.clt import Clt, CltConfig
from clearhead.dictionaries.load import Dictionary
from clearhead.dictionaries.lorsa import Lorsa, LorsaConfig
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.model import Model
from clearhead.spectral.writes import Parts
from tests.model import tiny_configs
from tests.model.tiny_configs import LLAMA, VOCABULARY, build

TOKENS = (torch.arange(5, 17) * 7 % VOCABULARY)[None]
LAST = TOKENS.shape[1] - 1
KINDS = ("none", "transcoder", "skip", "jumprelu", "clt", "lorsa", "all")
CONFIGURED = {"granite_scaled": LLAMA | {"model_type": "granite", "residual_multiplier": 0.3}}


def model_of(family: str, dtype: torch.dtype = torch.float64) -> Model:
    """The tiny model of a family."""
    return parts_of(family, dtype).model


def parts_of(family: str, dtype: torch.dtype = torch.float64) -> Parts:
    """Its parts."""
    return _parts(family, dtype)


@cache
def _parts(family: str, dtype: torch.dtype) -> Parts:
    with pytest.MonkeyPatch.context() as patch:
        if family in CONFIGURED:
            patch.setitem(tiny_configs.CONFIGS, family, CONFIGURED[family])
        return Parts(Model(build(family).to(dtype), self_test=False))


def provenance(model: Model, layer: int, module: str) -> dict:
    """Where a dictionary of a layer's `attn` or `mlp` belongs."""
    sites = {"input_site": f"{module}_in.{layer}", "output_site": f"{module}_out.{layer}"}
    return {"model": model.name, "layer": layer} | sites


def random_weights(module: nn.Module, seed: int = 0) -> nn.Module:
    """Fill all parameters with noise."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.eval()


def transcoder(model: Model, layer: int, *, skip: bool = False, activation: str = "topk") -> Transcoder:
    """48 random features for an MLP."""
    config = TranscoderConfig(d_in=32, d_out=32, n_features=48, k=3, skip=skip, activation=activation)
    return random_weights(Transcoder(config, provenance(model, layer, "mlp")), layer)


def lorsa(model: Model, layer: int) -> Lorsa:
    """32 random heads in 4 groups for an attention layer."""
    config = LorsaConfig(d_model=32, n_heads=32, n_groups=4, d_qk=8, k=3)
    return random_weights(Lorsa(config, provenance(model, layer, "attn")), layer)


def dictionaries(model: Model, kind: str) -> list[Dictionary]:
    """Those of a kind in KINDS."""
    match kind:
        case "transcoder" | "jumprelu":
            activation = "jumprelu" if kind == "jumprelu" else "topk"
            return [transcoder(model, layer, activation=activation) for layer in range(2)]
        case "skip":
            return [transcoder(model, 1, skip=True)]
        case "clt":
            config = CltConfig(d_model=32, n_layers=2, n_features=48, k=3)
            sites = {"input_site": "mlp_in.*", "output_site": "mlp_out.*"}
            return [random_weights(Clt(config, {"model": model.name} | sites))]
        case "lorsa":
            return [lorsa(model, 1)]
        case "all":
            found = [transcoder(model, layer) for layer in range(2)]
            return [*found, *(lorsa(model, layer) for layer in range(2))]
    return []


@cache
def opened(family: str = "llama", kind: str = "all", dtype: torch.dtype = torch.float64) -> Opened:
    """A prompt of twelve tokens."""
    model = model_of(family, dtype)
    return open_prompt(parts_of(family, dtype), TOKENS, Dictionaries(model, dictionaries(model, kind)))
