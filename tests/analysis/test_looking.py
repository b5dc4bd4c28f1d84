from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from clearhead.analysis.looking import (
    Looks,
    base_rates,
    count_offsets,
    count_tokens,
    relate_looks,
    strongest_looks,
)

T = 8


@pytest.fixture(scope="module")
def tokens():
    """40 blocks of rare tokens; token 5 stands at position 6 of blocks 0 to 5, token 9 one before it."""
    tokens = np.random.default_rng(0).integers(20, 400, (40, T))
    tokens[:6, 6], tokens[:6, 5] = 5, 9
    return tokens


@pytest.fixture(scope="module")
def contexts():
    """Head 0 looks from token 5 one back in six examples, with weak terms elsewhere; head 1 has one example."""
    unit = np.array([0, 0, 0, 0, 0, 0, 0, 1])
    block = np.array([0, 1, 2, 3, 4, 5, 6, 7])
    category = np.array([0, 0, 0, 0, 0, 0, 1, 0])  # the seventh is no top example
    position = np.full(8, 6)
    example = np.array([0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7])
    key = np.array([0, 1, 2, 3, 5, 5, 5, 5, 5, 4, 3, 6], dtype=np.int32)
    weight = np.array([0.01, 0.2, -0.3, 0.15, 1.0, 1, 1, -1, 1, 1, 1, 2], dtype=np.float32)
    chosen = SimpleNamespace(unit=unit, category=category)
    return SimpleNamespace(chosen=chosen, block=block, position=position, terms=lambda: (example, key, weight))


def test_keys_that_matter_are_the_largest_terms(contexts, tokens):
    looks = strongest_looks(contexts, tokens)
    assert looks.unit.tolist() == [0] * 6 + [1]
    assert looks.query.tolist() == [5] * 6 + [tokens[7, 6]]
    first = looks.example == 0
    assert looks.offset[first].tolist() == [1, 4, 5]  # by size; the fourth and the weak one are left out
    assert looks.key[first].tolist() == [9, tokens[0, 2], tokens[0, 1]]
    assert looks.place[first].tolist() == [5, 2, 1]


def test_shares_and_lifts_are_those_of_a_count(contexts, tokens):
    looks = strongest_looks(contexts, tokens)
    offsets = count_offsets(looks)
    mine = offsets.unit == 0
    assert offsets.what[mine][0] == 1
    assert offsets.share[mine].sum() == pytest.approx(1)
    assert offsets.share[0] == 5 / 8
    keys = count_tokens(looks, "key")
    assert (keys.unit[0], keys.what[0], keys.cases[0], keys.share[0]) == (0, 9, 5, 5 / 6)
    related = relate_looks(looks, tokens, 400, pa.array([f"t{i}" for i in range(400)]).take)
    query, key, distance = related
    rate = base_rates(tokens, 400)
    assert rate.sum() == pytest.approx(1)
    assert [(q, o, v, s) for q, o, v, s in zip(query.unit, query.other, query.value, query.share, strict=True)] == [
        (0, "embedding.5", 1 / rate[5], 1.0)
    ]  # one example of head 1 proves nothing
    assert key.other.tolist() == ["embedding.9"]
    assert key.label.to_pylist() == ["t9"]
    assert key.value[0] == pytest.approx(5 / 6 / rate[9])
    assert ("offset.1", "1 token back") in set(zip(distance.other.tolist(), distance.label.to_pylist(), strict=True))
    assert ("offset.0", "the token itself") in set(
        zip(distance.other.tolist(), distance.label.to_pylist(), strict=True)
    )


def test_a_frequent_token_is_no_finding(contexts, tokens):
    common = tokens.copy()
    common[common != 9] = 5
    found = relate_looks(strongest_looks(contexts, common), common, 400, pa.array(["x"] * 400).take)
    assert "embedding.5" not in found[0].other.tolist()


def test_three_keys_of_an_example_are_three_draws():
    """A token of rate 1/100 in two of three examples: p = 0.0003 in three draws, 0.003 in the nine that there were."""
    text = np.r_[np.full(10, 5), 20 + np.arange(990)].reshape(10, 100)
    key = np.array([5, 20, 21, 5, 22, 23, 24, 25, 26])
    nothing = np.zeros(9, dtype=np.int64)
    looks = Looks(np.zeros(3, int), np.array([5, 5, 30]), np.arange(3).repeat(3), key, nothing, nothing)
    query, found, _ = relate_looks(looks, text, 2000, pa.array([f"t{i}" for i in range(2000)]).take)
    assert query.other.tolist() == ["embedding.5"] and not len(found.other)
