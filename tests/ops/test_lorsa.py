import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.ops.lorsa import attend, attend_reference, attend_topk, pattern
from clearhead.ops.rotation import Rotation
from clearhead.ops.topk import topk

SIZES = [  # b, g, t, dh, heads per group
    (2, 3, 37, 8, 8),
    (1, 2, 130, 16, 4),
    (2, 1, 64, 64, 70),
    (1, 2, 1, 3, 2),
    (1, 7, 50, 12, 1),
]


def draw(sizes, seed=0, sink=False):
    b, g, t, dh, size = sizes
    torch.manual_seed(seed)
    q, k = (torch.randn(b, t, g, dh).transpose(1, 2).requires_grad_() for _ in range(2))
    v = torch.randn(b, t, g * size, requires_grad=True)
    return [q, k, v] + ([torch.randn(g, requires_grad=True)] if sink else [])


def compare(leaves, dz, **geometry):
    sink = leaves[3] if len(leaves) == 4 else None
    z = attend(*leaves[:3], sink=sink, **geometry)
    gradients = torch.autograd.grad(z, leaves, dz)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = attend_reference(*wide[:3], sink=wide[3] if sink is not None else None, **geometry)
    for mine, exact in zip([z, *gradients], [expected, *torch.autograd.grad(expected, wide, dz.double())], strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sink", [False, True])
def test_values_and_gradients_equal_the_reference(backend, threads, sizes, window, sink):
    leaves = draw(sizes, sink=sink)
    compare(leaves, torch.randn_like(leaves[2]), scale=0.3, window=window)


@pytest.mark.parametrize("density", [0.0, 0.02, 0.3])
def test_sparse_gradients(backend, threads, density):
    leaves = draw((2, 3, 100, 16, 12))
    dz = torch.randn_like(leaves[2]) * (torch.rand_like(leaves[2]) < density)
    compare(leaves, dz, scale=0.25)
    compare(leaves, dz, scale=0.25, window=33)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_inside_equals_rotation_before(backend, interleaved):
    leaves = draw((2, 2, 40, 12, 6), sink=True)
    angle = torch.rand(40, 4)
    rotation = Rotation(angle.cos(), angle.sin(), interleaved)
    compare(leaves, torch.randn_like(leaves[2]), scale=0.3, rotation=rotation)
    compare(leaves, torch.randn_like(leaves[2]), scale=0.3, rotation=rotation, softcap=3.0)


def test_softcap(backend):
    leaves = draw((1, 2, 20, 8, 8), sink=True)
    compare(leaves, torch.randn_like(leaves[2]), scale=2.0, softcap=1.5, window=7)


def test_float64_gradcheck():
    leaves = [x.double().detach().requires_grad_() for x in draw((1, 2, 5, 3, 2), sink=True)]
    assert torch.autograd.gradcheck(lambda q, k, v, s: attend(q, k, v, scale=0.5, sink=s), leaves)


def test_strides_of_the_inputs_do_not_matter(backend):
    q, k, v = (x.detach() for x in draw((2, 3, 20, 8, 8)))
    expected = attend(q, k, v, scale=0.3)
    scrambled = [q.contiguous(), k.transpose(-1, -2).contiguous().transpose(-1, -2)]
    torch.testing.assert_close(attend(*scrambled, v, scale=0.3), expected, rtol=1e-5, atol=1e-6)


def test_one_head_by_loops(backend):
    q, k, v = (x.detach() for x in draw((1, 2, 6, 4, 3)))
    z = attend(q, k, v, scale=0.5)
    head, group = 4, 1
    for i in range(6):
        weights = torch.tensor([torch.exp(0.5 * q[0, group, i] @ k[0, group, j]) for j in range(i + 1)])
        expected = sum(w * v[0, j, head] for j, w in enumerate(weights / weights.sum()))
        torch.testing.assert_close(z[0, i, head], expected, rtol=1e-5, atol=1e-6)


def test_causal(backend):
    q, k, v = (x.detach() for x in draw((1, 2, 20, 8, 4)))
    before = attend(q, k, v, scale=0.3)
    for x in (q, k):
        x[:, :, 11:] += 1
    v[:, 11:] += 1
    after = attend(q, k, v, scale=0.3)
    torch.testing.assert_close(after[:, :11], before[:, :11], rtol=0, atol=0)
    assert not torch.equal(after[:, 11:], before[:, 11:])


def test_large_scores_stay_finite(backend):
    q, k, v = (x.detach() for x in draw((1, 2, 30, 8, 4)))
    z = attend(q * 100, k * 100, v, scale=1.0)
    torch.testing.assert_close(z.double(), attend_reference(q * 100, k * 100, v, scale=1.0), rtol=1e-3, atol=1e-3)


def test_nan_is_seen_not_hidden(backend):
    q, k, v = (x.detach() for x in draw((1, 2, 30, 8, 4)))
    q[0, 1, 17, 2] = torch.nan
    z = attend(q, k, v, scale=0.3)
    assert z[0, 17, 4:].isnan().all() and z[0, 16].isfinite().all() and z[0, :, :4].isfinite().all()


def test_results_do_not_depend_on_threads(backend):
    before, results = torch.get_num_threads(), []
    for n in (1, 2):
        torch.set_num_threads(n)
        leaves = draw((2, 3, 70, 8, 8))
        z = attend(*leaves, scale=0.3)
        results.append([z, *torch.autograd.grad(z.square().sum(), leaves)])
    torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0 if backend == "c" else 1e-5, atol=0 if backend == "c" else 1e-6)


