import numpy as np
import pyarrow as pa
import pytest
import torch

from clearhead.analysis.entries import entries_of
from clearhead.analysis.families import (
    OVERLAP,
    PairOverlaps,
    effective_rank,
    family_rows,
    find_families,
    label_families,
)
from clearhead.analysis.looking import Looks
from clearhead.dictionaries.lorsa import Codes, Lorsa, LorsaConfig

D, T, BLOCKS, RANK = 12, 16, 12, 4
COPY = range(RANK)
"""Heads 0 to 3: the rank-1 pieces of one head that copies whatever stands one token back."""
GROUPS, SIZE = 4, 4


@pytest.fixture(scope="module")
def x():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(BLOCKS, T, D, generator=generator)


@pytest.fixture(scope="module")
def lorsa():
    """Four groups of four heads: pieces of one copying head, and heads that read elsewhere or other content."""
    config = LorsaConfig(d_model=D, n_heads=GROUPS * SIZE, n_groups=GROUPS, d_qk=4, k=16, activation="signed-topk")
    lorsa = Lorsa(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    lorsa.W_V.copy_(torch.linalg.qr(torch.randn(D, D, generator=generator)).Q.repeat(2, 1)[: GROUPS * SIZE])
    lorsa.W_O.copy_(torch.linalg.qr(torch.randn(D, D, generator=generator)).Q.repeat(2, 1)[: GROUPS * SIZE])
    return lorsa


def patterns():
    """By group: one token back, itself, spread over all tokens, spread over all tokens."""
    itself = torch.eye(T)
    back = torch.eye(T).roll(1, 0)
    back[0] = itself[0]
    even = torch.ones(T, T).tril()
    even = even / even.sum(-1, keepdim=True)
    return torch.stack([back, itself, even, even])


def overlaps(lorsa, x, active, order=None):
    """Pair overlaps, the given heads being active; `active` [b, t, n]."""
    found = PairOverlaps(lorsa.n_heads)
    for b in order or range(len(x)):
        values = lorsa.values(x[b : b + 1])[0]
        pre = torch.einsum("pqk,kpn->qpn", patterns(), values.view(T, GROUPS, SIZE)).reshape(T, -1)
        codes = Codes((pre * active[b])[None], torch.arange(lorsa.n_heads).expand(1, T, -1))
        entries = entries_of(codes, np.array([b]), 1)
        found.update(entries, entries.token % T, patterns(), values, SIZE, 1)
    return found


@pytest.fixture(scope="module")
def everywhere(lorsa, x):
    return overlaps(lorsa, x, torch.ones(BLOCKS, T, lorsa.n_heads))


def test_overlap_is_the_mean_of_its_formula(everywhere, lorsa, x):
    one, other, count, overlap = everywhere.pairs()
    assert (one < other).all()
    assert (count == BLOCKS * (T - 1)).all()
    assert everywhere.n_queries == BLOCKS * (T - 1)
    where = {(a, b): size for a, b, size in zip(one.tolist(), other.tolist(), overlap, strict=True)}
    values = lorsa.values(x)
    for a, b in ((0, 1), (1, 9), (9, 14), (4, 12)):
        sizes = []
        for block in range(BLOCKS):
            for i in range(1, T):
                rows = [(patterns()[n // SIZE, i] * values[block, :, n]).abs() for n in (a, b)]
                sizes.append(sum(float(min(p / rows[0].sum(), q / rows[1].sum())) for p, q in zip(*rows, strict=True)))
        assert where[a, b] == pytest.approx(np.mean(sizes), abs=1e-5)


def test_pieces_of_one_copying_head_come_out_as_one_family(everywhere, lorsa):
    families = find_families(everywhere, lorsa)
    assert [set(family.heads) for family in families] == [set(COPY), {4, 5, 6, 7}]
    copying = families[0]
    assert copying.overlap == pytest.approx(1)
    assert copying.read_rank == pytest.approx(RANK)
    assert copying.write_rank == pytest.approx(RANK)


def test_the_threshold_lies_between_planted_families_and_all_other_pairs(everywhere):
    one, other, _, overlap = everywhere.pairs()
    same = (one // SIZE == other // SIZE) & (one < 2 * SIZE)
    assert overlap[same].min() > OVERLAP + 0.1
    assert overlap[~same].max() < OVERLAP - 0.04  # the same even pattern, but other content: other tokens are read


def test_heads_that_are_seldom_active_together_are_no_family(lorsa, x):
    active = torch.ones(BLOCKS, T, lorsa.n_heads)
    active[:, :, 4:] = 0
    active[:, ::2, 0] = 0
    active[:, 1::2, 1] = 0  # 0 and 1 read the same but never at one query
    active[:, :, 2:4] = 0
    active[0, 3, 2] = active[0, 3, 0] = 1  # one common query is no evidence
    assert find_families(overlaps(lorsa, x, active), lorsa) == []


def test_neither_order_nor_batches_matter(everywhere, lorsa, x):
    other = overlaps(lorsa, x, torch.ones(BLOCKS, T, lorsa.n_heads), order=list(reversed(range(BLOCKS))))
    assert [f.heads for f in find_families(other, lorsa)] == [f.heads for f in find_families(everywhere, lorsa)]
    none = PairOverlaps(lorsa.n_heads)
    assert find_families(none, lorsa) == []


def test_effective_rank_counts_directions():
    assert effective_rank(torch.eye(5)[:3] * torch.tensor([1.0, 5.0, 0.1])[:, None]) == pytest.approx(3)
    assert effective_rank(torch.ones(4, 7)) == pytest.approx(1)
    assert effective_rank(torch.cat([torch.ones(1, 7), torch.zeros(2, 7)])) == pytest.approx(1)
    assert effective_rank(torch.zeros(2, 3)) == 0


def test_labels_name_what_the_examples_have_in_common(everywhere, lorsa):
    families = find_families(everywhere, lorsa)
    unit = np.repeat(np.arange(8), 4)
    example = np.arange(32)
    offset = np.where(unit < 4, 1, np.arange(32) % 7)
    key = np.where(unit < 4, np.arange(32) % 5, 2)
    looks = Looks(unit, np.zeros(32, np.int64), example, key, offset, np.full(32, 9))
    strings = pa.array([f" t{i}" for i in range(8)]).take
    assert label_families(families, looks, strings) == ["1 token back", "at ' t2'"]
    first = looks._replace(place=np.zeros(32, np.int64))
    assert label_families(families, first, strings) == ["the first token"] * 2
    mixed = looks._replace(offset=np.arange(32) * 9 % 32, key=np.arange(32) % 8)
    assert label_families(families, mixed, strings) == ["", ""]
    near = mixed._replace(offset=np.arange(32) % 4)
    assert label_families(families, near, strings) == ["up to 2 tokens back"] * 2
    rows = family_rows(families, 7, [f"lorsa.7.{i}" for i in range(16)], looks, strings)
    assert rows["family"] == ["family.7.0", "family.7.1"]
    assert set(rows["units"][0]) == {"lorsa.7.0", "lorsa.7.1", "lorsa.7.2", "lorsa.7.3"}
