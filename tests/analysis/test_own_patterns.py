"""Post-hoc ranks and own patterns: planted cases, brute force by loops, what has no number."""

import math

import pytest
import torch

from clearhead.analysis.own_patterns import head_ranks, own_share
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError

GENERATOR = torch.Generator().manual_seed(8)
X = torch.randn(24, 10, 16, generator=GENERATOR)


def batches():
    return X.split(5)


def planted(make_lorsa, **options) -> Lorsa:
    """Four heads of one group, of which head m looks along its first m + 1 coordinates only."""
    lorsa = make_lorsa(n_heads=4, n_groups=1, k=4, patterns_per_group=4, activation="signed-topk", **options)
    with torch.no_grad():
        lorsa.W_Q.mul_(1.5)
        lorsa.W_K.mul_(1.5)
        coordinates = torch.arange(lorsa.qk_gate.shape[1])
        lorsa.qk_gate.copy_((coordinates <= torch.arange(4)[:, None]).float())
    return lorsa


@pytest.mark.parametrize("options", [{}, {"rope": True}, {"softcap": 2.0}, {"sinks": True}], ids=str)
def test_planted_ranks_are_found(options, rope, make_lorsa):
    options = options | {"rope": rope} if "rope" in options else options
    found = head_ranks(planted(make_lorsa, **options), batches, keep=1 - 1e-6)
    assert found.rank.tolist() == [1, 2, 3, 4]
    assert [sorted(found.order[m, : m + 1].tolist()) for m in range(4)] == [list(range(m + 1)) for m in range(4)]
    assert found.cases.tolist() == [64] * 4 and bool((found.kept.diff(dim=1).abs() > 1e-3).any())


def test_what_is_kept_by_loops(make_lorsa):
    lorsa = make_lorsa(n_heads=12, n_groups=2, k=12, activation="signed-topk", qk_norm="rms", window=4)
    found = head_ranks(lorsa, batches, keep=0.9, tokens_per_head=20)
    head, used = 7, 3
    chosen = found.order[head, :used]
    whole, cut = [], []
    for x in X.split(1):
        q, k = (side[0, 1] for side in lorsa.queries_keys(x))
        v = lorsa.values(x)[0, :, head]
        for i in range(1, 10):
            row = range(max(0, i - 3), i + 1)
            for z, keep in ((whole, torch.arange(8)), (cut, chosen)):
                weights = [math.exp(8**-0.5 * float(q[i, keep] @ k[j, keep])) for j in row]
                z.append(sum(w * float(v[j]) for w, j in zip(weights, row, strict=True)) / sum(weights))
    z, short = torch.tensor(whole[:20]), torch.tensor(cut[:20])
    expected = 1 - (z - short).square().sum() / (z - z.mean()).square().sum()
    assert float(found.kept[head, used]) == pytest.approx(float(expected), abs=1e-4)
    rank = int(found.rank[head])
    assert bool((found.kept[head, rank:] >= 0.9).all()) and (rank == 0 or float(found.kept[head, rank - 1]) < 0.9)


def test_without_a_rotation_ranks_count_singular_directions(make_lorsa):
    lorsa = make_lorsa(n_heads=8, n_groups=2, k=8, activation="signed-topk")
    with torch.no_grad():
        mix = torch.randn(2, 8, 8)
        lorsa.W_K.copy_(torch.linalg.inv(mix).mT @ torch.randn(2, 8, 16))
        lorsa.W_Q.copy_(mix @ torch.cat([torch.randn(2, 2, 16), torch.zeros(2, 6, 16)], 1))
        lorsa.b_Q.zero_()
    before = lorsa.W_Q.detach().clone()
    assert head_ranks(lorsa, batches, keep=1 - 1e-5).rank.tolist() == [2] * 8
    assert torch.equal(lorsa.W_Q, before)


def test_silent_heads_have_no_rank(make_lorsa):
    lorsa = make_lorsa(n_heads=8, n_groups=2, k=3, activation="topk")
    with torch.no_grad():
        lorsa.b_V[2] = -1000.0
    found = head_ranks(lorsa, batches)
    assert int(found.rank[2]) == -1 and bool(found.kept[2].isnan().all()) and int(found.cases[2]) == 0
    assert bool((found.rank[torch.arange(8) != 2] >= 0).all())
    with pytest.raises(ClearheadError, match="no share of a variance"):
        head_ranks(lorsa, batches, keep=1.5)


@torch.no_grad()
def test_patterns_of_their_own_against_brute_force(make_lorsa):
    lorsa = make_lorsa(n_heads=12, n_groups=2, k=4, patterns_per_group=3)
    lorsa.W_Q.mul_(4)
    lorsa.qk_gate[:3] = 1.0  # the first group's patterns are one and the same
    lorsa.qk_gate[3:].normal_(generator=GENERATOR)
    found = own_share(lorsa, batches, tokens_per_head=1000)
    overlaps = [[[] for _ in range(6)] for _ in range(12)]
    for x in X.split(1):
        patterns, codes = lorsa.patterns(x)[0], lorsa.encode(x)
        for i in range(1, 10):
            for head, value in zip(codes.heads[0, i].tolist(), codes.values[0, i].tolist(), strict=True):
                for other in range(6):
                    if value != 0:
                        least = torch.minimum(patterns[head // 2, i], patterns[other, i])
                        overlaps[head][other].append(float(least.sum()))
    for head in range(12):
        others = [p for p in range(head // 6 * 3, head // 6 * 3 + 3) if p != head // 2]
        expected = max(sum(overlaps[head][p]) / len(overlaps[head][p]) for p in others)
        assert float(found.overlap[head]) == pytest.approx(expected, abs=1e-5)
    assert found.n_heads == 12 and found.share == pytest.approx(float((found.overlap < 0.8).float().mean()))
    assert found.low <= found.share <= found.high and 0 < found.share <= 0.5


def test_a_shared_pattern_is_nobodys_own(lorsa):
    found = own_share(lorsa, batches)
    assert (found.share, found.low, found.high) == (0.0, 0.0, 0.0)
    with pytest.raises(ClearheadError, match="no head was active"):
        own_share(lorsa, lambda: [X[:1, :2]])


def test_a_lorsa_in_float64_has_the_same_ranks(make_lorsa):
    options = {"n_heads": 12, "n_groups": 2, "k": 4, "patterns_per_group": 3}
    plain, precise = make_lorsa(**options), make_lorsa(**options).double()
    double = lambda: [x.double() for x in batches()]  # noqa: E731
    assert torch.allclose(head_ranks(plain, batches).kept, head_ranks(precise, double).kept, atol=1e-4, equal_nan=True)
    assert own_share(precise, double).share == own_share(plain, batches).share
