import numpy as np
import pytest
import torch

from clearhead.analysis.host_modes import host_modes, mode_coefficients
from clearhead.dictionaries.init import from_attention
from clearhead.model.access import Model
from clearhead.spectral.attention_modes import head_modes
from tests.model.tiny_configs import build

LAYER = 1


@pytest.fixture(scope="module", params=["gpt2", "llama", "qwen3"])
def copied(request):
    """A model and the Lorsa whose groups are its original heads."""
    model = Model(build(request.param).double().requires_grad_(False), None, name=request.param, self_test=False)
    return model, from_attention(model.weights(LAYER), model.geometry(LAYER)).requires_grad_(False)


def test_a_copy_of_its_host_uses_each_mode_by_its_singular_value(copied):
    model, lorsa = copied
    modes = head_modes(model, LAYER, torch.float64)
    found = mode_coefficients(lorsa, model, LAYER, modes)
    for head in range(model.n_heads):
        S = modes.svd.S[head]
        torch.testing.assert_close(found[head, head], S / S.norm(), atol=1e-9, rtol=1e-6)
    assert bool((found.square().sum(-1) <= 1 + 1e-9).all())


def test_modes_are_those_of_the_head_with_the_largest_routing_share(copied):
    model, lorsa = copied
    routing = torch.full((lorsa.n_heads, model.n_heads), torch.nan)
    size = lorsa.config.pattern_size
    host = model.n_heads - 1
    routing[size * host] = 0.1
    routing[size * host, host] = 0.9  # a head of the pattern that copies the last head
    found = host_modes(lorsa, model, LAYER, routing)
    assert set(found.unit.tolist()) == {size * host}
    S = head_modes(model, LAYER, torch.float64).svd.S[host]
    expected = [m for m in range(len(S)) if S[m] / S.norm() >= 0.05][:5]
    assert sorted(found.other.tolist()) == [f"mode.{LAYER}.{host}.{m}" for m in expected]
    assert found.label.to_pylist()[0] == f"mode {found.other[0].split('.')[-1]} of head {LAYER}.{host}"
    assert np.all(np.diff(-np.abs(found.value)) >= 0)
