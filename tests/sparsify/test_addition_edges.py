"""Open edges of the addition toy, counted and closed."""

import pytest
import torch

from clearhead.data.addition import ANSWER, Addition, addition
from clearhead.errors import ClearheadError
from clearhead.sparsify.addition_edges import (
    INPUTS,
    accuracies,
    by_carry,
    by_kind_of_carry,
    close_classes,
    close_heads,
    mean_patterns,
    open_edges,
    predict,
    random_gates,
    random_share,
)
from tests.sparsify.adding_models import dense_adder, few_sums, sparse_adder


@pytest.mark.parametrize("sink", [None, 0.5])
def test_open_edges_are_those_of_the_fused_operation(sink):
    model, sums = sparse_adder(sink), few_sums()
    opened = open_edges(model, sums)
    assert model.gates is not None
    with torch.no_grad(), model.gates.hard() as tally:
        model.hf(input_ids=sums.tokens[:, :-1])
    counted = torch.stack([layer.opened for layer in tally.values()], dim=1)
    assert torch.equal(opened.sum(-1), counted)
    assert 0.1 < float(opened.double().mean()) < 0.9 and not opened[:, 1, -1].any()
    assert not opened.triu(1).any()
    with pytest.raises(ClearheadError, match="no edge gates"):
        open_edges(dense_adder(), sums)


def test_maps_are_means_over_the_sums_without_and_with_a_carry():
    sums = few_sums()
    opened = open_edges(sparse_adder(), sums)
    single, any_head = by_carry(opened, sums)
    carry = sums.carries[:, 0].float().mean()
    torch.testing.assert_close(single[0] * (1 - carry) + single[1] * carry, opened.float().mean(0))
    assert (any_head >= single.amax(2) - 1e-6).all() and (any_head <= single.sum(2) + 1e-6).all()


@pytest.mark.parametrize("sink", [None, 0.5])
def test_closing_what_was_never_open_changes_nothing_and_closing_a_head_is_zeroing_it(sink):
    model, sums = sparse_adder(sink), few_sums()
    opened = open_edges(model, sums)
    tokens = sums.tokens[:, :-1]

    def logits(closed, **edit):
        from clearhead.sparsify.addition_edges import _closing

        edits = {f"scores.{layer}": _closing(mask) for layer, mask in enumerate(closed) if mask.any()}
        return model.run(tokens, read=["logits"], edit=edits | edit, path="eager").logits

    none = torch.zeros_like(opened[0])
    plain = logits(none)
    if sink is not None:
        assert torch.equal(logits(~opened.any(0)), plain)
    head = none.clone()
    head[0, 1] = True

    def zero(z, _run):
        z = z.clone()
        z[:, :, 1] = 0
        return z

    assert torch.equal(logits(head), logits(none, **{"z.0": zero}))
    assert torch.equal(predict(model, sums, head), logits(head)[:, 5:].argmax(-1))
    assert not torch.equal(logits(head), plain)


def test_with_all_edges_closed_a_digit_depends_on_its_own_token_alone():
    model, sums = sparse_adder(), few_sums()
    predicted = predict(model, sums, torch.ones(2, 2, 8, 8, dtype=torch.bool))
    assert len(predicted[:, 0].unique()) == 1  # the token before c2 is always =
    for token in range(10):
        assert len(predicted[sums.tokens[:, 7] == token, 2].unique()) <= 1


def test_accuracies_are_counted_by_digit_and_by_carry():
    sums = addition("held_out")
    right = sums.tokens[:, ANSWER]
    assert set(accuracies(right, sums).values()) == {1.0}
    wrong = right.clone()
    carry = sums.carries[:, 0]
    wrong[carry, 1] = (wrong[carry, 1] + 1) % 10
    share = float(carry.double().mean())
    found = accuracies(wrong, sums)
    assert found == pytest.approx(
        {"exact_match": 1 - share, "no_carry": 1.0, "carry": 0.0, "c2": 1.0, "c1": 1 - share, "c0": 1.0}
    )
    kinds = by_kind_of_carry(wrong, sums)
    assert sum(kind["sums"] for kind in kinds) == len(sums) and min(kind["sums"] for kind in kinds) > 20
    assert [kind["exact_match"] for kind in kinds] == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    plain = Addition.of_pairs(torch.tensor([11]), torch.tensor([11]))
    assert by_kind_of_carry(plain.tokens[:, ANSWER], plain)[2]["c0"] is None
    with pytest.raises(ClearheadError, match="give some of both"):
        accuracies(plain.tokens[:, ANSWER], plain)


def test_every_class_and_head_that_is_ever_open_has_a_row():
    model, sums = sparse_adder(), few_sums()
    opened = open_edges(model, sums)
    classes = close_classes(model, sums, opened)
    assert len(classes) == int(opened.any(2).any(0).sum())
    assert [row["exact_match"] for row in classes] == sorted(row["exact_match"] for row in classes)
    total = float(opened.double().sum((1, 2, 3, 4)).mean())
    assert sum(row["per_sum"] for row in classes) == pytest.approx(total)
    row = classes[-1]
    closed = torch.zeros_like(opened[0])
    closed[row["layer"], :, INPUTS.index(row["query"]), INPUTS.index(row["key"])] = True
    assert {name: row[name] for name in ("carry", "c0")} == {
        name: value for name, value in accuracies(predict(model, sums, closed), sums).items() if name in ("carry", "c0")
    }
    heads = close_heads(model, sums, opened)
    assert [(row["layer"], row["head"]) for row in heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sum(row["per_sum"] for row in heads) == pytest.approx(total)
    assert heads[3]["per_sum"] == 0 and heads[3]["c1"] == accuracies(predict(model, sums), sums)["c1"]


def test_random_edges_have_the_density_asked_for():
    model, sums = sparse_adder(), few_sums(4)
    shares = torch.tensor([[0.0, 1.0], [1.0, 0.5]])
    rates = dict(enumerate(shares))
    assert random_share(model, sums, rates) == pytest.approx(2.5 / 4, abs=0.06)
    assert random_share(model, sums, {0: torch.ones(2), 1: torch.ones(2)}) == 1.0
    found = random_gates(model, sums, shares, draws=range(3))
    assert 0 <= found["mean"] <= found["largest"] <= 1


def test_the_dense_model_s_attention_is_a_mean_of_distributions():
    patterns = mean_patterns(dense_adder(), few_sums())
    assert patterns.shape == (2, 2, 8, 8)
    torch.testing.assert_close(patterns.sum(-1), torch.ones(2, 2, 8))