def test_pattern_rows_sum_to_one_and_give_z():
    q, k, v = (x.detach() for x in draw((2, 3, 15, 8, 2)))
    weights = pattern(q, k, scale=0.3, window=4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 15))
    z = torch.einsum("bgij,bjgm->bigm", weights, v.view(2, 15, 3, 2)).reshape(2, 15, 6)
    torch.testing.assert_close(attend(q, k, v, scale=0.3, window=4), z, rtol=1e-5, atol=1e-6)


def test_pattern_with_a_sink_gives_up_its_share():
    q, k = (x.detach() for x in draw((1, 2, 9, 4, 2))[:2])
    sink = torch.tensor([0.0, -torch.inf])
    total = pattern(q, k, scale=0.3, sink=sink).sum(-1)
    assert (total[:, 0] < 1).all()
    torch.testing.assert_close(total[:, 1], torch.ones(1, 9))


def test_bad_shapes_are_refused():
    q, k, v = (x.detach() for x in draw((1, 3, 5, 4, 2)))
    with pytest.raises(ClearheadError, match="number of heads that the 3 groups divide"):
        attend(q, k, v[..., :5], scale=1.0)
    with pytest.raises(ClearheadError, match="one shape"):
        attend(q, k[:, :, :4], v, scale=1.0)
    with pytest.raises(ClearheadError, match="at least itself"):
        attend(q, k, v[..., :6], scale=1.0, window=0)
    with pytest.raises(ClearheadError, match="one logit per group"):
        attend(q, k, v[..., :6], scale=1.0, sink=torch.zeros(2))
    with pytest.raises(ClearheadError, match=r"expected two of \[5, half\]"):
        attend(q, k, v[..., :6], scale=1.0, rotation=Rotation(torch.ones(4, 2), torch.ones(4, 2), False))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("uses_z", [False, True])
def test_attend_topk_is_attend_then_topk(backend, threads, signed, uses_z):
    leaves = draw((2, 3, 50, 8, 16), sink=True)
    geometry = {"scale": 0.3, "window": 20, "sink": leaves[3]}
    weights, weights_z = torch.randn(100, 6), torch.randn_like(leaves[2])

    def gradients(values, heads, z):
        # entries in a fixed order, so that each gets the same weight in both
        loss = (values.gather(1, heads.argsort(1)) * weights).sum() + uses_z * (z * weights_z).sum()
        return torch.autograd.grad(loss, leaves)

    values, heads, z = attend_topk(*leaves[:3], 6, signed=signed, **geometry)
    apart_z = attend(*leaves[:3], **geometry)
    apart_values, apart_heads = topk(apart_z.flatten(0, 1), 6, signed=signed)
    assert torch.equal(heads.sort(1).values, apart_heads.sort(1).values)
    torch.testing.assert_close(z, apart_z)
    mine, theirs = gradients(values, heads, z), gradients(apart_values, apart_heads, apart_z)
    for one, two in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_attend_topk_refuses_k(backend):
    q, k, v = (x.detach() for x in draw((1, 2, 5, 4, 2)))
    with pytest.raises(ClearheadError, match="choose such a k"):
        attend_topk(q, k, v, 5, scale=1.0)


def test_consuming_gives_the_same_gradients_once(backend):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 30, 20), torch.randn(3 * 24, 20, requires_grad=True)
    angle = torch.rand(30, 2)

    def loss(consume):
        q, k, v = (x @ weight.T).split(24, -1)
        q, k = (part.contiguous().view(2, 30, 3, 8).transpose(1, 2) for part in (q, k))
        rotation = Rotation(angle.cos(), angle.sin(), False)
        values, _, z = attend_topk(q, k, v.contiguous(), 5, scale=0.3, rotation=rotation, consume=consume)
        return values.square().sum() + z.sum()

    kept, consumed = loss(False), loss(True)
    expected = torch.autograd.grad(kept, weight, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(kept, weight)[0], expected)
    torch.testing.assert_close(torch.autograd.grad(consumed, weight, retain_graph=True)[0], expected)
    if backend == "c":
        with pytest.raises((ClearheadError, RuntimeError), match=r"one backward pass|modified by an inplace"):
            torch.autograd.grad(consumed, weight)
