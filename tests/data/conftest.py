from dataclasses import replace

import pytest
import torch

from clearhead.data.text import TokenBlocks
from clearhead.model.access import Model


@pytest.fixture(scope="session")
def model():
    return Model.load("clearhead-tiny", self_test=False)


@pytest.fixture
def make_blocks():
    """Blocks of random tokens of the tiny model's vocabulary."""

    def make(n: int, context: int = 16, seed: int = 0, **changes: object) -> TokenBlocks:
        tokens = torch.randint(1, 1024, (n, context), generator=torch.Generator().manual_seed(seed))
        zeros = torch.zeros(n, dtype=torch.int64)
        blocks = TokenBlocks(tokens, zeros, zeros[:1], ["made"], "made", "train", 0, f"hash of seed {seed}, {n}")
        return replace(blocks, **changes)

    return make
