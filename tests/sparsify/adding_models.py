"""A small untrained model of the addition toy with gates that leave about half of its edges open, and a few sums."""

import torch

from clearhead.config import SparsifyToy
from clearhead.data.addition import Addition, addition
from clearhead.model.access import Model
from clearhead.model.gates import install
from clearhead.sparsify.addition import build_model

SMALL = SparsifyToy(layers=2, heads=2, width=8, dense_steps=3, steps=6)


def few_sums(n: int = 40) -> Addition:
    sums = addition("held_out")
    return Addition(sums.tokens[:n], sums.carries[:n], sums.cascades[:n])


def dense_adder(seed: int = 0) -> Model:
    """Weights far larger than at the start of a training, so that attention matters."""
    hf = build_model(SMALL, seed).eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if "ln_" not in name:
                parameter.mul_(20.0)
    return Model(hf, name="adder", self_test=False)


def sparse_adder(sink: float | None = 0.5, bias: float = 0.0) -> Model:
    """The same with gates; the last head of layer 1 opens nothing."""
    model = dense_adder()
    gates = install(model, bias=bias, sink=sink)
    values = gates.bias()
    values[1, -1] = -1e4
    gates.set_bias(values)
    return model
