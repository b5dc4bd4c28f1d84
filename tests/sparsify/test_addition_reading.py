"""Reading elsewhere: which other sums are drawn, what the intervention is, and what is concluded."""

import pytest
import torch

from clearhead.data.addition import ANSWER, Addition, addition
from clearhead.sparsify.addition_edges import INPUTS, open_edges, predict
from clearhead.sparsify.addition_reading import (
    CHANGES,
    HELD,
    SOURCES,
    conclude,
    explained_by_carry,
    measure_reading,
    other_sums,
    read_elsewhere,
    read_places,
)
from tests.sparsify.adding_models import few_sums, sparse_adder


@pytest.mark.parametrize("digit", [0, 1, 2])
@pytest.mark.parametrize("change", ["tens", "units, same carry", "units, other carry"])
def test_other_sums_differ_in_what_they_should_and_in_nothing_else(change, digit):
    sums = addition("held_out")
    others = other_sums(sums, change, digit)
    tens, units = [0, 3], [1, 4]
    kept = units if change == "tens" else tens
    assert torch.equal(others.tokens[:, kept], sums.tokens[:, kept])
    own, theirs = sums.tokens[:, ANSWER], others.tokens[:, ANSWER]
    same_carry = others.carries[:, 0] == sums.carries[:, 0]
    if change == "tens":
        assert same_carry.all() and torch.equal(own[:, 2], theirs[:, 2])
        hundreds = own[:, 0] == theirs[:, 0]
        assert not hundreds.any() if digit == 0 else hundreds.all() and (own[:, 1] != theirs[:, 1]).all()
    elif change == "units, same carry":
        assert same_carry.all() and torch.equal(own[:, :2], theirs[:, :2]) and (own[:, 2] != theirs[:, 2]).all()
    else:
        assert not same_carry.any() and (own[:, 1] != theirs[:, 1]).all()
        assert torch.equal(own[~sums.cascades, 0], theirs[~sums.cascades, 0])
    assert torch.equal(other_sums(sums, change, digit).tokens, others.tokens)
    assert len(others.tokens[:, kept].unique(dim=0)) < len(others.tokens.unique(dim=0))


@pytest.mark.parametrize("sink", [None, 0.5])
@pytest.mark.parametrize("place", [5, 7])
def test_reading_all_earlier_places_elsewhere_is_standing_in_the_other_sum(sink, place):
    model, sums = sparse_adder(sink), few_sums()
    others = other_sums(sums, "units, other carry", 1)
    found = read_elsewhere(model, sums, others, place, list(range(place)))
    tokens = others.tokens[:, : place + 1].clone()
    tokens[:, place] = sums.tokens[:, place]
    expected = model.run(tokens, read=["logits"], path="eager").logits[:, place]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    own = model.run(sums.tokens[:, :-1], read=["logits"], path="eager").logits[:, place]
    assert (found - own).abs().max() > 1e-2


@pytest.mark.parametrize("sink", [None, 0.5])
def test_reading_the_same_sum_changes_nothing(sink):
    model, sums = sparse_adder(sink), few_sums()
    own = model.run(sums.tokens[:, :-1], read=["logits"], path="eager").logits[:, 6]
    torch.testing.assert_close(read_elsewhere(model, sums, sums, 6, [1, 4]), own, rtol=1e-4, atol=1e-4)


def test_a_place_with_no_open_edge_to_a_pair_stays_whatever_the_pair_is():
    model, sums = sparse_adder(bias=-1e4), few_sums()
    own = predict(model, sums)
    rows = measure_reading(model, sums, open_edges(model, sums))
    assert [(row["digit"], row["source"]) for row in rows] == [
        (digit, source) for digit in ("c2", "c1", "c0") for source in SOURCES
    ]
    for row in rows:
        assert row["per_sum_by_layer"] == [0.0, 0.0] and row["open"] == {"no_carry": 0.0, "carry": 0.0}
        column = ("c2", "c1", "c0").index(row["digit"])
        right = (own == sums.tokens[:, ANSWER])[:, column]
        carry = sums.carries[:, 0]
        assert row["closed"]["carry"] == float(right[carry].double().mean())
        assert row["explained_by_carry"] is None
    changes = {(row["digit"], change): found for row in rows for change, found in row["changes"].items()}
    # no such sums: c1 changes with every other carry, and the tens never change c0
    assert changes["c1", "units, other carry"]["stays"] is None and changes["c0", "tens"]["follows"] is None
    right = (own == sums.tokens[:, ANSWER])[:, 2]
    assert changes["c0", "tens"]["stays"] == float(right.double().mean())


def test_the_carry_s_share_of_what_is_received_is_that_of_the_layers_outputs():
    model, sums = sparse_adder(), few_sums()
    found = explained_by_carry(model, sums, 6, list(range(7)))
    run = model.run(sums.tokens[:, :-1], read=["attn_out.*"], path="eager")
    received = torch.cat([run[f"attn_out.{layer}"][:, 6] for layer in (0, 1)], dim=1).double()
    within = received.clone()
    for carry in (False, True):
        within[sums.carries[:, 0] == carry] -= received[sums.carries[:, 0] == carry].mean(0)
    assert found == pytest.approx(1 - float(within.square().sum() / (received - received.mean(0)).square().sum()))
    assert found is not None and 0 < found < 1


def test_a_place_that_sees_nothing_but_the_carry_receives_nothing_else():
    sums = few_sums()
    tokens = sums.tokens.clone()
    tokens[:, 0] = sums.carries[:, 0].long()  # the first token tells the carry, and its place reads no other
    told = Addition(tokens, sums.carries, sums.cascades)
    assert explained_by_carry(sparse_adder(bias=1e4), told, 0, [0]) == pytest.approx(1.0)


def test_gathered_units_may_be_anywhere_before_but_at_the_tens():
    assert [INPUTS[key] for key in read_places("units, gathered", 6)] == ["a0", "+", "b0", "="]
    assert [INPUTS[key] for key in read_places("tens", 6)] == ["a1", "b1"]
    assert [INPUTS[key] for key in read_places("units", 6)] == ["a0", "b0"]


def made_up(value: float) -> list[dict]:
    both = {"follows": value, "stays": value}
    return [
        {
            "digit": digit,
            "source": source,
            "changes": {change: both for change in changes},
            "explained_by_carry": value,
        }
        for digit in ("c1", "c0")
        for source, changes in (("tens", CHANGES[:1]), ("units", CHANGES[1:]), ("units, gathered", CHANGES[1:]))
    ]


def test_a_statement_holds_where_all_of_its_numbers_do():
    assert [claim["held"] for claim in conclude(made_up(HELD))] == [True] * 5
    rows = made_up(1.0)
    rows[1]["changes"] = dict.fromkeys(CHANGES[1:], {"follows": 0.5, "stays": None})
    claims = conclude(rows)
    assert [claim["held"] for claim in claims] == [True, True, True, False, True]
    assert claims[3]["numbers"] == {"follows_the_other_carry": 0.5}
    rows[2]["explained_by_carry"] = 0.3  # it uses the carry only, and receives more
    assert [claim["held"] for claim in conclude(rows)] == [True, True, True, False, False]
    rows[3]["changes"] = {"tens": {"follows": None, "stays": None}}
    assert not conclude(rows)[0]["held"]
