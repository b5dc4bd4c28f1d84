"""Models whose attention exact copies replace, and the circuit of the planted induction model."""

import dataclasses
from functools import cache

import torch

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.replacement.global_graph import trace_global
from clearhead.dictionaries.init import from_attention
from clearhead.dictionaries.lorsa import Lorsa
from tests.circuits.induction import induction_model

EDGES = 400


def copies(model, k=None, **changes):
    """Every attention layer's exact copy, with `k` heads kept."""
    for layer in range(model.n_layers):
        exact = from_attention(model.weights(layer), model.geometry(layer))
        place = {
            "model": model.name,
            "layer": layer,
            "input_site": f"attn_in.{layer}",
            "output_site": f"attn_out.{layer}",
        }
        config = dataclasses.replace(exact.config, k=k or exact.config.k, **changes)
        lorsa = Lorsa(config, place).to(exact.W_V.dtype)
        lorsa.load_state_dict(exact.state_dict(), strict=False)
        yield lorsa


@cache
def prompts():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(40):
        x, a, b, y, z = (3 + torch.randperm(8, generator=generator)[:5]).tolist()
        rows.append([1, x, a, b, y, z, a, b])
    return torch.tensor(rows)


@cache
def induction():
    model = induction_model()
    return trace_global(model, Dictionaries(model, copies(model)), prompts(), edges=EDGES, counted_from=7)
