import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.sparsify.edge_controls import keep_edges, measure_controls, random_edges, top_in_row, top_probability
from clearhead.sparsify.measures import measure_losses
from tests.sparsify.gated_models import LENGTH, dense_model, gated_model, random_tokens

LAYERS = [0, 1]
BASE = ("random_base", "top_in_row_base", "top_in_row_base_renormalised", "top_probability_base")


def opened_counts(model, gates, tokens):
    with torch.no_grad(), gates.hard() as tally:
        model.hf(input_ids=tokens)
    return {layer: tally[layer].opened for layer in tally}


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
@pytest.mark.parametrize("renormalise", [False, True])
def test_top_in_row_by_loops(family, renormalise):
    (model, gates), base, tokens = gated_model(family), dense_model(family), random_tokens()
    counts = opened_counts(model, gates, tokens)
    edits = keep_edges(top_in_row(counts), LAYERS, None, renormalise=renormalise)
    run = base.run(tokens, read=["scores.0", "scores.1", "pattern.0", "pattern.1"], edit=edits)
    for layer in LAYERS:
        dense, found = run[f"scores.{layer}"].softmax(-1).tolist(), run[f"pattern.{layer}"]
        for n in range(3):
            for head in range(4):
                for i in range(LENGTH):
                    row, count = dense[n][head][i], int(counts[layer][n, head, i])
                    kept = sorted(range(LENGTH), key=lambda j, row=row: -row[j])[:count]
                    mass = sum(row[j] for j in kept) if renormalise else 1.0
                    expected = [row[j] / mass if j in kept else 0.0 for j in range(LENGTH)]
                    assert found[n, head, i].tolist() == pytest.approx(expected, rel=1e-5)  # softmax in float32


def test_top_probability_by_loops():
    (model, gates), base, tokens = gated_model("llama"), dense_model("llama"), random_tokens()
    counts = opened_counts(model, gates, tokens)
    run = base.run(tokens, read=["scores.1", "pattern.1"], edit=keep_edges(top_probability(counts), LAYERS, None))
    dense, found = run["scores.1"].softmax(-1), run["pattern.1"]
    for n in range(3):
        for head in range(4):
            values = dense[n, head].flatten().tolist()
            count = int(counts[1][n, head].sum())
            kept = set(sorted(range(len(values)), key=lambda place, values=values: -values[place])[:count])
            expected = [value if place in kept else 0.0 for place, value in enumerate(values)]
            assert found[n, head].flatten().tolist() == pytest.approx(expected, rel=1e-5)


def test_as_many_are_kept_also_where_weights_are_equal():
    pattern = torch.full((1, 1, 3, 3), 1 / 3)
    kept = top_in_row({0: torch.tensor([[[1, 0, 2]]])})(0, pattern)
    assert kept.sum(-1).tolist() == [[[1, 0, 2]]]
    assert int(top_probability({0: torch.tensor([[[1, 0, 2]]])})(0, pattern).sum()) == 3


def test_random_edges_have_their_rates_and_differ_between_sequences_layers_and_seeds():
    rates = {0: torch.tensor([0.0, 0.1, 1.0]), 3: torch.tensor([0.5, 0.5, 0.5])}
    pattern = torch.zeros(4, 3, 100, 100)
    drawn = random_edges(rates, seed=1)(0, pattern)
    shares = drawn.double().mean((2, 3))
    assert not shares[:, 0].any() and bool(shares[:, 2].eq(1).all())
    assert shares[:, 1].tolist() == pytest.approx([0.1] * 4, abs=0.015)
    fair = random_edges(rates, seed=1)(3, pattern)
    assert float((fair[0] == fair[1]).double().mean()) == pytest.approx(0.5, abs=0.02)
    assert float((fair == random_edges(rates, seed=2)(3, pattern)).double().mean()) == pytest.approx(0.5, abs=0.02)
    assert torch.equal(random_edges(rates, seed=1, first=2)(3, pattern)[:2], fair[2:])


@pytest.mark.parametrize("sink", [None, 1.5])
@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_the_gates_are_the_top_of_every_row_of_the_sparse_model(family, sink):
    (model, gates), tokens = gated_model(family, sink), random_tokens()
    hard = model.run(tokens, read=["pattern.0", "pattern.1", "logits"])
    edits = keep_edges(top_in_row(opened_counts(model, gates, tokens)), LAYERS, gates)
    with gates.opened():
        run = model.run(tokens, read=["pattern.0", "pattern.1", "logits"], edit=edits)
    for site in ("pattern.0", "pattern.1", "logits"):
        torch.testing.assert_close(run[site], hard[site], rtol=1e-4, atol=1e-5)  # softmax in float32


def test_controls_are_mean_losses_of_the_edited_runs():
    (model, gates), base, tokens = gated_model("llama"), dense_model("llama"), random_tokens()
    rates = torch.rand(2, 4, dtype=torch.float64)
    found = measure_controls(model, base, tokens, rates, [0, 1], batch=2)
    hard, _ = measure_losses(model, tokens, lambda _: gates.hard())
    assert found["hard"] == pytest.approx(float(hard.mean()))
    counts = opened_counts(model, gates, tokens)
    logits = base.run(tokens, edit=keep_edges(top_in_row(counts), LAYERS, None)).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert found["top_in_row_base"] == pytest.approx(float(expected))
    rate_of = dict(enumerate(rates))
    two = [
        base.run(tokens, edit=keep_edges(random_edges(rate_of, seed), LAYERS, None)).logits[:, :-1] for seed in (0, 1)
    ]
    ce = [float(torch.nn.functional.cross_entropy(x.flatten(0, 1), tokens[:, 1:].flatten())) for x in two]
    assert found["random_base"] == pytest.approx(sum(ce) / 2)
    assert len(set(found.values())) == len(found) == 7


def test_with_all_edges_every_control_is_the_dense_model():
    (model, gates), base, tokens = gated_model("gpt2"), dense_model("gpt2"), random_tokens()
    gates.set_bias(torch.full((2, 4), 1e4, dtype=torch.float64))
    found = measure_controls(model, base, tokens, torch.ones(2, 4, dtype=torch.float64), [0])
    opened, _ = measure_losses(model, tokens, lambda _: gates.opened())
    dense, _ = measure_losses(base, tokens)
    for name, value in found.items():
        assert value == pytest.approx(float((dense if name in BASE else opened).mean())), name


def test_without_a_base_its_controls_are_none():
    found = measure_controls(gated_model("gpt2")[0], None, random_tokens(1), torch.full((2, 4), 0.5), [0])
    assert {name for name, value in found.items() if value is None} == set(BASE)


def test_a_dense_model_is_refused():
    with pytest.raises(ClearheadError, match="dense gpt2"):
        measure_controls(dense_model("gpt2"), None, random_tokens(), torch.ones(2, 4), [0])
