import pytest
import torch

from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.spectral.factored import Factored
from clearhead.spectral.whiten import (
    Covariance,
    InputMoments,
    TokenSpace,
    column_cosines,
    compare_with_cone,
    estimate_covariance,
    leave_cone,
)

DTYPE = torch.float64


def draw(n: int, d: int, seed: int = 0) -> torch.Tensor:
    """Correlated rows with a mean."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(d, d, dtype=DTYPE, generator=generator)
    return torch.rand(n, d, dtype=DTYPE, generator=generator) @ mixing + 3


def in_parts(rows: torch.Tensor, sizes: list[int]) -> InputMoments:
    total = InputMoments.of(rows[:0])
    for part in rows.split(sizes):
        total = total + InputMoments.of(part)
    return total


@pytest.mark.parametrize("sizes", [[1] * 40, [0, 7, 33], [40], [39, 1]])
def test_sums_over_parts_are_the_sums_over_the_whole(sizes):
    rows = draw(40, 5)
    whole, parts = InputMoments.of(rows), in_parts(rows, sizes)
    assert parts.n == whole.n == 40
    for name in ("mean", "scatter", "cubic", "quartic"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(parts.second_moment(), rows.mT @ rows / 40)


def test_moments_are_those_of_the_formulas():
    rows = draw(30, 4)
    found = InputMoments.of(rows)
    c = rows - rows.mean(0)
    torch.testing.assert_close(found.scatter / 30, torch.cov(rows.mT, correction=0))
    torch.testing.assert_close(found.cubic, sum(row @ row * row for row in c))
    torch.testing.assert_close(found.quartic, sum((row @ row) ** 2 for row in c))


def test_a_mean_of_a_billion_does_not_swallow_the_covariance():
    rows = draw(400, 3)
    shifted = in_parts(rows + 1e9, [50] * 8)
    expected = torch.cov(rows.mT, correction=0)
    torch.testing.assert_close(shifted.scatter / 400, expected, rtol=1e-5, atol=1e-5)
    naive = (rows + 1e9).mT @ (rows + 1e9) / 400 - torch.outer(shifted.mean, shifted.mean)
    assert float((naive - expected).abs().max()) > 1  # what subtracting large numbers would have given


def test_float32_rows_are_summed_in_float64():
    rows = draw(100, 4).float()
    assert InputMoments.of(rows).scatter.dtype == DTYPE
    torch.testing.assert_close(InputMoments.of(rows).scatter, InputMoments.of(rows.double()).scatter, rtol=0, atol=0)


def test_ledoit_wolf_is_the_formula_of_the_paper():
    rows = draw(25, 6)
    c = rows - rows.mean(0)
    S = c.mT @ c / 25
    level = S.trace() / 6 * torch.eye(6, dtype=DTYPE)
    noise = sum((torch.outer(row, row) - S).square().sum() for row in c) / 25**2
    amount = float(noise / (S - level).square().sum())
    found = estimate_covariance(in_parts(rows, [10, 15]))
    assert 0.01 < amount < 1 and found.amount == pytest.approx(amount, rel=1e-9)
    torch.testing.assert_close(found.matrix, (1 - amount) * S + amount * level)


def test_shrinkage_helps_when_there_are_few_samples_and_vanishes_when_there_are_many():
    generator = torch.Generator().manual_seed(1)
    true = torch.diag(torch.linspace(0.1, 2, 40, dtype=DTYPE))
    rows = torch.randn(4000, 40, dtype=DTYPE, generator=generator) @ true.sqrt()
    few, many = InputMoments.of(rows[:50]), InputMoments.of(rows)
    error = lambda estimate: float((estimate.matrix - true).norm())  # noqa: E731
    assert error(estimate_covariance(few)) < 0.7 * error(estimate_covariance(few, "none"))
    assert estimate_covariance(few).amount > 10 * estimate_covariance(many).amount > 0


def test_ridge_and_none_are_what_they_say():
    moments = InputMoments.of(draw(50, 4))
    S = moments.scatter / 50
    torch.testing.assert_close(estimate_covariance(moments, "none").matrix, S)
    ridge = estimate_covariance(moments, "ridge")
    torch.testing.assert_close(ridge.matrix, S + 0.01 * S.trace() / 4 * torch.eye(4, dtype=DTYPE))
    assert ridge.amount == 0.01


def test_condition_rank_and_samples_are_reported():
    rows = torch.randn(500, 3, dtype=DTYPE, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([rows * torch.tensor([1.0, 1.0, 0.1]), torch.zeros(500, 1)], 1)
    found = estimate_covariance(InputMoments.of(rows), "none")
    assert found.rank == 3 and found.samples == 500 and found.per_dimension == 125
    spectrum = torch.linalg.eigvalsh(torch.cov(rows[:, :3].mT, correction=0))
    assert found.condition == pytest.approx(float(spectrum[-1] / spectrum[0]))
    torch.testing.assert_close(found.components * found.variances @ found.components.mT, found.matrix)
    assert estimate_covariance(InputMoments.of(rows)).rank == 4  # shrinkage fills the empty direction


@pytest.mark.parametrize("rows", [torch.zeros(0, 3), torch.ones(1, 3), torch.ones(5, 3)])
def test_samples_without_variance_are_refused(rows):
    with pytest.raises(ClearheadError, match="do not vary"):
        estimate_covariance(InputMoments.of(rows))


def test_unknown_shrinkage_and_damaged_rows_are_refused():
    with pytest.raises(ClearheadError, match="ledoit-wolf, ridge or none, got 'oas'"):
        estimate_covariance(InputMoments.of(draw(5, 2)), "oas")
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        InputMoments.of(torch.tensor([[1.0, float("nan")]]))


def test_column_cosines_of_zero_are_zero():
    a = torch.tensor([[3.0, 0.0, 1.0], [4.0, 0.0, 0.0]])
    b = torch.tensor([[4.0, 1.0, -2.0], [3.0, 1.0, 0.0]])
    torch.testing.assert_close(column_cosines(a, b), torch.tensor([24 / 25, 0.0, -1.0]))


def test_the_cone_is_seen_by_the_mean_and_by_the_components():
    rows = torch.randn(2000, 8, dtype=DTYPE, generator=torch.Generator().manual_seed(0)) * 0.1
    rows[:, :3] *= 20  # principal components 0, 1, 2
    rows[:, 7] += 5  # the mean
    moments = InputMoments.of(rows)
    eye = torch.eye(8, dtype=DTYPE)
    cone = compare_with_cone(torch.stack([-eye[7], eye[1], eye[5], 2 * eye[0]], 1), moments, covariance_of(moments))
    torch.testing.assert_close(cone.mean, torch.tensor([-1.0, 0.0, 0.0, 0.0], dtype=DTYPE), atol=0.03, rtol=0)
    torch.testing.assert_close(cone.component, torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=DTYPE), atol=0.03, rtol=0)


def test_leaving_the_cone_keeps_the_rest_and_makes_what_lies_in_it_zero():
    moments = InputMoments.of(draw(300, 6))
    covariance = covariance_of(moments)
    generator = torch.Generator().manual_seed(2)
    directions = torch.cat([torch.randn(6, 3, dtype=DTYPE, generator=generator), covariance.components[:, :1]], 1)
    left = leave_cone(directions, moments, covariance)
    assert float((covariance.components[:, :3].mT @ left).abs().max()) < 1e-9
    assert float((moments.mean @ left).abs().max()) < 1e-9 * float(moments.mean.norm())
    torch.testing.assert_close(left.norm(dim=0), torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=DTYPE))
    torch.testing.assert_close(leave_cone(left, moments, covariance), left, atol=1e-9, rtol=0)


def covariance_of(moments: InputMoments) -> Covariance:
    return estimate_covariance(moments, "none")


def planted_with_a_dead_direction() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens that never reach two of ten directions, x, y, and what initialisation left on the rest of Ω."""
    generator = torch.Generator().manual_seed(3)
    frame = torch.linalg.qr(torch.randn(10, 10, dtype=DTYPE, generator=generator))[0]
    live, dead = frame[:, :8], frame[:, 8:]
    tokens = (torch.rand(500, 8, dtype=DTYPE, generator=generator) - 0.2) @ live.mT
    x, y = live[:, 0], live[:, 1]
    noise = dead @ torch.randn(2, 10, dtype=DTYPE, generator=generator) * 3
    return tokens, x, y, noise + noise.mT


