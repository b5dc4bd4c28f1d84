"""The factored decomposition against the dense one, and how it behaves where the dense one has no answer."""

import pytest
import torch

from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.spectral import factored
from clearhead.spectral.factored import Factored, composition

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def orthonormal(n, r):
    return torch.linalg.qr(normal(n, r))[0]


def test_equals_the_dense_decomposition():
    product = Factored(normal(3, 20, 6), normal(3, 15, 6))
    svd, dense = product.svd(), torch.linalg.svdvals(product.dense())
    assert (svd.S - dense[:, :6]).abs().max() < 1e-12
    assert ((svd.U * svd.S[:, None]) @ svd.V.mT - product.dense()).abs().max() < 1e-12
    assert svd.error.max() < 1e-12 and svd.driver == "gesdd"
    assert svd.rank.tolist() == [6, 6, 6] and not svd.degenerate.any()
    assert (product.norm() - torch.linalg.matrix_norm(product.dense())).abs().max() < 1e-12


def test_signs_are_canonical():
    A, B = normal(20, 6), normal(15, 6)
    one, other = Factored(A, B).svd(), Factored(-A, -B).svd()
    assert torch.allclose(one.U, other.U) and torch.allclose(one.V, other.V)
    assert (one.U.gather(0, one.U.abs().argmax(0, keepdim=True)) > 0).all()


def test_a_planted_product_of_rank_one():
    x, y = normal(12), normal(12)
    mix = normal(4, 4)
    A = torch.cat([3.0 * x[:, None], torch.zeros(12, 3)], 1) @ mix
    svd = Factored(A, torch.cat([y[:, None], normal(12, 3)], 1) @ torch.linalg.inv(mix).T).svd()
    assert torch.isclose(svd.S[0], 3 * x.norm() * y.norm())
    assert torch.isclose((svd.U[:, 0] @ x) * (svd.V[:, 0] @ y), x.norm() * y.norm())
    assert int(svd.rank) == 1 and svd.degenerate.tolist() == [False, True, True, True]


def test_orthonormal_pairs_come_out_in_order():
    x, y, size = orthonormal(12, 4), orthonormal(12, 4), torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    svd = Factored(x * size, y).svd()
    assert torch.allclose(svd.S, size)
    assert torch.allclose((svd.U * x).sum(0) * (svd.V * y).sum(0), torch.ones(4, dtype=torch.float64))


def test_zero_and_rank_deficient_products():
    A = normal(2, 12, 4)
    A[0] = 0
    A[1, :, 2:] = A[1, :, :2]
    svd = Factored(A, normal(2, 12, 4)).svd()
    assert svd.rank.tolist() == [0, 2]
    assert svd.degenerate[0].all() and svd.degenerate[1].tolist() == [False, False, True, True]
    for part in (svd.U, svd.S, svd.V, svd.error):
        assert torch.isfinite(part).all()
    assert svd.error.max() < 1e-12
    eye = torch.eye(4, dtype=torch.float64)
    assert (svd.U.mT @ svd.U - eye).abs().max() < 1e-12


def test_degenerate_singular_values_are_flagged_and_only_their_span_is_determined():
    x, y = orthonormal(12, 3), orthonormal(12, 3)
    size = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)
    svd = Factored(x * size, y).svd()
    turn = orthonormal(2, 2)
    other = Factored(torch.cat([x[:, :1] * 2, x[:, 1:] @ turn], 1), torch.cat([y[:, :1], y[:, 1:] @ turn], 1)).svd()
    assert svd.degenerate.tolist() == [False, True, True]
    span, again = svd.U[:, 1:] @ svd.U[:, 1:].T, other.U[:, 1:] @ other.U[:, 1:].T
    assert (span - again).abs().max() < 1e-12


def test_a_driver_that_fails_silently_is_noticed_and_another_takes_over(monkeypatch):
    product = Factored(normal(3, 20, 6), normal(3, 15, 6))
    right = product.svd()
    gesdd = torch.linalg.svd

    def broken(M):
        u, S, vh = gesdd(M)
        u = u.clone()
        u[1, :, 0] += 0.05  # what was seen in the wild: vectors off by a few percent, no error
        return u, S, vh

    monkeypatch.setattr(factored.torch.linalg, "svd", broken)
    svd = product.svd()
    assert svd.driver == "gesvd" and svd.error.max() < 1e-12
    assert torch.allclose(svd.U, right.U) and torch.allclose(svd.V, right.V)


def test_a_matrix_that_no_driver_reproduces_is_refused(monkeypatch):
    monkeypatch.setattr(factored, "_gesvd", lambda M: (M * 0, M[:, 0] * 0 + 1, M * 0))
    monkeypatch.setattr(factored.torch.linalg, "svd", lambda M: (M * 0, M[..., 0] * 0 + 1, M * 0))
    with pytest.raises(ClearheadError, match="did not converge"):
        Factored(normal(20, 6), normal(15, 6)).svd()


def test_the_error_of_wrong_vectors_is_seen():
    product = Factored(normal(20, 6), normal(15, 6))
    svd = product.svd()
    assert product.error_of(svd.U, svd.S, svd.V) < 1e-12
    assert product.error_of(svd.U, svd.S * 1.1, svd.V) > 0.05
    assert product.error_of(orthonormal(20, 6), svd.S, svd.V) > 0.1


def test_composition_is_that_of_the_dense_matrices():
    a, b = Factored(normal(2, 20, 4), normal(2, 15, 4)), Factored(normal(2, 15, 6), normal(2, 20, 6))
    dense = a.dense() @ b.dense()
    expected = (
        torch.linalg.matrix_norm(dense) / torch.linalg.matrix_norm(a.dense()) / torch.linalg.matrix_norm(b.dense())
    )
    assert torch.allclose(composition(a, b), expected)
    assert torch.allclose(a.then(b).dense(), dense) and torch.allclose(a.T.dense(), a.dense().mT)
    assert composition(Factored(a.A * 0, a.B), b).tolist() == [0, 0]


def test_a_random_rotation_between_two_products_composes_to_one_over_root_d():
    d = 24
    a, b = Factored(normal(d, 5), normal(d, 5)), Factored(normal(d, 3) * torch.tensor([9, 1, 1]), normal(d, 3))
    scores = torch.stack([composition(Factored(a.A, orthonormal(d, d) @ a.B), b) for _ in range(400)])
    assert float(scores.square().mean().sqrt()) == pytest.approx(d**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Factored(normal(5, 2), normal(5, 3)), "must agree"),
        (lambda: Factored(normal(5, 2), normal(6, 2)).then(Factored(normal(5, 2), normal(5, 2))), "cannot multiply"),
        (lambda: Factored(normal(2, 4), normal(9, 4)).svd(), "fewer rows than columns"),
    ],
)
def test_factors_that_do_not_fit(make, message):
    with pytest.raises(ClearheadError, match=message):
        make()


def test_nan_is_refused():
    A = normal(5, 2)
    A[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="NaN"):
        Factored(A, normal(5, 2)).svd()
