import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.model.gates import install
from clearhead.sparsify.evaluate_control import evaluate_control
from clearhead.sparsify.measures import measure_losses
from tests.training.conftest import TINY


@pytest.fixture(scope="module")
def models():
    model, base = (Model.load(str(TINY), self_test=False) for _ in range(2))
    install(model, bias=-100.0)  # hard gates would all be closed
    return model, base


TOKENS = torch.randint(5, 1000, (4, 32), generator=torch.Generator().manual_seed(0))


def test_the_dense_control_is_measured_with_all_gates_open(models):
    found = evaluate_control(models[0], models[1], TOKENS, None, prompts=4)
    assert found["ce"]["control"] == pytest.approx(found["ce"]["base"], rel=1e-5)
    assert found["edges"] == {"share": 1.0, "per_query": 16.5}
    assert found["induction"]["control"] == pytest.approx(found["induction"]["base"], rel=1e-3)
    assert found["tasks"]["copy"]["control"] == pytest.approx(found["tasks"]["copy"]["base"], rel=1e-3)
    assert "refused" in found["tasks"]["ioi"]


def test_random_edges_have_the_rates_of_their_heads(models):
    model, base = models
    rates = {0: torch.tensor([1.0, 0.5, 0.0, 0.5]), 1: torch.tensor([0.0, 0.0, 0.0, 0.0])}
    found = evaluate_control(model, None, TOKENS, rates, prompts=4)
    assert found["edges"]["share"] == 0.25 and found["ce"]["base"] is None and found["tasks"]["copy"]["base"] is None
    gates = model.gates
    assert gates is not None
    losses, _ = measure_losses(model, TOKENS, lambda _: gates.random(rates))
    assert found["ce"]["control"] == pytest.approx(float(losses.mean()), rel=1e-6)
    every = {layer: torch.ones(4) for layer in (0, 1)}
    dense = evaluate_control(model, base, TOKENS, every, prompts=4)
    assert dense["ce"]["control"] == pytest.approx(dense["ce"]["base"], rel=1e-5)
    assert abs(found["ce"]["control"] - dense["ce"]["base"]) > 0.01


def test_a_dense_model_is_no_control(models):
    with pytest.raises(ClearheadError, match="has no edge gates, so it is no control"):
        evaluate_control(models[1], None, TOKENS, None)
