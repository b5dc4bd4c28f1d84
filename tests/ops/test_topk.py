import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import ClearheadError
from clearhead.ops.topk import active, batch_topk, jumprelu, topk, topk_reference


def check(z, k, signed):
    values, heads = topk(z, k, signed=signed)
    expected, _ = topk_reference(z, k, signed=signed)
    size = (lambda x: x.abs()) if signed else (lambda x: x)
    torch.testing.assert_close(size(values).double().sort(-1).values, size(expected).sort(-1).values, rtol=0, atol=0)
    kept = z.gather(1, heads)
    torch.testing.assert_close(values, kept if signed else kept.clamp_min(0), rtol=0, atol=0)
    assert all(len(row.unique()) == k for row in heads)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("n", "k"), [(4096, 64), (203, 20), (16, 16), (7, 1), (1, 1)])
def test_exact(backend, threads, n, k, signed):
    torch.manual_seed(n)
    z = torch.randn(33, n) * torch.linspace(0.01, 100, 33)[:, None]
    check(z, k, signed)


@pytest.mark.parametrize("signed", [False, True])
def test_ties_zeros_and_too_few_positive(backend, signed):
    torch.manual_seed(0)
    z = torch.randn(6, 50)
    z[0], z[1], z[2] = z[0].round(), 0.0, -z[2].abs()
    z[3, 5:] = -1.0
    z[4] = 1.0
    z[5, ::2] = -0.0
    check(z, 20, signed)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=40), st.data())
def test_any_row(values, data):
    k = data.draw(st.integers(1, len(values)))
    check(torch.tensor([values, values[::-1]]), k, data.draw(st.booleans()))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_and_infinity_are_kept(backend, signed, sign):
    z = torch.randn(3, 64)
    z[1, 40] = torch.copysign(torch.tensor(torch.nan), torch.tensor(sign))
    z[2, 3] = torch.inf
    values, heads = topk(z, 4, signed=signed)
    assert values[0].isfinite().all()
    assert 40 in heads[1] and values[1].isnan().sum() == 1
    assert 3 in heads[2] and values[2].isinf().sum() == 1


@pytest.mark.parametrize("signed", [False, True])
def test_gradient_reaches_only_what_was_kept(backend, signed):
    torch.manual_seed(1)
    z = torch.randn(5, 30)
    z[3] = -z[3].abs()
    z.requires_grad_()
    values, heads = topk(z, 6, signed=signed)
    weights = torch.randn(5, 6)
    dz = torch.autograd.grad(values, z, weights)[0]
    expected = torch.zeros(5, 30).scatter(1, heads, torch.where(values != 0, weights, 0.0))
    torch.testing.assert_close(dz, expected, rtol=0, atol=0)


def test_result_is_the_same_whatever_ran_before(backend):
    torch.manual_seed(2)
    z = torch.randn(40, 500)
    alone = [topk(row[None], 30) for row in z]
    together = topk(z, 30)
    for r, (values, heads) in enumerate(alone):
        assert torch.equal(heads[0].sort().values, together[1][r].sort().values)
        assert torch.equal(values[0].sort().values, together[0][r].sort().values)


def test_batch_topk_keeps_k_per_row_on_average():
    torch.manual_seed(3)
    z = torch.randn(8, 100, requires_grad=True)
    kept = batch_topk(z, 5)
    assert int((kept != 0).sum()) == 40
    smallest = kept[kept != 0].min()
    assert (z[kept == 0] <= smallest).all()
    dz = torch.autograd.grad(kept.sum(), z)[0]
    torch.testing.assert_close(dz, (kept != 0).float())
    torch.testing.assert_close(batch_topk(z, 100), z.relu())


def test_jumprelu_gradients_by_their_formulas():
    torch.manual_seed(4)
    z = torch.randn(200, 7, requires_grad=True)
    log_threshold = torch.full((7,), -0.5, requires_grad=True)
    theta, width = float(torch.tensor(-0.5).exp()), 0.6
    dy = torch.randn(200, 7)
    y = jumprelu(z, log_threshold, width)
    torch.testing.assert_close(y, z * (z > theta))
    dz, dlog = torch.autograd.grad(y, (z, log_threshold), dy)
    torch.testing.assert_close(dz, dy * (z > theta))
    near = (z - theta).abs() < width / 2
    torch.testing.assert_close(dlog, -(dy * near).sum(0) * theta * theta / width)
    wide, log_wide = torch.autograd.grad(jumprelu(z, log_threshold, width, through_all=True), (z, log_threshold), dy)
    torch.testing.assert_close(wide, dy * ((z > theta) + near * theta / width))
    torch.testing.assert_close(log_wide, dlog)
    gate = active(z, log_threshold, width)
    torch.testing.assert_close(gate, (z > theta).float())
    dz, dlog = torch.autograd.grad(gate, (z, log_threshold), dy)
    assert not dz.any()
    torch.testing.assert_close(dlog, -(dy * near).sum(0) * theta / width)


def test_jumprelu_estimate_is_the_derivative_of_the_smoothed_loss():
    """Averaged over many z, the straight-through gradient is the derivative of the expected output."""
    torch.manual_seed(5)
    z = torch.rand(400_000, 1) * 4 - 2
    log_threshold = torch.zeros(1, requires_grad=True)
    estimate = torch.autograd.grad(jumprelu(z, log_threshold, 0.2).mean(), log_threshold)[0]
    # E[z; z > theta] with z uniform on [-2, 2] is (4 - theta^2) / 8, whose derivative in log theta at 1 is -1/4
    assert abs(float(estimate) + 0.25) < 0.01


def test_jumprelu_shows_nan():
    assert jumprelu(torch.tensor([[torch.nan]]), torch.zeros(1), 0.1).isnan().all()


def test_k_out_of_range_is_refused(backend):
    for k in (0, 11):
        with pytest.raises(ClearheadError, match="1 <= k <= 10"):
            topk(torch.randn(2, 10), k)
