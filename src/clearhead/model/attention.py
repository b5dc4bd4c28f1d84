"""The one hook on transformers' attention: q, k, v, scores, sink, pattern and z, bit-equal to what HF computes.

`attend` is registered in transformers' attention interface, and HF's own mask functions under the same names in the
mask interface (without the second, the causal mask is silently lost). It calls what the family would have called:

- path sdpa: the sdpa function of the family's module, with q, k, v and z shown to the recorder;
- path eager: the family's own `eager_attention_forward`, under a tap that intercepts its single softmax:
  scores are its input, pattern its output. A column beyond the keys is the attention sink.

Nothing is re-implemented, so nothing can drift. Families that compute attention without the interface run under the
same tap around the whole forward (`tap_forward`). In a gated model (gates.py) path sdpa is the gated operation, and on
path eager the tap closes edges: the pattern is then what multiplies the values, not what the softmax returned.

Not here: projections (places.py).
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from clearhead.errors import ClearheadError
from clearhead.model.gates import EdgeGate, attend_gated, gate_of
from clearhead.model.run import Path, Recorder, current_recorder
from clearhead.model.sites import Site

NAMES: dict[Path, str] = {"sdpa": "clearhead_fused", "eager": "clearhead_tapped"}
"""The names of `attend` in transformers' interfaces. Neither holds "sdpa", by which transformers would recognise it."""

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """HF's attention with its tensors shown to the current recorder.

    query [b, h, q, dh], key [b, g, k, dh], value [b, g, k, dv]; returns z [b, q, h, dv] and the family's second result.
    """
    recorder = current_recorder()
    if recorder is None:
        raise ClearheadError("clearhead's attention was called outside of Model.run")
    layer = recorder.layer_of[module]
    query = recorder.visit(Site("q", layer), query)
    key = recorder.visit(Site("k", layer), key)
    value = recorder.visit(Site("v", layer), value)
    function = attention_function(module, recorder.run.path)
    gate = gate_of(module) if recorder.run.path == "eager" else None
    if gate is not None or recorder.wants(*_softmax_sites(layer)):
        with SoftmaxTap(recorder, layer, key.shape[2], gate):
            z, second = function(module, query, key, value, attention_mask, **options)
    else:
        z, second = function(module, query, key, value, attention_mask, **options)
    return recorder.visit(Site("z", layer), z), second


AttentionInterface.register(NAMES["sdpa"], attend)
AttentionMaskInterface.register(NAMES["sdpa"], sdpa_mask)
AttentionInterface.register(NAMES["eager"], attend)
AttentionMaskInterface.register(NAMES["eager"], eager_mask)


def attention_function(module: nn.Module, path: Path) -> Any:
    """The function that the module's own forward would call on `path`, from the namespace of that forward.

    Raises `ClearheadError` where the module's source has no such function.
    """
    namespace = inspect.unwrap(type(module).forward).__globals__
    if path == "sdpa":
        if gate_of(module) is not None:
            return attend_gated
        return namespace["ALL_ATTENTION_FUNCTIONS"]["sdpa"]
    if "eager_attention_forward" not in namespace:
        raise ClearheadError(
            f"{type(module).__name__} has no eager_attention_forward, so its scores and pattern cannot be read"
        )
    return namespace["eager_attention_forward"]


class SoftmaxTap(TorchFunctionMode):
    """Shows the recorder what enters and leaves the softmax of one attention layer, and puts back what it returns."""

    def __init__(self, recorder: Recorder, layer: int | None, keys: int, gate: EdgeGate | None = None):
        super().__init__()
        self.recorder = recorder
        self.layer = layer
        self.keys = keys
        self.gate = gate

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        """Calls `func`; a softmax over the keys of the watched layer goes through the recorder."""
        kwargs = kwargs or {}
        if self.layer is None or func not in _SOFTMAX or current_recorder() is not self.recorder:
            return func(*args, **kwargs)
        scores = self._show_scores(args[0], self.layer)
        pattern = func(scores, *args[1:], **kwargs)
        if self.gate is not None:
            pattern = self.gate.close(pattern, scores)
        return self._show_pattern(pattern, self.layer)

    def _show_scores(self, full: Tensor, layer: int) -> Tensor:
        """Scores [b, h, q, k] and sink [b, h, q] out of the softmax's input, and the input to go on with."""
        scores_site, sink_site, _ = _softmax_sites(layer)
        has_sink = full.shape[-1] == self.keys + 1
        if not has_sink:
            return self.recorder.visit(scores_site, full)
        scores = self.recorder.visit(scores_site, full[..., :-1])
        sink = self.recorder.visit(sink_site, full[..., -1])
        if self.recorder.rewrites(scores_site, sink_site):
            return torch.cat([scores, sink[..., None]], dim=-1)
        return full

    def _show_pattern(self, full: Tensor, layer: int) -> Tensor:
        """Pattern [b, h, q, k] out of the softmax's output, and the output to go on with."""
        pattern_site = _softmax_sites(layer)[2]
        if full.shape[-1] == self.keys:
            return self.recorder.visit(pattern_site, full)
        pattern = self.recorder.visit(pattern_site, full[..., :-1])
        return torch.cat([pattern, full[..., -1:]], dim=-1) if self.recorder.rewrites(pattern_site) else full


@contextmanager
def tap_forward(recorder: Recorder) -> Iterator[None]:
    """Taps the softmax of every attention module in a forward that does not use the attention interface."""
    tap = SoftmaxTap(recorder, layer=None, keys=recorder.run.tokens.shape[1])

    def enter(module: nn.Module, _args: Any) -> None:
        if current_recorder() is recorder:
            tap.layer = recorder.layer_of[module]

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        if current_recorder() is recorder:
            tap.layer = None

    handles = []
    try:
        for module in recorder.layer_of:
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        with tap:
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Runs every part of the model with attention implementation `name`; puts back what each part had."""
    configs: dict[int, PreTrainedConfig] = {
        id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)
    }
    # the public setter also changes parts of the config that the model does not use, which could not be put back
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, value in before:
            config._attn_implementation_internal = value


def _softmax_sites(layer: int) -> tuple[Site, Site, Site]:
    return Site("scores", layer), Site("sink", layer), Site("pattern", layer)
