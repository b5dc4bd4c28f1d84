from collections.abc import Iterator
from functools import cache

import pytest
import torch

from clearhead.model import Model
from tests.model.tiny_configs import VOCABULARY, build

WRITABLE = [
    "embed",
    *(
        f"{site}.0"
        for site in (
            "resid_pre",
            "attn_in",
            "q_pre",
            "k_pre",
            "q",
            "k",
            "v",
            "scores",
            "pattern",
            "z",
            "head_out",
            "attn_out",
            "resid_mid",
            "mlp_in",
            "mlp_out",
            "resid_post",
        )
    ),
    "logits",
]
"""Sites of a sequential block without sinks, in layer 0 where they have layers."""


@cache
def tiny_model(name: str) -> Model:
    """The access to the tiny model of family `name`; shared, because a run leaves it as it was."""
    return Model(build(name, attn="eager"))


@cache
def tiny_tokens() -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def smollm2() -> Model:
    return Model.load("smollm2")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Bitwise comparisons of two forwards hold for any number of threads, but tests share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
