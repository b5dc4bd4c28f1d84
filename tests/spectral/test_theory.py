"""The theory against brute force: least squares, random geometries, gradient descent, cross-entropy over keys."""

import math

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.spectral import theory


def unit(X):
    return X / X.norm(dim=0)


def cos(a, b):
    return float((a @ b).abs() / (a.norm() * b.norm()))


def drawn(d, n, seed, stretch=1.0):
    """Random unit features whose space is stretched along the axes, so that Σ is far from the identity."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(stretch, 1, d, dtype=torch.float64)
    return unit(torch.randn(d, n, generator=generator, dtype=torch.float64) * scale[:, None])


def tight_frame(d, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return rows[:d] * math.sqrt(n / d)


def planted(n, pairs):
    T = torch.zeros(n, n, dtype=torch.float64)
    for query, key, value in pairs:
        T[query, key] = value
    return T


def test_closed_form_is_the_least_squares_solution():
    X, Y = drawn(4, 7, 0, stretch=3), drawn(5, 7, 1, stretch=0.2)
    T = torch.randn(7, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    # (Yᵀ ⊗ Xᵀ) vec Ω = vec T, columns stacked
    system = torch.kron(Y.mT.contiguous(), X.mT.contiguous())
    brute = torch.linalg.lstsq(system, T.mT.reshape(-1, 1)).solution.reshape(5, 4).mT
    torch.testing.assert_close(theory.least_squares(X, Y, T), brute, rtol=0, atol=1e-12)


def test_least_squares_leaves_directions_without_features_alone():
    X = drawn(4, 7, 0)
    X[3] = 0
    omega = theory.least_squares(X, X, torch.eye(7, dtype=torch.float64))
    assert float(omega[3].abs().max()) < 1e-12 and float(omega[:, 3].abs().max()) < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_theorem_1_names_the_only_mode_of_the_least_squares_head(seed):
    X, Y = drawn(6, 15, seed, stretch=4), drawn(6, 15, seed + 10, stretch=0.3)
    U, S, Vh = torch.linalg.svd(theory.least_squares(X, Y, planted(15, [(2, 5, 0.7)])))
    mode = theory.single_pair(X, Y, 2, 5, target=0.7)
    assert float(S[1]) < 1e-12 * float(S[0])
    assert mode.sigma == pytest.approx(float(S[0]), rel=1e-12)
    assert cos(U[:, 0], mode.u) == pytest.approx(1, abs=1e-12)
    assert cos(Vh[0], mode.v) == pytest.approx(1, abs=1e-12)


def test_raw_vectors_miss_the_features_and_unwhitened_ones_are_the_features():
    X = drawn(8, 20, 3, stretch=6)
    predicted = theory.alignment(X)
    for i in range(20):
        mode = theory.single_pair(X, X, i, (i + 1) % 20)
        assert cos(mode.u, X[:, i]) == pytest.approx(float(predicted[i]), abs=1e-12)
        assert cos(theory.unwhiten(X @ X.mT, mode.u[:, None])[:, 0], X[:, i]) == pytest.approx(1, abs=1e-12)
        # the known misreading, Σ⁻¹u, leads away from the feature
        wrong = torch.linalg.solve(X @ X.mT, mode.u)
        assert cos(wrong, X[:, i]) < float(predicted[i])
    assert float(predicted.min()) < 0.7


def test_corollary_1_tight_frames_align_exactly():
    X = tight_frame(10, 20)
    mode = theory.single_pair(X, X, 0, 1)
    assert cos(mode.u, X[:, 0]) == pytest.approx(1, abs=1e-12)
    assert cos(mode.v, X[:, 1]) == pytest.approx(1, abs=1e-12)
    assert theory.alignment_floor(X @ X.mT) == pytest.approx(1, abs=1e-12)


def test_no_feature_aligns_worse_than_the_floor():
    tightest = 1.0
    for seed in range(60):
        X = drawn(10, 40, seed, stretch=1 + seed % 7)
        X = unit(X + 0.3 * (seed % 5) * torch.ones(10, 1, dtype=torch.float64) / math.sqrt(10))
        slack = float(theory.alignment(X).min()) - theory.alignment_floor(X @ X.mT)
        assert slack >= 0
        tightest = min(tightest, slack)
    assert tightest < 0.2  # the floor is no empty promise


def test_the_floor_is_reached_by_the_worst_vector_there_is():
    low, high = 0.5, 8.0
    covariance = torch.diag(torch.tensor([low, 2.0, high], dtype=torch.float64))
    worst = torch.tensor([math.sqrt(low), 0, math.sqrt(high)], dtype=torch.float64)  # equal energy in both ends
    assert cos(torch.linalg.solve(covariance, worst), worst) == pytest.approx(theory.alignment_floor(covariance))
    alpha, eps = (low + high) / 2, (high - low) / 2
    assert theory.alignment_floor(covariance) == pytest.approx(math.sqrt(1 - (eps / alpha) ** 2))


def test_a_singular_covariance_promises_nothing_and_none_at_all_is_refused():
    assert theory.alignment_floor(torch.diag(torch.tensor([1.0, 0.0]))) == 0
    with pytest.raises(ClearheadError, match="covariance is zero"):
        theory.alignment_floor(torch.zeros(3, 3))


def test_a_frozen_mode_pushes_every_other_feature_out_of_both_its_directions():
    """Theorem 3 by gradient descent on W alone, at the least-squares attention error."""
    generator = torch.Generator().manual_seed(0)
    u, v = torch.linalg.qr(torch.randn(6, 2, generator=generator, dtype=torch.float64))[0].T
    mode = theory.Mode(u, 1.3, v)
    W = unit(torch.randn(6, 12, generator=generator, dtype=torch.float64)).requires_grad_()
    T = planted(12, [(0, 1, 1.0)])
    before = theory.orthogonality_gap(W.detach(), mode, 0, 1)
    optimiser = torch.optim.LBFGS([W], max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

    def error():
        optimiser.zero_grad()
        loss = (W.mT @ (1.3 * torch.outer(u, v)) @ W - T).square().sum()
        loss.backward()
        return loss

    optimiser.step(error)
    assert float(error().detach()) < 1e-12
    assert before > 0.5
    assert theory.orthogonality_gap(W.detach(), mode, 0, 1) < 1e-5
    # the planted pair itself stays readable
    W = W.detach()
    assert float(mode.sigma * (W[:, 0] @ u) * (v @ W[:, 1])) == pytest.approx(1, abs=1e-5)


def test_moments_of_a_feature():
    generator = torch.Generator().manual_seed(0)
    f = torch.rand(400_000, generator=generator) * (torch.rand(400_000, generator=generator) < 0.3)
    moments = theory.bernoulli_uniform(0.3)
    assert float(f.var()) == pytest.approx(moments.variance, rel=0.01)
    assert float(f.mean()) ** 2 == pytest.approx(moments.squared_mean, rel=0.01)


def test_query_correction_is_the_solution_of_the_second_moment_and_vanishes_for_a_basis():
    X = drawn(6, 15, 4, stretch=5)
    a, b = moments = theory.bernoulli_uniform(0.4)
    h = X.sum(1)
    solved = torch.linalg.solve(a * X @ X.mT + b * torch.outer(h, h), a * X[:, 2] + b * h)
    assert cos(theory.softmax_query_direction(X, 2, moments), solved) == pytest.approx(1, abs=1e-12)
    basis = drawn(6, 6, 5, stretch=3)
    plain = theory.whitened(basis)[:, 2]
    assert cos(theory.softmax_query_direction(basis, 2, moments), plain) == pytest.approx(1, abs=1e-12)


@pytest.fixture(scope="module", params=[0, 2])
def frozen(request):
    """Frozen, strongly anisotropic features, their sample, and the Ω that cross-entropy fits to one pair."""
    X, density, batch = drawn(4, 8, request.param, stretch=0.15), 0.4, 100_000
    generator = torch.Generator().manual_seed(7)

    def sample(*shape):
        return (torch.rand(*shape, 8, generator=generator) - (1 - density)).clamp_min(0) / density

    fr, fs = sample(batch), sample(batch, 8)
    target = torch.log_softmax(fr[:, :1] * fs[:, :, 1], -1)
    r, s = fr @ X.mT.float(), fs @ X.mT.float()
    # the problem is convex in Ω; in coordinates that whiten both sides four evaluations solve it
    second, centred = r.mT.double() @ r.double() / batch, torch.cov(r.mT.double())
    on_query, on_key = (torch.linalg.inv(torch.linalg.cholesky(moment)).mT for moment in (second, centred))
    r, s = r @ on_query.float(), s @ on_key.float()
    theta = torch.zeros(4, 4, requires_grad=True)
    optimiser = torch.optim.LBFGS([theta], max_iter=20, line_search_fn="strong_wolfe")

    def divergence():
        optimiser.zero_grad()
        logits = torch.log_softmax((s @ (r @ theta).unsqueeze(-1)).squeeze(-1), -1)
        loss = torch.nn.functional.kl_div(logits, target, log_target=True, reduction="batchmean")
        loss.backward()
        return loss

    optimiser.step(divergence)
    U, S, Vh = torch.linalg.svd(on_query @ theta.detach().double() @ on_key.mT)
    assert float(S[1]) < 0.01 * float(S[0])
    return X, U[:, 0], Vh[0], theory.bernoulli_uniform(density), centred, second


def test_a_head_trained_by_cross_entropy_reads_where_the_correction_says(frozen):
    X, u, v, moments, _, _ = frozen
    assert cos(u, X[:, 0]) < 0.5 and cos(v, X[:, 1]) < 0.7
    assert cos(v, theory.whitened(X)[:, 1]) > 0.999
    corrected = theory.softmax_query_direction(X, 0, moments)
    assert cos(u, corrected) > 0.9999
    # theorem 1 alone misses by as much as the correction says: by nothing in one geometry, by 46 degrees in the other
    plain = theory.whitened(X)[:, 0]
    assert cos(u, plain) == pytest.approx(cos(corrected, plain), abs=0.01)


def test_centred_covariance_unwhitens_and_the_second_moment_does_not(frozen):
    X, u, v, _, centred, second = frozen
    assert cos(theory.unwhiten(centred, v[:, None])[:, 0], X[:, 1]) > 0.999
    assert cos(theory.unwhiten(centred, u[:, None])[:, 0], X[:, 0]) > 0.95
    assert cos(theory.unwhiten(second, u[:, None])[:, 0], X[:, 0]) < 0.75
