import math
from types import SimpleNamespace

import pytest
import torch

from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.gates import LayerCount
from clearhead.sparsify import objective
from clearhead.sparsify.objective import cross_entropy, distillation, edge_penalty, edge_shares
from clearhead.training.repeats import next_token_losses


def random_logits(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def test_cross_entropy_is_that_of_training():
    logits, tokens = random_logits(3, 5, 11, dtype=torch.float32), torch.randint(11, (3, 5))
    expected = next_token_losses(lambda **_: SimpleNamespace(logits=logits), tokens).mean()
    torch.testing.assert_close(cross_entropy(logits, tokens), expected)
    by_hand = [
        -math.log(float(logits[row, t].double().softmax(-1)[tokens[row, t + 1]])) for row in range(3) for t in range(4)
    ]
    assert float(cross_entropy(logits, tokens)) == pytest.approx(sum(by_hand) / 12, rel=1e-6)


def test_cross_entropy_of_bfloat16_is_computed_in_float32():
    logits, tokens = random_logits(2, 6, 300, dtype=torch.bfloat16), torch.randint(300, (2, 6))
    torch.testing.assert_close(cross_entropy(logits, tokens), cross_entropy(logits.float(), tokens), rtol=0, atol=0)
    assert cross_entropy(logits, tokens).dtype == torch.float32


def test_cross_entropy_has_no_gradient_at_the_last_position():
    logits, tokens = random_logits(2, 4, 5).requires_grad_(), torch.randint(5, (2, 4))
    cross_entropy(logits, tokens).backward()
    assert logits.grad is not None
    assert not logits.grad[:, -1].any() and logits.grad[:, :-1].all()


@pytest.mark.parametrize("rows", [1, 3, 256])
def test_distillation_is_the_mean_divergence_of_predicted_tokens(monkeypatch, rows):
    monkeypatch.setattr(objective, "ROWS", rows)
    student, teacher = random_logits(2, 6, 7), random_logits(2, 6, 7, seed=1)
    total = 0.0
    for row in range(2):
        for t in range(5):
            p, q = teacher[row, t].softmax(-1), student[row, t].softmax(-1)
            total += sum(float(p[v]) * math.log(float(p[v]) / float(q[v])) for v in range(7))
    assert float(distillation(student, teacher)) == pytest.approx(total / 10, rel=1e-12)
    assert float(distillation(teacher, teacher)) == pytest.approx(0.0, abs=1e-15)
    assert torch.autograd.gradcheck(distillation, (student.requires_grad_(), teacher))


def test_distillation_of_bfloat16_is_computed_in_float32_and_spares_the_teacher():
    student, teacher = random_logits(2, 9, 50, dtype=torch.bfloat16), random_logits(2, 9, 50, seed=1)
    student, teacher = student.requires_grad_(), teacher.bfloat16().requires_grad_()
    loss = distillation(student, teacher)
    wide = student.detach().double().requires_grad_()
    expected = distillation(wide, teacher.detach().double())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    (0.5 * loss).backward()
    (0.5 * expected).backward()
    assert student.grad is not None and student.grad.dtype == torch.bfloat16
    assert teacher.grad is None
    torch.testing.assert_close(student.grad.double(), wide.grad, rtol=1e-2, atol=1e-4)


def test_distillation_refuses_two_shapes():
    with pytest.raises(ClearheadError, match=r"\[2, 4, 5\].*\[2, 4, 6\]"):
        distillation(random_logits(2, 4, 5), random_logits(2, 4, 6))
    with pytest.raises(ClearheadError, match="2 positions"):
        distillation(random_logits(2, 1, 5), random_logits(2, 1, 5))


def tally_of(probability, first=None, slope=0.0):
    """What gated attention counts where the edge (l, b, h, i, j) is open with the given probability."""
    layers, b, h, t, _ = probability.shape
    found = {}
    for layer in range(layers):
        expected = torch.zeros(b, h, t, dtype=torch.float64)
        for i in range(t):
            for j in range(0 if first is None else max(int(first[i]), 0), i + 1):
                expected[..., i] += (1 + slope * (i - j)) * probability[layer, ..., i, j]
        seen = torch.arange(1, t + 1)[None] if first is None else (torch.arange(1, t + 1) - first)[None]
        found[10 - layer] = LayerCount(expected, torch.zeros(b, h, t).int(), torch.zeros(b, h, t), seen)
    return found


@pytest.mark.parametrize("slope", [0.0, 0.3])
@pytest.mark.parametrize("windowed", [False, True])
def test_shares_are_of_visible_pairs_weighted_alike(slope, windowed):
    t = 6
    first = (torch.arange(t) - 2).clamp_min(0) if windowed else None
    probability = torch.rand(2, 3, 4, t, t, dtype=torch.float64)
    shares = edge_shares(tally_of(probability, first, slope), slope)
    pairs = [(i, j) for i in range(t) for j in range(max(0, i - 2) if windowed else 0, i + 1)]
    weight = {(i, j): 1 + slope * (i - j) for i, j in pairs}
    for place, layer in enumerate([1, 0]):  # layers in ascending order: 9 is the second
        for head in range(4):
            open_ = sum(float(probability[layer, b, head, i, j]) * weight[i, j] for b in range(3) for i, j in pairs)
            assert float(shares[place, head]) == pytest.approx(open_ / (3 * sum(weight.values())))
    everything = tally_of(torch.ones(1, 1, 1, t, t, dtype=torch.float64), first, slope)
    assert float(edge_shares(everything, slope)) == pytest.approx(1.0)


def test_shares_need_a_count():
    with pytest.raises(ClearheadError, match="gates.sampled"):
        edge_shares({})


def test_penalties():
    shares = torch.tensor([[0.1, 0.5], [0.3, 0.02]], dtype=torch.float64)
    assert float(edge_penalty(shares, "mean")) == pytest.approx(0.23)
    assert float(edge_penalty(shares, "head-budget", 0.2)) == pytest.approx((0.3 + 0.1) / 4)
    assert float(edge_penalty(shares, "layer-budget", 0.2)) == pytest.approx(0.1 / 2)
    with pytest.raises(UnknownNameError, match="head-budget"):
        edge_penalty(shares, "heads")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("kind", "pushed"),
    [("mean", [[1, 1], [1, 1]]), ("head-budget", [[0, 1], [1, 0]]), ("layer-budget", [[1, 1], [0, 0]])],
)
def test_budgets_push_only_what_is_above(kind, pushed):
    shares = torch.tensor([[0.1, 0.5], [0.3, 0.02]], dtype=torch.float64, requires_grad=True)
    edge_penalty(shares, kind, 0.2).backward()
    assert shares.grad is not None
    torch.testing.assert_close(shares.grad, 0.25 * torch.tensor(pushed, dtype=torch.float64))
