"""Circuits of graph edges as a level: planted edges, grouped keys, forwards that begin at a layer."""

import pytest
import torch

from clearhead.circuits.curves.curve import score, trace_curve
from clearhead.circuits.curves.graph_edges import GraphEdges
from clearhead.circuits.formats.graph_circuits import drop_disconnected, eap_graph, rank_connected
from clearhead.data.tasks import logit_difference
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from tests.circuits import induction
from tests.circuits.induction import induction_model, induction_rows
from tests.circuits.masked_graphs import ROWS, masked
from tests.circuits.planted import planted_model, planted_rows
from tests.circuits.random_rows import double_model, ungrouped_model
from tests.sparsify.gated_models import break_embedding, gated_model

PLANTED = ["a0.h1->a1.h2<v>", "a1.h2->logits", "input->a0.h1<v>"]


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_forwards_that_begin_at_a_layer_give_the_same_metrics(family):
    level = GraphEdges(double_model(family))
    n = level.count(ROWS)
    keep = torch.rand(6, 2, n, generator=torch.Generator().manual_seed(0)) < 0.7
    keep[:3, :, : level.parts.place("attention", 1).start] = True
    keep[3, 0] = False
    keep[4, 1] = True
    found = level.evaluate(keep, ROWS)[..., 0]
    for circuit, mask in enumerate(keep):
        expected = logit_difference(masked(level, mask), ROWS)
        assert torch.allclose(found[circuit], expected, rtol=0, atol=1e-10)
    edges = torch.tensor([n - 1, 3, 40])
    single = torch.ones(3, 1, n, dtype=torch.bool)
    single[torch.arange(3), 0, edges] = False
    whole = level.evaluate(torch.ones(1, 1, n, dtype=torch.bool), ROWS)[0, :, 0]
    assert torch.allclose(
        level.exact_effects(ROWS, edges), (whole - level.evaluate(single, ROWS)[..., 0]).T, rtol=0, atol=1e-12
    )


def test_grouped_keys_are_the_sum_of_their_copies(monkeypatch):
    grouped, copied = GraphEdges(double_model("llama")), GraphEdges(ungrouped_model(monkeypatch))
    assert (grouped.count(ROWS), copied.count(ROWS)) == (82, 110)
    scores, wide = grouped.attribution(ROWS), copied.attribution(ROWS)
    place = {name: index for index, name in enumerate(copied.parts.names)}
    expanded = eap_graph(grouped.parts, scores[0])
    assert set(expanded["edges"]) == set(place)
    for index, name in enumerate(grouped.parts.names):
        writer, _, reader = name.partition("->")
        if ".kv" in reader:
            group, kind = int(reader.partition(".kv")[2][0]), reader[-3:]
            copies = [place[f"{writer}->{reader[:2]}.h{head}{kind}"] for head in (2 * group, 2 * group + 1)]
        else:
            copies = [place[name]]
        assert torch.allclose(scores[:, index], wide[:, copies].sum(1), rtol=0, atol=1e-6 * wide.abs().max())
    half = torch.rand(82, generator=torch.Generator().manual_seed(0)) < 0.5
    edges = eap_graph(grouped.parts, scores[0], half)["edges"]
    same = torch.tensor([edges[name]["in_graph"] for name in copied.parts.names])
    found, expected = (
        level.evaluate(one[None, None], ROWS)[0, :, 0] for level, one in ((grouped, half), (copied, same))
    )
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)


def test_gated_models_have_graphs():
    model, _ = gated_model("llama")
    level = GraphEdges(model)
    n = level.count(ROWS)
    ends = level.evaluate(torch.tensor([[[True]], [[False]]]).expand(-1, 1, n), ROWS)[..., 0]
    for value, tokens in zip(ends, (ROWS.clean, ROWS.corrupt), strict=True):
        own = logit_difference(model.run(tokens).logits[:, -1], ROWS)
        assert torch.allclose(value, own, rtol=0, atol=1e-5)
    assert any("gates" in note for note in level.notes)


@pytest.mark.parametrize("method", ["exact", "ig"])
def test_planted_edges_are_found(method):
    level, rows = GraphEdges(planted_model()), planted_rows(2)
    (scores,) = level.scores(method, [rows])
    assert sorted(level.parts.names[i] for i in scores.mean(0).argsort(descending=True)[:3]) == PLANTED
    ranking = score(level, method, [rows], [rows])
    curve = trace_curve(level, ranking, "signed", [rows], dict.fromkeys(range(2), "one"))
    assert (curve.first, curve.stable) == (3, 3)
    assert sorted(curve.circuit) == PLANTED
    order = rank_connected(level.parts, scores.mean(0))
    assert [level.parts.names[i] for i in order[:3]] == PLANTED[1::-1] + PLANTED[2:]


@pytest.mark.parametrize("method", ["exact", "ig"])
@pytest.mark.parametrize("corrupt", ["match", "answer"])
def test_planted_induction_goes_through_keys_or_values(corrupt, method):
    level, rows = GraphEdges(induction_model()), induction_rows(corrupt)
    ranking = score(level, method, [rows], [rows])
    curve = trace_curve(level, ranking, "signed", [rows], dict.fromkeys(range(2), "one"), refine=False)
    planted = induction.GRAPH_EDGES[corrupt]
    assert (curve.first, curve.stable) == (len(planted), len(planted))
    assert sorted(curve.circuit) == planted
    keep = torch.tensor([name in planted for name in level.parts.names])
    assert torch.equal(drop_disconnected(level.parts, keep), keep)


def test_bad_input_is_refused():
    model = double_model("gpt2")
    with pytest.raises(ClearheadError, match="no learned constants"):
        GraphEdges(model, "optimal")
    level = GraphEdges(model)
    with pytest.raises(UnknownNameError, match="'mask'"):
        level.scores("mask", [ROWS])
    with pytest.raises(ClearheadError, match="2 prompts or 1, 110 edges"):
        level.evaluate(torch.ones(1, 1, 3, dtype=torch.bool), ROWS)
    with pytest.raises(ClearheadError, match="at least 1 step"):
        level.attribution(ROWS, steps=0)


def test_numbers_that_are_not_finite_are_refused():
    model = double_model("gpt2")
    break_embedding(model, int(ROWS.clean[0, 0]))
    with pytest.raises(NonFiniteError, match="residual stream of gpt2 at layer 0"):
        GraphEdges(model).attribution(ROWS)


def test_the_same_items_with_other_answers_are_other_prompts():
    level, other = GraphEdges(double_model("gpt2")), ROWS._replace(answers=ROWS.answers[::-1])
    none = torch.zeros(1, 1, level.count(ROWS), dtype=torch.bool)
    before, after = level.evaluate(none, ROWS), level.evaluate(none, other)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, GraphEdges(level.model).evaluate(none, other), rtol=0, atol=0)
