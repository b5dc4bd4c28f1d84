"""A small real model, a folder of books, and the shortest useful training run."""

import dataclasses
from pathlib import Path

import pytest
import torch

from clearhead.config import TrainLorsa
from clearhead.model.access import Model

TINY = Path(__file__).parent.parent / "assets" / "tiny-gpt2-2L"
WORDS = (
    "the quiet river ran past an old mill where nobody had ground corn since the war and the owls lived".split()  # noqa: SIM905
)


@pytest.fixture(scope="session")
def books(tmp_path_factory) -> Path:
    """Twelve documents of pseudo-random sentences, one of which is held out."""
    folder = tmp_path_factory.mktemp("books")
    generator = torch.Generator().manual_seed(0)
    for number in range(12):
        picks = torch.randint(len(WORDS), (2500,), generator=generator).tolist()
        (folder / f"book-{number}.txt").write_text(" ".join(WORDS[i] for i in picks), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny() -> Model:
    """The two-layer model that the repository ships for tests."""
    return Model.load(str(TINY), self_test=False)


@pytest.fixture
def short(books, tmp_path) -> TrainLorsa:
    """Twelve steps of a 64-head Lorsa on layer 1."""
    torch.set_num_threads(1)
    return dataclasses.replace(
        TrainLorsa(),
        model=str(TINY),
        text=str(books),
        layer=1,
        context=32,
        tokens=12 * 64,
        batch_tokens=64,
        heads=256,
        groups=4,
        k=8,
        checkpoint_every=4,
        # so short a run must see dead heads too
        dead_after_tokens=128,
        aux_k=16,
        device="cpu",
        out=tmp_path / "run",
    )
