"""Relevance rules: a forward with the model's own values whose gradient is that of a linearised model.

    pattern     constant: `constant_patterns`, an edit of every pattern
    norms       γ ⊙ (C x) · s + β with the scale s constant (model/norms.py)
    gated MLP   act(gate) ⊙ up with act(gate) constant
    plain MLP   act(x) = x · r with the ratio r = act(x)/x constant

so that relevance flows through each product by the factor that carries the signal (AttnLRP, arXiv 2402.05602; RelP,
arXiv 2508.21258). Values do not change: each module returns its detached output plus (y − y.detach()) of the rule.

Not for models whose MLP has no single activation module (mixtures of experts, activations called as functions), nor for
norms that are neither LayerNorm nor RMSNorm: those raise.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.families import find_module
from clearhead.model.norms import Norm, read_norm
from clearhead.model.run import Edit

_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


def constant_patterns(model: Model) -> dict[str, Edit]:
    """Edits that keep every pattern as it is and let no gradient through."""
    return {f"pattern.{layer}": lambda pattern, _: pattern.detach() for layer in model.attention_layers}


@contextmanager
def linearised(model: Model) -> Iterator[None]:
    """Makes norms and MLPs follow the rules, for the time of the block.

    Raises `ClearheadError` with the layer and the reason for a model that the rules do not fit.
    """
    handles: list[RemovableHandle] = []
    try:
        for module, norm in _norms(model):
            handles.append(module.register_forward_hook(_norm_rule(norm)))
        for activation, gated in _activations(model):
            handles.append(activation.register_forward_hook(_constant if gated else _ratio))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _norms(model: Model) -> list[tuple[nn.Module, Norm]]:
    family = model.family
    paths = (family.attention_norm, family.mlp_norm, family.post_attention_norm, family.post_mlp_norm)
    modules = [
        found
        for layer in model.places.layers
        for path in paths
        if path is not None and (found := find_module(layer, path)) is not None
    ]
    final = find_module(model.hf, family.final_norm)
    return [(module, read_norm(module, model.d_model)) for module in [*modules, *([final] if final else [])]]


def _norm_rule(norm: Norm) -> Callable[..., Tensor]:
    def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = args[0]
        y = norm.centre(x) * norm.frozen_scale(x).detach()
        if norm.gain is not None:
            y = y * norm.gain.detach()
        return _with_gradient_of(output, y)

    return hook


def _activations(model: Model) -> list[tuple[nn.Module, bool]]:
    """Each layer's activation module, and whether its output multiplies another stream (seen in a run)."""
    found: list[nn.Module] = []
    handles: list[RemovableHandle] = []
    outputs: dict[nn.Module, Tensor] = {}
    inputs: list[list[Tensor]] = []
    for number, layer in enumerate(model.places.layers):
        attention = model.places.attentions[number]
        inside = set() if attention is None else set(attention.modules())
        outside = [module for module in layer.modules() if module not in inside]
        acts = [module for module in outside if type(module).__module__ in _ACTIVATIONS]
        if len(acts) != 1 or any("expert" in name.lower() for name, _ in layer.named_modules()):
            raise ClearheadError(
                f"relevance rules need one activation module per MLP; layer {number} of this {model.family.name} model"
                f" has {len(acts)}, or experts: rank with atp, ig or exact"
            )
        seen: list[Tensor] = []
        found.append(acts[0])
        inputs.append(seen)
        linears = [module for module in outside if isinstance(module, nn.Linear | Conv1D)]
        handles += [module.register_forward_hook(_noting_input(seen)) for module in linears]
        handles.append(acts[0].register_forward_hook(_noting_output(outputs)))
    try:
        # several tokens: that of padding may have an embedding of zeros, and all products of it are equal
        model.run(torch.arange(min(8, model.d_vocab))[None], read=["logits"])
    finally:
        for handle in handles:
            handle.remove()
    return [
        (act, not any(torch.equal(outputs[act], x) for x in seen if x.shape == outputs[act].shape))
        for act, seen in zip(found, inputs, strict=True)
    ]


def _noting_input(seen: list[Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Tensor, ...], _output: Any) -> None:
        seen.append(args[0])

    return hook


def _noting_output(outputs: dict[nn.Module, Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, _args: Any, output: Tensor) -> None:
        outputs[module] = output

    return hook


def _constant(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output.detach()


def _ratio(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    x = args[0]
    ratio = torch.where(x == 0, 0, output / torch.where(x == 0, 1, x)).detach()
    return _with_gradient_of(output, x * ratio)


def _with_gradient_of(value: Tensor, y: Tensor) -> Tensor:
    """The value, with the gradient of y."""
    return value.detach() + (y - y.detach())
