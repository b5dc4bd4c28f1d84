import math

import pytest
import torch

from clearhead.errors import NonFiniteError
from clearhead.sparsify.measures import (
    EdgeCounts,
    by_position,
    losses,
    measure_induction,
    measure_losses,
)
from clearhead.training import repeats
from tests.model.tiny_configs import VOCABULARY
from tests.sparsify.gated_models import (
    LENGTH,
    break_embedding,
    dense_model,
    edges_of,
    gated_model,
    layers_of,
    random_tokens,
)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_losses_by_position(batch):
    model, tokens = dense_model("llama"), random_tokens()
    found, counts = measure_losses(model, tokens, batch=batch)
    logits = model.run(tokens).logits
    for position in range(LENGTH - 1):
        expected = [-math.log(logits[n, position].softmax(-1)[tokens[n, position + 1]]) for n in range(3)]
        assert float(found[position]) == pytest.approx(sum(expected) / 3)
    assert counts.sequences == 0


def test_losses_of_bfloat16_are_computed_in_float32():
    tokens = random_tokens()
    logits = torch.randn(3, LENGTH, VOCABULARY).bfloat16()
    torch.testing.assert_close(losses(logits, tokens), losses(logits.float(), tokens), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("length", [None, 7])
def test_edges_counted_by_loops(family, length):
    (model, gates), tokens = gated_model(family), random_tokens()
    _, counts = measure_losses(model, tokens, lambda _: gates.hard(), batch=2)
    summary = counts.summary(length)
    rows = length or LENGTH
    shares, expected_shares, per_query, expected_per_query, empty, leak = [], [], [], [], [], []
    for _, scores, bias, first in layers_of(model, gates, tokens):
        edges = edges_of(scores, bias, first)
        for head in range(model.n_heads):
            mine = [edges[n, head, i] for n in range(3) for i in range(rows)]
            pairs = [pair for row in mine for pair in row.values()]
            opened = sum(opens for opens, _, _ in pairs)
            likely = sum(1 / (1 + math.exp(-x)) if x > -700 else 0.0 for _, x, _ in pairs)
            shares.append(opened / len(pairs))
            expected_shares.append(likely / len(pairs))
            per_query.append(opened / len(mine))
            expected_per_query.append(likely / len(mine))
            empty.append(sum(not any(opens for opens, _, _ in row.values()) for row in mine) / len(mine))
            leak.append(sum(p for opens, _, p in pairs if not opens) / len(mine))
    expected = {
        "share": shares,
        "expected_share": expected_shares,
        "per_query": per_query,
        "expected_per_query": expected_per_query,
        "empty_rows": empty,
        "leak": leak,
    }
    assert set(summary) == set(expected)
    for name, values in expected.items():
        assert summary[name] == pytest.approx(sum(values) / len(values)), name
    assert counts.shares(length).flatten().tolist() == pytest.approx(shares)
    assert 0 < summary["share"] < 1 and 0 < summary["empty_rows"] < 1 and 0 < summary["leak"] < 1


def test_first_positions_are_a_shorter_sequence():
    (model, gates), tokens = gated_model("llama"), random_tokens()
    whole, counts = measure_losses(model, tokens, lambda _: gates.hard())
    short, fewer = measure_losses(model, tokens[:, :9], lambda _: gates.hard())
    torch.testing.assert_close(whole[:8], short)
    assert counts.summary(9) == pytest.approx(fewer.summary())


def test_sampled_gates_do_not_depend_on_the_batch():
    (model, gates), tokens = gated_model("gpt2"), random_tokens()
    one, counts = measure_losses(model, tokens, lambda first: gates.sampled(4, first), batch=1)
    all_, more = measure_losses(model, tokens, lambda first: gates.sampled(4, first), batch=3)
    torch.testing.assert_close(one, all_)
    assert torch.equal(counts.opened, more.opened)
    other, _ = measure_losses(model, tokens, lambda first: gates.sampled(5, first))
    assert not torch.allclose(one, other)


def test_counts_of_nothing():
    assert EdgeCounts().layers == [] and EdgeCounts().sequences == 0


def test_induction_is_that_of_training():
    model, alphabet = dense_model("gpt2"), torch.arange(VOCABULARY)
    found = measure_induction(model, alphabet, LENGTH, batch=5)
    first, second = repeats.measure_induction(model.hf, alphabet, LENGTH, 32)
    assert (found["first_half"], found["second_half"]) == pytest.approx((first, second))


def test_bins_double():
    values = torch.arange(1.0, 7.0, dtype=torch.float64)
    bins = by_position({"base": None, "hard": values})
    assert [(x["first"], x["last"], x["hard"], x["base"]) for x in bins] == [
        (1, 1, 1.0, None),
        (2, 3, 2.5, None),
        (4, 6, 5.0, None),
    ]
    mean = sum(x["hard"] * (x["last"] - x["first"] + 1) for x in bins) / 6
    assert mean == pytest.approx(float(values.mean()))


def test_losses_that_are_no_numbers_are_refused():
    model = dense_model("gpt2")
    break_embedding(model, 3)
    tokens = random_tokens().clamp_min(4)
    tokens[1, 6] = 3
    with pytest.raises(NonFiniteError, match="dense gpt2.*position 0"):  # tied: the logit of token 3 is NaN
        measure_losses(model, tokens)
