"""Overlap of errors: an error with itself, with a shuffled one, with a planted common part."""

import numpy as np
import pytest

from clearhead.analysis.fidelity.overlap import compare_errors, pearson, spearman


def overlap(a, b, seed=0):
    other = np.random.default_rng(seed).permutation(len(a))
    return compare_errors(
        (a**2).sum(1),
        (b**2).sum(1),
        (a * b).sum(1),
        (a * b[other]).sum(1),
        (b[other] ** 2).sum(1),
        np.full(len(a), 3.0),
        np.arange(len(a)) // 50,
    )


@pytest.fixture
def errors():
    random = np.random.default_rng(1)
    return random.normal(size=(2000, 12)) * random.gamma(2.0, size=(2000, 1)), random.normal(size=(2000, 12))


def test_an_error_overlaps_wholly_with_itself_and_not_with_a_shuffled_one(errors):
    same = overlap(errors[0], 3 * errors[0])
    for name in ("correlation", "rank_correlation", "relative_rank_correlation", "cosine", "pooled_cosine"):
        assert same[name] == pytest.approx(1.0)
    assert abs(same["shuffled_cosine"]) < 0.02 and abs(same["shuffled_correlation"]) < 0.06
    assert same["cosine_interval"] == pytest.approx([1.0, 1.0])


def test_unrelated_errors_have_a_cosine_of_zero_within_its_interval(errors):
    found = overlap(*errors)
    low, high = found["cosine_interval"]
    assert low < 0 < high and high - low < 0.06
    assert abs(found["correlation"]) < 0.06


def test_a_common_part_gives_the_cosine_it_was_planted_with(errors):
    a, noise = errors[0] / np.linalg.norm(errors[0], axis=1, keepdims=True), errors[1]
    noise = noise - (noise * a).sum(1, keepdims=True) * a
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    found = overlap(a, 0.6 * a + 0.8 * noise)
    assert found["cosine"] == pytest.approx(0.6) and found["pooled_cosine"] == pytest.approx(0.6)
    assert found["correlation"] is None and found["correlation_interval"] is None  # all of one length


def test_equal_values_share_their_rank():
    assert spearman(np.array([3.0, 1.0, 3.0, 2.0]), np.array([3.5, 1.0, 3.5, 2.0])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 10.0, 100.0])) == pytest.approx(1.0)
    assert pearson(np.array([1.0, 2.0]), np.array([1.0, 2.0])) is None
