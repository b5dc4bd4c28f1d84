import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.ops.sparse import decode, decode_reference, topk_decode
from clearhead.ops.topk import topk_reference


@pytest.mark.parametrize(("r", "n", "k", "d"), [(50, 300, 16, 512), (3, 9, 9, 33), (1, 5, 2, 1), (20, 6, 3, 130)])
def test_values_and_gradients_equal_the_reference(backend, threads, r, n, k, d):
    torch.manual_seed(0)
    values, weight = torch.randn(r, k, requires_grad=True), torch.randn(n, d, requires_grad=True)
    heads, dy = torch.randint(n, (r, k)), torch.randn(r, d)
    y = decode(values, heads, weight)
    gradients = torch.autograd.grad(y, (values, weight), dy)
    wide = [x.detach().double().requires_grad_() for x in (values, weight)]
    expected = decode_reference(wide[0], heads, wide[1])
    for mine, exact in zip([y, *gradients], [expected, *torch.autograd.grad(expected, wide, dy.double())], strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=2e-5, atol=2e-5)


def test_equals_dense_decoding(backend):
    torch.manual_seed(1)
    z, weight = torch.randn(20, 64, requires_grad=True), torch.randn(64, 40, requires_grad=True)
    values, heads, y = topk_decode(z, 8, weight)
    dense = torch.zeros(20, 64).scatter(1, heads, values.detach())
    torch.testing.assert_close(y, dense @ weight, rtol=1e-5, atol=1e-5)
    dy, dvalues = torch.randn(20, 40), torch.randn(20, 8)
    dz, dweight = torch.autograd.grad([y, values], (z, weight), [dy, dvalues])
    kept = (dense != 0).float()
    expected = kept * (dy @ weight.T) + torch.zeros(20, 64).scatter(1, heads, dvalues) * kept
    torch.testing.assert_close(dz, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dweight, dense.T @ dy, rtol=1e-5, atol=1e-5)


def test_signed(backend):
    z, weight = torch.randn(4, 30), torch.randn(30, 12)
    values, heads, y = topk_decode(z, 5, weight, signed=True)
    expected, _ = topk_reference(z, 5, signed=True)
    torch.testing.assert_close(values.double().sort(-1).values, expected.sort(-1).values)
    torch.testing.assert_close(y.double(), decode_reference(values, heads, weight), rtol=1e-5, atol=1e-5)


def test_one_gradient_alone(backend):
    values, weight = torch.randn(4, 3), torch.randn(10, 8, requires_grad=True)
    heads = torch.randint(10, (4, 3))
    dweight = torch.autograd.grad(decode(values, heads, weight).sum(), weight)[0]
    expected = torch.zeros(10, 8).index_add(0, heads.flatten(), values.flatten()[:, None].expand(-1, 8))
    torch.testing.assert_close(dweight, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_run_in_torch(dtype):
    z, weight = torch.randn(4, 30).to(dtype), torch.randn(30, 12).to(dtype)
    values, heads, y = topk_decode(z, 5, weight)
    assert y.dtype == dtype
    exact = decode_reference(values, heads, weight)
    torch.testing.assert_close(y.double(), exact, rtol=0.05, atol=0.05)


def test_heads_that_do_not_exist_are_refused(backend):
    values, weight = torch.ones(2, 3), torch.ones(10, 4)
    for head in (-1, 10):
        with pytest.raises(ClearheadError, match="rows 0 to 9"):
            decode(values, torch.full((2, 3), head), weight)
    with pytest.raises(ClearheadError, match="two of"):
        decode(values, torch.zeros(2, 2, dtype=torch.long), weight)