def test_a_dead_direction_corrupts_raw_modes_and_not_the_effective_ones():
    tokens, x, y, noise = planted_with_a_dead_direction()
    omega = Factored(torch.outer(x, y) + noise, torch.eye(10, dtype=DTYPE))
    space = TokenSpace.of(InputMoments.of(tokens))
    assert space.basis.shape == (10, 8)
    effective = space.effective(omega)
    raw, cleaned = omega.svd(), effective.svd()
    assert float((raw.U[:, 0] @ x).abs()) < 0.5
    assert float((cleaned.U[:, 0] @ x).abs()) > 1 - 1e-12 and float((cleaned.V[:, 0] @ y).abs()) > 1 - 1e-12
    torch.testing.assert_close(tokens @ effective.dense() @ tokens.mT, tokens @ omega.dense() @ tokens.mT)
    assert float(space.unused_share(omega)) > 0.9
    assert float(space.unused_share(effective)) == pytest.approx(0, abs=1e-12)
    assert float(space.unused(raw.U[:, :1])) > 0.75


def test_energy_is_one_on_average_and_zero_where_no_token_is():
    tokens, x, _, _ = planted_with_a_dead_direction()
    space = TokenSpace.of(InputMoments.of(tokens))
    assert float(space.energy(torch.eye(10, dtype=DTYPE)).mean()) == pytest.approx(1)
    assert float(space.energy(x[:, None])) == pytest.approx(
        float((tokens @ x).square().mean() / tokens.square().mean()), rel=1e-9
    )
    dead = torch.linalg.svd(tokens)[2][-1]
    assert float(space.energy(dead[:, None])) == pytest.approx(0, abs=1e-12)


def test_token_space_refuses_nothing_and_takes_a_zero_head():
    with pytest.raises(ClearheadError, match="no positions"):
        TokenSpace.of(InputMoments.of(torch.zeros(0, 3)))
    with pytest.raises(ClearheadError, match="all inputs are zero"):
        TokenSpace.of(InputMoments.of(torch.zeros(4, 3)))
    space = TokenSpace.of(InputMoments.of(draw(10, 3)))
    zero = torch.zeros(3, 2, dtype=DTYPE)
    assert float(space.unused_share(Factored(zero, zero))) == 0
