import numpy as np
import pytest
import torch

from clearhead.analysis.entries import entries_of
from clearhead.analysis.shares import (
    OutputShares,
    RoutingShares,
    participation,
    pattern_overlap,
    shares,
    shuffled,
    spanning_fraction,
    spans,
    weight_coefficients,
)
from clearhead.model.weights import AttentionWeights

B, T = 3, 6


@pytest.fixture
def setting(make_lorsa):
    """Codes, original z, patterns and weights of a toy layer with 3 heads of width 4 sharing one kv head."""
    lorsa = make_lorsa(dtype=torch.float64)
    x = torch.randn(B, T, 16, dtype=torch.float64)
    z = torch.randn(B, T, 3, 4, dtype=torch.float64)
    theirs = torch.randn(B, 3, T, T, dtype=torch.float64).softmax(-1)
    return lorsa, x, z, theirs


def active_tokens(codes, head):
    where = ((codes.heads == head) & (codes.values != 0)).any(-1)
    where[:, 0] = False
    return where.nonzero().tolist()


def in_batches(codes, sizes=(2, 1)):
    first = 0
    for size in sizes:
        part = type(codes)(codes.values[first : first + size], codes.heads[first : first + size])
        yield first, size, entries_of(part, np.arange(first, first + size), first=1)
        first += size


def test_output_formula_by_loops(setting):
    lorsa, x, z, _ = setting
    codes = lorsa.encode(x)
    W_O = torch.randn(3, 4, 16, dtype=torch.float64)
    streaming = OutputShares(24, 3, 4)
    for first, size, entries in in_batches(codes):
        streaming.update(entries, entries.token - first * T, z[first : first + size].flatten(0, 1))
    found = streaming.coefficients(lorsa.W_O, W_O)
    for head in range(24):
        tokens = active_tokens(codes, head)
        direction = lorsa.W_O[head] / lorsa.W_O[head].norm()
        for m in range(3):
            terms = [float(z[b, t, m] @ W_O[m] @ direction) for b, t in tokens]
            expected = sum(terms) / len(terms) if terms else float("nan")
            assert float(found[head, m]) == pytest.approx(expected, abs=1e-5, nan_ok=True)


def test_weights_formula_by_loops(setting):
    lorsa, *_ = setting
    fields = {name: None for name in AttentionWeights.__dataclass_fields__ if name != "reads"}
    weights = AttentionWeights(**{**fields, "W_V": torch.randn(1, 16, 4), "W_O": torch.randn(3, 4, 16)})
    found = weight_coefficients(lorsa, weights)
    for head in range(24):
        for m in range(3):
            circuit = (weights.W_V[0] @ weights.W_O[m]).double()
            read, write = lorsa.W_V[head], lorsa.W_O[head]
            expected = read @ circuit @ write / (read.norm() * write.norm() * circuit.norm())
            assert float(found[head, m]) == pytest.approx(float(expected), abs=1e-6)


def test_routing_formula_by_loops(setting):
    lorsa, x, _, theirs = setting
    codes, ours = lorsa.encode(x), lorsa.patterns(x)
    streaming = RoutingShares(24, lorsa.config.group_size, 3)
    for first, size, entries in in_batches(codes):
        part = slice(first, first + size)
        streaming.update(entries, entries.token - first * T, ours[part], theirs[part])
    found = streaming.coefficients()
    for head in range(24):
        tokens = active_tokens(codes, head)
        for m in range(3):
            terms = [
                sum(min(float(ours[b, head // 6, t, j]), float(theirs[b, m, t, j])) for j in range(T))
                for b, t in tokens
            ]
            expected = sum(terms) / len(terms) if terms else float("nan")
            assert float(found[head, m]) == pytest.approx(expected, abs=1e-5, nan_ok=True)


def test_overlap_of_equal_and_of_disjoint_patterns():
    a = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]])
    b = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.25, 0.75]]]])
    torch.testing.assert_close(pattern_overlap(a, b)[0, :, 0], torch.tensor([[1.0, 0.0], [1.0, 0.75]]))


def test_a_planted_head_belongs_to_its_original(make_lorsa, model):
    """A Lorsa head cut out of one original head has its weights share there, and spans nothing else."""
    weights = model.weights(1)
    lorsa = make_lorsa(d_model=model.d_model, n_heads=4, n_groups=4, k=2)
    with torch.no_grad():
        for head in range(4):
            lorsa.W_V[head] = weights.W_V[head, :, 0]
            lorsa.W_O[head] = weights.W_O[head, 0]
    share = shares(weight_coefficients(lorsa, weights))
    assert share.argmax(-1).tolist() == [0, 1, 2, 3]
    assert float(share.max(-1).values.min()) > 0.6


def test_shares_participation_and_spanning():
    coefficients = torch.tensor([[2.0, -1.0, 0.0], [1.0, 1.0, 2.0], [-1.0, -1.0, 0.0], [3.0, 1.0, 0.0]])
    share = shares(coefficients)
    torch.testing.assert_close(share[0], torch.tensor([1.0, 0, 0]))
    torch.testing.assert_close(share[1], torch.tensor([0.25, 0.25, 0.5]))
    assert bool(share[2].isnan().all())
    torch.testing.assert_close(participation(share)[[0, 1, 3]], torch.tensor([1.0, 1 / 0.375, 1.6]))
    assert spans(share[[0, 1, 3]]).tolist() == [False, True, False]
    assert spans(torch.tensor([[0.6, 0.3, 0.1], [0.7, 0.3, 0.0]])).tolist() == [True, False]
    assert spans(torch.tensor([[1.0]])).tolist() == [False]
    with pytest.raises(ValueError, match="leave them out"):
        spans(share)


def test_spanning_fraction_and_its_interval():
    share = torch.tensor([[0.5, 0.5]] * 30 + [[1.0, 0.0]] * 70 + [[float("nan")] * 2] * 20)
    found = spanning_fraction(share)
    assert found is not None
    assert (found.fraction, found.n_heads) == (0.3, 100)
    # the same bootstrap, head by head
    rng = np.random.default_rng(0)
    drawn = (rng.random((2000, 100)) < 0.3).mean(1)
    assert found.low == pytest.approx(np.quantile(drawn, 0.025), abs=0.015)
    assert found.high == pytest.approx(np.quantile(drawn, 0.975), abs=0.015)
    assert spanning_fraction(share[100:]) is None


def test_shuffled_is_a_permutation_decided_by_the_seed():
    write = torch.arange(12.0)[:, None]
    assert torch.equal(shuffled(write, 1), shuffled(write, 1))
    assert not torch.equal(shuffled(write, 1), shuffled(write, 2))
    assert torch.equal(shuffled(write, 1).sort(0).values, write)
