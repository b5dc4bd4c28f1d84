from pathlib import Path

import pytest
import torch

from clearhead.dictionaries.lorsa import Lorsa, LorsaConfig
from clearhead.model.access import Model
from clearhead.model.rope import RopeSpec

TINY = Path(__file__).parents[1] / "assets" / "tiny-gpt2-2L"


def make_lorsa(seed=0, dtype=torch.float32, **changes):
    settings = {"d_model": 16, "n_heads": 24, "n_groups": 4, "d_qk": 8, "k": 5, "scale": 8**-0.5, **changes}
    lorsa = Lorsa(LorsaConfig(**settings), {"model": str(TINY), "layer": 1}).to(dtype).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lorsa.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.5)
        if lorsa.config.unit_norm:
            lorsa.normalise_decoder()
    return lorsa


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", name="make_lorsa")
def lorsa_factory():
    return make_lorsa


@pytest.fixture(scope="session")
def lorsa():
    return make_lorsa()


@pytest.fixture(scope="session")
def rope():
    return RopeSpec(inv_freq=torch.tensor([1.0, 0.1]), scaling=1.0, interleaved=False, rotary_dim=4).to_dict()


@pytest.fixture(scope="session")
def model():
    return Model.load(str(TINY))
