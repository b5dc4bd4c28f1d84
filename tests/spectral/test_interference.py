import pytest
import torch

from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.spectral.interference import measure_interference, random_edges


def features(n: int, d: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator) + 0.5 * torch.randn(1, d, generator=generator)


@pytest.mark.parametrize(("n", "d"), [(60, 12), (12, 12), (5, 12), (1, 4)])
def test_both_readings_are_the_norms_of_the_matrices_written_out(n, d):
    rows = features(n, d)
    X = (rows / rows.norm(dim=1, keepdim=True)).double().mT
    found = measure_interference(rows).found
    gram = torch.linalg.matrix_norm(X.mT @ X - torch.eye(n), 2)
    isotropy = torch.linalg.matrix_norm(X @ X.mT - n / d * torch.eye(d), 2)
    assert found.gram == pytest.approx(float(gram), abs=1e-6)
    assert found.isotropy == pytest.approx(float(isotropy), abs=1e-6)


def test_a_tight_frame_has_no_anisotropy_and_orthonormal_features_no_interference():
    basis = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))[0]
    found = measure_interference(basis).found
    assert found.gram == pytest.approx(0, abs=1e-5) and found.isotropy == pytest.approx(0, abs=1e-5)
    twice = measure_interference(torch.cat([basis, -basis])).found
    assert twice.isotropy == pytest.approx(0, abs=1e-5) and twice.gram == pytest.approx(1, abs=1e-5)


def test_edges_are_the_closed_forms():
    """(1 + √32)² - 1 = 43.3 for N = 24,576 and D = 768: the scale of the norms that the paper reports."""
    assert random_edges(24_576, 768).gram == pytest.approx(43.3, abs=0.05)
    assert random_edges(12_288, 768).gram == pytest.approx(24)
    assert random_edges(3_072, 768).gram == pytest.approx(8)
    assert random_edges(24_576, 768).isotropy == pytest.approx(1 + 2 * 32**0.5)


@pytest.mark.parametrize(("n", "d"), [(6144, 192), (768, 192), (192, 192), (300, 768)])
def test_a_random_dictionary_sits_at_the_edges(n, d):
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(7))
    result = measure_interference(rows)
    for name in ("gram", "isotropy"):
        found, sampled, edge = (getattr(norms, name) for norms in (result.found, result.sampled, result.edges))
        assert found == pytest.approx(edge, rel=0.12) and sampled == pytest.approx(edge, rel=0.12)


def test_a_cone_stands_out_from_a_random_dictionary():
    result = measure_interference(features(2000, 50))
    assert result.found.gram > 3 * result.sampled.gram


def test_lengths_and_number_formats_do_not_count():
    rows = features(40, 8)
    scaled = rows * torch.logspace(-6, 6, 40)[:, None]
    assert measure_interference(scaled).found == pytest.approx(measure_interference(rows).found, rel=1e-5)
    half = measure_interference(rows.bfloat16()).found
    assert half == pytest.approx(measure_interference(rows).found, rel=0.02)


def test_zero_features_are_counted_and_left_out():
    rows = features(20, 6)
    with_zeros = torch.cat([rows, torch.zeros(3, 6)])
    result = measure_interference(with_zeros)
    assert (result.n_features, result.n_zero, result.d) == (20, 3, 6)
    assert result.found == pytest.approx(measure_interference(rows).found)


def test_dictionaries_without_features_are_refused():
    for empty in (torch.zeros(4, 3), torch.zeros(0, 3)):
        with pytest.raises(ClearheadError, match="features of the dictionary are zero"):
            measure_interference(empty)
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        measure_interference(torch.full((2, 2), float("inf")))
