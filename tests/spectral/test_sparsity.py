"""S, N_recon, cancellation and relative contributions, against closed forms and loops."""

import math

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.spectral.sparsity import (
    absolute_sparsity,
    cancellation,
    largest_rank,
    n_recon,
    relative_key,
    relative_sparsity,
    rolls_tovee,
    visible_count,
    visible_mean,
)

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 64])
def test_sparsity_of_one_term_and_of_equal_terms(n):
    assert torch.isclose(rolls_tovee(3.0 * torch.eye(n)[0]), torch.tensor(1 / n))
    assert torch.isclose(rolls_tovee(-2.0 * torch.ones(n)), torch.tensor(1.0))


def test_sparsity_of_gaussians_and_of_their_products():
    assert abs(float(rolls_tovee(normal(1_000_000))) - 2 / math.pi) < 2e-3
    assert abs(float(rolls_tovee(normal(1_000_000) * normal(1_000_000))) - (2 / math.pi) ** 2) < 4e-3


def test_no_statistic_of_zeros_is_nan():
    zero = torch.zeros(3, 8)
    assert rolls_tovee(zero).tolist() == [1, 1, 1]
    assert cancellation(zero).tolist() == [1, 1, 1]
    assert n_recon(zero).tolist() == [0, 0, 0]
    assert torch.isfinite(largest_rank(zero)).all() and torch.isfinite(largest_rank(zero[:, :1])).all()
    opposite = torch.tensor([1.0, -1.0])
    assert torch.isfinite(cancellation(opposite)) and cancellation(opposite) > 1e6 and n_recon(opposite) == 0


@pytest.mark.parametrize(
    ("terms", "count"),
    [
        ([5.0, 0, 0], 1),
        ([2.0, 1.0, 1.0], 3),
        ([3.0, -1.0, 1.0], 1),  # the total, 3, is reached by the first term; what follows cancels
        ([-4.0, 1.0, -1.0], 1),
        ([1.0, 1.0, -1.9], 1),
        ([0.5, 0.5, 0.5, 0.5], 4),
    ],
)
def test_terms_needed_to_reach_the_total(terms, count):
    assert int(n_recon(torch.tensor(terms, dtype=torch.float64))) == count


def test_terms_needed_against_a_loop():
    for c in normal(200, 16):
        ordered = sorted((c * c.sum().sign()).tolist(), reverse=True)
        total, reached, count = float(c.sum().abs()), 0.0, 0
        while reached / total < 1 - 5e-6:
            reached += ordered[count]
            count += 1
        assert int(n_recon(c)) == count


def test_cancellation_is_one_for_terms_of_one_sign_and_known_otherwise():
    assert cancellation(torch.tensor([1.0, 2.0, 3.0])) == 1
    assert torch.isclose(cancellation(torch.tensor([3.0, -1.0])), torch.tensor(2.0))


def test_largest_rank_counts_from_the_largest_singular_value():
    assert largest_rank(torch.tensor([[9.0, 0, 1], [0, 0, -9.0]])).tolist() == [0, 1]


@pytest.mark.parametrize("window", [None, 1, 3, 40])
def test_visible_mean_is_the_mean_of_the_visible_rows(window):
    B = normal(2, 9, 4)
    for i in range(9):
        start = 0 if window is None else max(0, i + 1 - window)
        assert torch.allclose(visible_mean(B, window)[:, i], B[:, start : i + 1].mean(1), rtol=0, atol=1e-14)
        assert int(visible_count(torch.tensor(i), window)) == i + 1 - start


@pytest.mark.parametrize("window", [None, 4])
def test_relative_contributions_sum_to_the_relative_logit_and_ignore_what_all_keys_share(window):
    A, B = normal(7, 5), normal(7, 5)
    logits = A @ B.T
    for i in range(1, 7):
        start = 0 if window is None else max(0, i + 1 - window)
        keys = torch.arange(start, i + 1)
        query, count = torch.full_like(keys, i), visible_count(torch.full_like(keys, i), window)
        c = A[query] * relative_key(B[keys], visible_mean(B, window)[query], count)
        seen = logits[i, keys]
        others = (seen.sum() - seen) / (len(keys) - 1)
        assert torch.allclose(c.sum(-1), seen - others, rtol=0, atol=1e-13)
        assert abs(float(c.sum())) < 1e-12
        moved = B + normal(1, 5)
        again = A[query] * relative_key(moved[keys], visible_mean(moved, window)[query], count)
        assert torch.allclose(again, c, rtol=0, atol=1e-12)


def test_a_single_visible_key_has_no_relative_logit():
    with pytest.raises(ClearheadError, match="single key"):
        relative_key(normal(1, 3), normal(1, 3), torch.tensor([1]))


def test_sparsity_of_all_pairs_by_products_equals_the_loop():
    A, B = normal(3, 6, 8), normal(3, 6, 8)
    expected = rolls_tovee(A[:, :, None] * B[:, None])
    assert (absolute_sparsity(A, B) - expected).abs().max() < 1e-14


@pytest.mark.parametrize("window", [None, 3])
def test_streamed_relative_sparsity_equals_the_loop(window, monkeypatch):
    monkeypatch.setattr("clearhead.spectral.sparsity.BLOCK", 100)  # several blocks, ragged at the end
    A, B = normal(2, 7, 8), normal(2, 7, 8)
    found, mean = relative_sparsity(A, B, window), visible_mean(B, window)
    for i in range(7):
        for j in range(7):
            seen = i > 0 and j <= i and (window is None or j > i - window)
            expected = rolls_tovee(A[:, i] * (B[:, j] - mean[:, i])) if seen else torch.zeros(2)
            assert torch.allclose(found[:, i, j], expected.double(), rtol=0, atol=1e-14)
