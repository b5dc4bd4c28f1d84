"""Largest entries and shares of a product, compared with the product itself."""

import pytest
import torch

from clearhead.circuits.tracing import largest
from clearhead.circuits.tracing.largest import count_carriers, count_for_share, largest_entries
from clearhead.errors import ClearheadError


@pytest.fixture
def factors(monkeypatch):
    monkeypatch.setattr(largest, "CHUNK", 300)  # several blocks
    U, V = torch.randn(2, 40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    U[::3], V[5:9] = 0, 0
    return U * torch.logspace(-6, 0, 40, dtype=torch.float64)[:, None], V


def test_the_largest_entries_are_those_of_the_product(factors):
    product = factors[0] @ factors[1].T
    found = largest_entries(*factors, 25)
    expected = product.abs().flatten().topk(25).values
    assert torch.allclose(torch.tensor([abs(weight) for *_, weight in found], dtype=torch.float64), expected)
    assert all(product[i, j] == pytest.approx(weight) for i, j, weight in found)
    assert len(largest_entries(*factors, 10**6)) == int((product != 0).sum())


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("bins", [4, 4096])
def test_counts_are_exact(factors, share, bins, monkeypatch):
    monkeypatch.setattr(largest, "BINS", bins)
    assert count_for_share(*factors, share) == count_carriers(factors[0] @ factors[1].T, share)


def test_counts_by_hand():
    weights = torch.tensor([5.0, -3.0, 1.0, 1.0, 0.0])
    assert [count_carriers(weights, share) for share in (0, 0.5, 0.51, 0.8, 0.9, 1)] == [0, 1, 2, 2, 3, 4]
    assert count_carriers(torch.zeros(3)) == count_for_share(torch.zeros(3, 2), torch.ones(4, 2), 0.9) == 0
    with pytest.raises(ClearheadError, match=r"share must lie in \[0, 1\], .* got 90"):
        count_carriers(weights, 90)
    with pytest.raises(ClearheadError, match="got -1"):
        count_for_share(torch.zeros(1, 1), torch.zeros(1, 1), -1)
