"""Low-rank adapters (LoRA, by peft) put into a model in place: the base stays within reach as the model's own teacher.

    W' = W + (α/r) B A        A [r, in] random, B [out, r] zero at first, α = 2r

Modules keep their paths, so sites and gates find them. `without_adapters` gives the base for the time of a `with`;
`merge_adapters` ends the story: the weights are W', the model is a plain one again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from clearhead.errors import ClearheadError


def add_adapters(hf: PreTrainedModel, rank: int, seed: int) -> list[nn.Parameter]:
    """Puts an adapter of this rank on every projection of every layer, freezes all else; returns their parameters.

    The draw of A is a function of the seed; this process's random state is kept. Raises `ClearheadError` where the
    model has no linear projections in its layers.
    """
    head = hf.get_output_embeddings()
    names = [name for name, part in hf.named_modules() if isinstance(part, (nn.Linear, Conv1D)) and part is not head]
    if not names:
        raise ClearheadError(f"{type(hf).__name__} has no linear projections to put adapters on; leave out --lora")
    transposed = any(isinstance(part, Conv1D) for part in hf.modules())
    settings = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=names, fan_in_fan_out=transposed, lora_dropout=0.0, bias="none"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, hf)
    return [parameter for name, parameter in hf.named_parameters() if ".lora_" in name]


@contextmanager
def without_adapters(hf: PreTrainedModel) -> Iterator[None]:
    """The base model, for the time of a `with`."""
    layers = _adapted(hf)
    try:
        for layer in layers:
            layer._disable_adapters = True  # the public switch also changes which parameters need gradients
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merge_adapters(hf: PreTrainedModel) -> None:
    """Adds every adapter to its weight and takes the adapters away."""
    parts = dict(hf.named_modules())
    for name, part in list(parts.items()):
        if not isinstance(part, BaseTunerLayer):
            continue
        part.merge(safe_merge=True)
        parent, _, child = name.rpartition(".")
        setattr(parts[parent], child, part.get_base_layer())


def _adapted(hf: PreTrainedModel) -> list[BaseTunerLayer]:
    return [part for part in hf.modules() if isinstance(part, BaseTunerLayer)]
