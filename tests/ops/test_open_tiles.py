import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.ops.open_tiles import expected_open_tiles

SCALE = 0.5


def random_inputs(b=2, h=4, g=2, t=23, dh=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(b, h, t, dh, generator=generator, dtype=torch.float64).to(dtype)
    k = torch.randn(b, g, t, dh, generator=generator, dtype=torch.float64).to(dtype)
    bias = (torch.randn(h, generator=generator, dtype=torch.float64) - 4).to(dtype)
    return [x.requires_grad_() for x in (q, k, bias)]


def dense(q, k, bias, scale, first, tile):
    """The products of closing probabilities, tile by tile."""
    b, h, t, _ = q.shape
    k = k.repeat_interleave(h // k.shape[1], dim=1)
    probability = (scale * q @ k.mT + bias[:, None, None]).sigmoid()
    key = torch.arange(t)
    seen = (key <= key[:, None]).expand(b, t, t)
    if first is not None:
        seen = seen & (key >= first[:, :, None])
    rows = []
    for row in range(b):
        opened = []
        for i in range(0, t, tile):
            for j in range(0, t, tile):
                inside = seen[row, i : i + tile, j : j + tile]
                if inside.any():
                    opened.append(1 - (1 - probability[row, :, i : i + tile, j : j + tile][:, inside]).prod(-1))
        rows.append(torch.stack(opened).mean(0))
    return torch.stack(rows)


@pytest.mark.parametrize("tile", [1, 4, 8, 64])
@pytest.mark.parametrize("kind", ["causal", "window", "documents"])
def test_equals_the_dense_formula_and_its_gradients(tile, kind):
    q, k, bias = random_inputs()
    t = q.shape[2]
    first = None
    if kind == "window":
        first = (torch.arange(t) - 5).clamp_min(0).expand(2, t)
    elif kind == "documents":  # and rows that see nothing
        first = torch.where(torch.arange(t) < 9, 0, 9).expand(2, t).clone()
        first[1, 4:7] = t
    upstream = torch.rand(2, 4, dtype=torch.float64)
    found = expected_open_tiles(q, k, bias, scale=SCALE, first=first, tile=tile)
    expected = dense(q, k, bias, SCALE, first, tile)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gradients = torch.autograd.grad((found * upstream).sum(), (q, k, bias))
    for mine, theirs in zip(gradients, torch.autograd.grad((expected * upstream).sum(), (q, k, bias)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)


def test_gradcheck():
    q, k, bias = random_inputs(b=1, h=2, g=1, t=7, dh=3)
    assert torch.autograd.gradcheck(lambda *x: expected_open_tiles(*x, scale=SCALE, tile=3), (q, k, bias))


def test_limits():
    q, k, bias = random_inputs()
    torch.testing.assert_close(
        expected_open_tiles(q, k, bias + 60, scale=SCALE, tile=8), torch.ones(2, 4, dtype=torch.float64)
    )
    assert float(expected_open_tiles(q, k, bias - 60, scale=SCALE, tile=8).detach().max()) < 1e-20
    # tiles of one pair: the expected share of edges
    t = q.shape[2]
    logits = SCALE * q @ k.repeat_interleave(2, dim=1).mT + bias[:, None, None]
    shares = (logits.sigmoid() * torch.ones(t, t).tril()).sum((-1, -2)) / (t * (t + 1) / 2)
    torch.testing.assert_close(expected_open_tiles(q, k, bias, scale=SCALE, tile=1), shares)


def test_small_probabilities_survive_float32():
    q, k, bias = random_inputs(dtype=torch.float32)
    wide = [x.detach().double().requires_grad_() for x in (q, k, bias)]
    low = expected_open_tiles(q, k, bias - 20, scale=SCALE, tile=8)
    expected = expected_open_tiles(wide[0], wide[1], wide[2] - 20, scale=SCALE, tile=8)
    torch.testing.assert_close(low.double(), expected, rtol=1e-5, atol=0)
    (gradient,) = torch.autograd.grad(low.sum(), bias)
    assert bool(gradient.all())


def test_bfloat16_scores_are_summed_in_float32():
    q, k, bias = random_inputs(dtype=torch.bfloat16)
    found = expected_open_tiles(q, k, bias, scale=SCALE, tile=8)
    assert found.dtype == torch.float32
    wide = [x.detach().double() for x in (q, k, bias)]
    torch.testing.assert_close(found.double(), expected_open_tiles(*wide, scale=SCALE, tile=8), rtol=0.05, atol=0.01)


def test_memory_does_not_grow_with_the_square_of_the_length():
    """Saved for the backward pass: nothing of the pairs."""
    saved = 0

    def count(x):
        nonlocal saved
        saved += x.numel()
        return x

    q, k, bias = random_inputs(b=1, h=2, g=1, t=512, dh=4, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        expected_open_tiles(q, k, bias, scale=SCALE, tile=16)
    assert saved < 512 * 512 / 2


def test_bad_input_is_refused():
    q, k, bias = random_inputs()
    with pytest.raises(ClearheadError, match=r"\[2, 3, 23, 5\]"):
        expected_open_tiles(q[:, :3], k, bias[:3], scale=SCALE)
    with pytest.raises(ClearheadError, match="bias"):
        expected_open_tiles(q, k, bias[:2], scale=SCALE)
    with pytest.raises(ClearheadError, match="tile"):
        expected_open_tiles(q, k, bias, scale=SCALE, tile=0)
    with pytest.raises(ClearheadError, match="behind every query"):
        expected_open_tiles(q, k, bias, scale=SCALE, first=torch.full((2, 23), 23))
