import pytest
import torch

from clearhead.data import addition as module
from clearhead.data.addition import ANSWER, PLACES, TOKENS, Addition, addition, loss_mask, token_strings
from clearhead.errors import UnknownNameError


def read(row: torch.Tensor) -> tuple[int, int, int]:
    a, b, c = "".join(token_strings(row)).replace("=", "+").split("+")
    return int(a), int(b), int(c)


def test_every_sum_is_right_and_each_pair_is_in_one_split():
    train, held_out = addition("train"), addition("held_out")
    assert (len(train), len(held_out)) == (9000, 1000)
    rows = torch.cat([train.tokens, held_out.tokens])
    assert rows.shape == (10_000, len(PLACES)) and rows.dtype == torch.int64
    triples = [read(row) for row in rows]
    assert all(a + b == c for a, b, c in triples)
    assert {(a, b) for a, b, _ in triples} == {(a, b) for a in range(100) for b in range(100)}


def test_carries_and_cascades_are_those_of_the_digits():
    made = addition("held_out")
    expected = []
    for row in made.tokens:
        a, b, c = read(row)
        expected.append((a % 10 + b % 10 > 9, c > 99, a // 10 + b // 10 == 9))
    found = torch.cat([made.carries, made.cascades[:, None]], dim=1)
    assert found.tolist() == [list(flags) for flags in expected]
    cascading = made.carries[made.cascades]
    assert torch.equal(cascading[:, 0], cascading[:, 1])  # what a cascade is
    assert bool(cascading.any()) and not bool(cascading.all())


def test_a_sum_is_written_place_by_place():
    made = Addition.of_pairs(torch.tensor([37]), torch.tensor([8]))
    assert token_strings(made.tokens[0]) == ["3", "7", "+", "0", "8", "=", "0", "4", "5"]
    assert PLACES[ANSWER] == ("c2", "c1", "c0") and len(TOKENS) == 12
    assert (made.carries.tolist(), made.cascades.tolist()) == ([[True, False]], [False])


def test_the_loss_mask_is_true_where_the_next_token_is_a_digit_of_the_sum():
    places = [following for following, counted in zip(PLACES[1:], loss_mask().tolist(), strict=True) if counted]
    assert places == ["c2", "c1", "c0"]


def test_the_split_depends_on_the_seed_alone():
    assert torch.equal(addition("train", 3).tokens, addition("train", 3).tokens)
    assert not torch.equal(addition("train", 3).tokens, addition("train", 4).tokens)
    first = ["".join(token_strings(row)) for row in addition("held_out").tokens[:3]]
    assert first == [
        "89+03=092",
        "38+30=068",
        "80+47=127",
    ]  # another hash or order would make every earlier result another experiment
    with pytest.raises(UnknownNameError, match="held_out"):
        module.addition("test")
