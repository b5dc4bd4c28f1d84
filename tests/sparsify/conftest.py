"""A short post-training of the two-layer model on a folder of invented books."""

import dataclasses

import pytest
import torch

from clearhead.config import Sparsify
from tests.training.conftest import TINY, books

__all__ = ["books"]


@pytest.fixture
def short(books, tmp_path) -> Sparsify:
    """Twelve steps of 128 tokens; gates move fast enough to close edges in them."""
    torch.set_num_threads(1)
    return dataclasses.replace(
        Sparsify(),
        model=str(TINY),
        text=str(books),
        context=32,
        tokens=12 * 128,
        batch_tokens=128,
        tolerance=0.5,
        lr=1e-3,
        gate_lr_factor=300.0,
        device="cpu",
        out=tmp_path / "run",
    )
