"""Masked graphs, scores and circuits of graph edges: identities in float64, planted edges, grouped keys."""

import json

import pytest
import torch

from clearhead.circuits.curve import score, trace_curve
from clearhead.circuits.graph_circuits import drop_disconnected, eap_graph, rank_connected, write_eap
from clearhead.circuits.graph_edges import GraphEdges
from clearhead.circuits.graph_parts import GraphParts
from clearhead.circuits.graph_patching import MaskedGraph
from clearhead.circuits.graph_scores import score_edges
from clearhead.data.tasks import logit_difference
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from tests.circuits import induction
from tests.circuits.induction import induction_model, induction_rows
from tests.circuits.planted import planted_model, planted_rows
from tests.circuits.random_rows import double_model, random_rows, ungrouped_model
from tests.model import tiny_configs
from tests.sparsify.gated_models import break_embedding, gated_model

ROWS = random_rows(2, 6)
EXACT = ["gpt2", "gptj", "gpt_neox", "opt", "bloom", "gpt_bigcode"]  # float64 throughout
FLOAT32_INSIDE = ["llama", "qwen3", "gemma2", "olmo2", "cohere", "granite"]
PLANTED = ["a0.h1->a1.h2<v>", "a1.h2->logits", "input->a0.h1<v>"]


def masked(level, mask, *, grad=False):
    replacing = level.replacement.values(ROWS)
    return MaskedGraph(level.parts, ROWS.clean, mask, replacing).run(grad=grad)


