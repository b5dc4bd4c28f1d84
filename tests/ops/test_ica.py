import pytest
import torch
from torch.nn.functional import normalize

from clearhead.errors import ClearheadError
from clearhead.ops.ica import independent_components


def sparse(n: int, c: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Coefficients that are mostly 0, else uniform on [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(n, c, generator=generator) * (torch.rand(n, c, generator=generator) < 0.1)
    return rows.to(dtype)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixed_sparse_sources_are_recovered_up_to_order(dtype):
    sources = sparse(20_000, 6, dtype=dtype)
    mixing = torch.randn(6, 6, generator=seeded(1)).to(dtype)
    rows = sources @ mixing
    found = independent_components(rows, seeded(), iterations=100, tolerance=1e-7)
    assert found.converged and found.iterations < 100
    cosines = normalize(mixing, dim=-1) @ found.directions.T
    assert float(cosines.amax(1).min()) > 0.98  # signed: sources with a positive skew come back positive
    centred = rows - rows.mean(0)
    torch.testing.assert_close(centred @ found.filters.T @ found.directions, centred, atol=1e-4, rtol=1e-4)


def test_without_a_tolerance_all_iterations_run_and_the_result_is_the_converged_one():
    rows = sparse(5_000, 4, dtype=torch.float64) @ torch.randn(4, 4, generator=seeded(2)).double()
    short = independent_components(rows, seeded(), iterations=100, tolerance=1e-9)
    whole = independent_components(rows, seeded(), iterations=40)
    assert short.converged and not whole.converged and whole.iterations == 40
    torch.testing.assert_close(short.directions, whole.directions, atol=1e-4, rtol=0)


def test_an_iteration_that_is_cut_short_says_so():
    rows = sparse(2_000, 8) @ torch.randn(8, 8, generator=seeded(3))
    found = independent_components(rows, seeded(), iterations=1, tolerance=1e-6)
    assert not found.converged and found.iterations == 1


def test_the_same_generator_gives_the_same_components():
    rows = sparse(1_000, 5) @ torch.randn(5, 5, generator=seeded(4))
    first, second = (independent_components(rows, seeded(9), iterations=20) for _ in range(2))
    assert torch.equal(first.filters, second.filters) and torch.equal(first.directions, second.directions)


def test_empty_columns_stay_finite():
    rows = sparse(1_000, 4)
    rows[:, 2] = 0
    found = independent_components(rows, seeded(), iterations=20)
    assert bool(found.filters.isfinite().all() and found.directions.isfinite().all())


@pytest.mark.parametrize("rows", [torch.zeros(10, 3), torch.full((10, 3), 0.1), torch.full((100, 3), 1e6)])
def test_rows_that_do_not_vary_are_refused(rows):
    with pytest.raises(ClearheadError, match="rows are the same"):
        independent_components(rows, seeded(), iterations=5)


def test_a_single_row_is_refused():
    with pytest.raises(ClearheadError, match="at least two rows, got 1"):
        independent_components(torch.ones(1, 3), seeded(), iterations=5)
