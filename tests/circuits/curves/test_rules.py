"""Relevance rules: values stay, and what is linear conserves the logit difference."""

import pytest
import torch

from clearhead.circuits.curves.rules import constant_patterns, linearised
from clearhead.data.tasks import logit_difference
from clearhead.errors import ClearheadError
from clearhead.model import Model
from tests.circuits.patching.test_nodes import random_rows, tiny
from tests.model.tiny_configs import build


def without_biases(name: str) -> Model:
    """A model whose layers are products alone, so that held factors leave a linear map of the embeddings."""
    hf = build(name).double()
    with torch.no_grad():
        for key, parameter in hf.named_parameters():
            if key.endswith("bias"):
                parameter.zero_()
    return Model(hf)


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "gpt_neox", "olmo2", "opt"])
def test_relevance_is_conserved_from_the_logits_to_the_embeddings(name: str):
    model, rows = without_biases(name), random_rows()
    sites = ["resid_pre.0", "resid_pre.1", "logits"]
    plain = model.run(rows.clean, path="eager", read=sites, grad=True)
    with linearised(model):
        run = model.run(rows.clean, edit=constant_patterns(model), read=sites, grad=True)
    # RMSNorm computes in float32 inside transformers, LayerNorm in float64
    tolerance = 1e-9 if name in ("gpt2", "gpt_neox", "opt") else 1e-4
    torch.testing.assert_close(run.logits, plain.logits, rtol=tolerance, atol=tolerance)
    errors = []
    for one in (run, plain):
        difference = logit_difference(one.logits[:, -1], rows)
        gradients = torch.autograd.grad(difference.sum(), [one[site] for site in sites[:2]])
        found = [(g * one[site]).sum((1, 2)) for g, site in zip(gradients, sites, strict=False)]
        errors.append(max(float((sum_of - difference).detach().abs().max()) for sum_of in found))
    assert errors[0] < 100 * tolerance
    assert errors[1] > 0.1


def test_nothing_stays_hooked_and_models_without_rules_are_refused():
    model, rows = tiny("llama"), random_rows()
    before = sum(len(module._forward_hooks) for module in model.hf.modules())
    with pytest.raises(ArithmeticError), linearised(model):
        model.run(rows.clean)
        raise ArithmeticError
    assert sum(len(module._forward_hooks) for module in model.hf.modules()) == before
    with (
        pytest.raises(ClearheadError, match="layer 0 of this mixtral model has 1, or experts: rank with atp"),
        linearised(Model(build("mixtral"))),
    ):
        pass