@pytest.mark.parametrize("family", EXACT + FLOAT32_INSIDE)
def test_all_edges_are_the_model_and_none_is_the_replacing_run(family):
    model = double_model(family)
    level = GraphEdges(model)
    ones = torch.ones(2, level.count(ROWS), dtype=torch.bool)
    own, corrupt = (model.run(tokens).logits[:, -1] for tokens in (ROWS.clean, ROWS.corrupt))
    assert torch.allclose(masked(level, ones), own, rtol=0, atol=1e-10)
    assert torch.allclose(masked(level, ~ones), corrupt, rtol=0, atol=1e-10)
    half = torch.rand(ones.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    mixed = masked(level, half)
    assert (mixed - own).abs().max() > 0.01
    assert (mixed - corrupt).abs().max() > 0.01


@pytest.mark.parametrize("family", EXACT + FLOAT32_INSIDE)
@pytest.mark.parametrize("ablation", ["corrupt", "zero"])
def test_scores_are_the_gradient_of_the_masks_of_edges(family, ablation):
    level = GraphEdges(double_model(family), ablation)
    mask = torch.ones(2, level.count(ROWS), dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(logit_difference(masked(level, mask, grad=True), ROWS).sum(), mask)
    error = (level.attribution(ROWS) - expected).abs().max() / expected.abs().max()
    assert error < (1e-10 if family in EXACT else 1e-5)


def test_the_gradient_of_the_mask_is_its_difference_quotient():
    level = GraphEdges(double_model("gpt2"), "mean", reference=[random_rows(4, 6, seed=1)])
    scores = level.attribution(ROWS)
    for edge in scores[0].abs().argsort(descending=True)[:5].tolist():
        sides = []
        for step in (1e-4, -1e-4):
            mask = torch.ones(2, level.count(ROWS), dtype=torch.float64)
            mask[0, edge] += step
            sides.append(logit_difference(masked(level, mask), ROWS)[0])
        assert float((sides[0] - sides[1]) / 2e-4) == pytest.approx(float(scores[0, edge]), rel=1e-6)


def test_a_reader_sees_its_own_mixture():
    """Only the edge from a head to another head's queries is dropped: against an edit of these queries alone."""
    model = double_model("gpt2")
    level = GraphEdges(model)
    keep = torch.ones(2, level.count(ROWS), dtype=torch.bool)
    keep[:, level.parts.names.index("a0.h2->a1.h3<q>")] = False
    z = model.run(ROWS.corrupt, read=["z.0"])["z.0"]
    weights = model.weights(1)

    def queries(value, run):
        stream = run["resid_pre.1"] + (z[:, :, 2] - run["z.0"][:, :, 2]) @ model.weights(0).W_O[2]
        own = weights.project(model.places.layers[1].ln_1(stream)).q
        return torch.cat([value[:, :3], own[:, 3:]], 1)

    expected = model.run(ROWS.clean, read=["resid_pre.1", "z.0", "logits"], edit={"q_pre.1": queries}).logits[:, -1]
    assert torch.allclose(masked(level, keep), expected, rtol=0, atol=1e-10)
    assert not torch.allclose(expected, model.run(ROWS.clean).logits[:, -1], rtol=0, atol=1e-3)


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


def test_integrated_gradients_are_the_mean_over_mixed_embeddings():
    level = GraphEdges(double_model("gpt2"))
    replacing = level.replacement.values(ROWS)
    one = score_edges(level.parts, ROWS, replacing, steps=1)
    assert not torch.allclose(one, score_edges(level.parts, ROWS, replacing), rtol=1e-3)
    # all that leaves the embedding carries the whole effect: ∫ ∂M/∂x_0 · (x_0 − x_0') along the path
    clean, corrupt = (
        logit_difference(level.model.run(tokens).logits[:, -1], ROWS) for tokens in (ROWS.clean, ROWS.corrupt)
    )
    total = clean - corrupt
    embedding = [name.startswith("input->") for name in level.parts.names]
    scores = level.attribution(ROWS, steps=16)[:, embedding].sum(1)
    assert (scores - total).abs().max() < 0.05 * total.abs().max()
    assert (one[:, embedding].sum(1) - total).abs().max() > 0.2 * total.abs().max()


def test_frozen_scales_leave_out_the_norms_response():
    model = double_model("gpt2")
    exact, frozen = GraphEdges(model).attribution(ROWS), GraphEdges(model, frozen_scale=True).attribution(ROWS)
    last = [name.endswith("->logits") for name in GraphParts(model).names]
    assert torch.equal(exact[:, last], frozen[:, last])  # the logits read the stream in front of their norm
    assert not torch.allclose(exact, frozen, rtol=0.01)


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


def test_disconnected_edges_change_nothing():
    level = GraphEdges(double_model("llama"))
    keep = torch.rand(20, level.count(ROWS), generator=torch.Generator().manual_seed(2)) < 0.15
    left = torch.stack([drop_disconnected(level.parts, mask) for mask in keep])
    assert (left <= keep).all()
    assert 0 < int(left.sum()) < int(keep.sum()) - 20
    found, expected = (level.evaluate(some[:, None], ROWS)[..., 0] for some in (left, keep))
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    names = level.parts.names
    path = torch.tensor([name in ("input->a0.h0<q>", "a0.h0->a1.kv0<k>", "a1.h1->logits") for name in names])
    assert torch.equal(drop_disconnected(level.parts, path), path)  # kv head 0 serves query head 1
    broken = torch.tensor([name in ("input->a0.h0<q>", "a0.h0->a1.kv0<k>", "a1.h2->logits") for name in names])
    assert not drop_disconnected(level.parts, broken).any()


@pytest.mark.parametrize("absolute", [True, False])
def test_connected_rankings_are_connected_and_whole(absolute):
    parts = GraphParts(double_model("llama"))
    scores = torch.randn(parts.n_edges, generator=torch.Generator().manual_seed(0))
    order = rank_connected(parts, scores, absolute=absolute)
    assert sorted(order.tolist()) == list(range(parts.n_edges))
    key = scores.abs() if absolute else scores
    into = [name.partition("->")[2] for name in parts.names]
    best = max((i for i, name in enumerate(into) if name == "logits"), key=lambda i: key[i])
    assert int(order[0]) == best
    serves = {"a1.h0": ("a1.h0<q>", "a1.kv0<k>", "a1.kv0<v>"), "a1.h3": ("a1.h3<q>", "a1.kv1<k>", "a1.kv1<v>")}
    for writer, readers in serves.items():
        first = next(i for i, edge in enumerate(order.tolist()) if parts.names[edge].startswith(f"{writer}->"))
        reached = {into[edge] for edge in order[:first].tolist()}
        assert f"{readers[0]}" not in reached  # a head's queries are read only once the head is in


def test_names_and_file(tmp_path):
    parts = GraphParts(double_model("gpt2"))
    assert parts.names[:3] == ["input->a0.h0<q>", "input->a0.h1<q>", "input->a0.h2<q>"]
    assert parts.names[-2:] == ["a1.h3->logits", "m1->logits"]
    scores = torch.arange(parts.n_edges, dtype=torch.float64)
    keep = scores > 100
    write_eap(tmp_path / "importances.json", parts, scores, keep)
    found = json.loads((tmp_path / "importances.json").read_text())
    assert found["cfg"] == {"n_layers": 2, "n_heads": 4, "parallel_attn_mlp": False, "d_model": 32}
    assert list(found["edges"]) == parts.names
    assert found["edges"]["m1->logits"] == {"score": parts.n_edges - 1, "in_graph": True}
    assert found["nodes"]["logits"] == {"in_graph": True}


def test_bad_input_is_refused():
    with pytest.raises(ClearheadError, match="normalises its values"):
        GraphEdges(double_model("gemma4_text"))
    with pytest.raises(ClearheadError, match="no softmax attention"):
        GraphEdges(double_model("qwen3_next"))
    model = double_model("gpt2")
    with pytest.raises(ClearheadError, match="no learned constants"):
        GraphEdges(model, "optimal")
    level = GraphEdges(model)
    with pytest.raises(UnknownNameError, match="'mask'"):
        level.scores("mask", [ROWS])
    with pytest.raises(ClearheadError, match="2 prompts or 1, 110 edges"):
        level.evaluate(torch.ones(1, 1, 3, dtype=torch.bool), ROWS)
    with pytest.raises(ClearheadError, match="each of 110 edges"):
        drop_disconnected(level.parts, torch.ones(3, dtype=torch.bool))
    with pytest.raises(ClearheadError, match="at least 1 step"):
        level.attribution(ROWS, steps=0)


def test_numbers_that_are_not_finite_are_refused():
    model = double_model("gpt2")
    break_embedding(model, int(ROWS.clean[0, 0]))
    with pytest.raises(NonFiniteError, match="residual stream of gpt2 at layer 0"):
        GraphEdges(model).attribution(ROWS)


def test_gpt2_small_has_the_published_number_of_edges(monkeypatch):
    """EAP-IG and MIB count 158 nodes and 32,491 edges."""
    shape = tiny_configs.GPT2 | {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 24}
    monkeypatch.setitem(tiny_configs.CONFIGS, "gpt2_small", shape)
    parts = GraphParts(double_model("gpt2_small"))
    assert len(parts.writers) + 1 == 158
    assert parts.n_edges == len(set(parts.names)) == 32_491
