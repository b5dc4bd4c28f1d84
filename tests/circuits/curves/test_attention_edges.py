"""Scores of attention edges against gradients, differences and single patches; planted edges; counts."""

import dataclasses

import pytest
import torch

from clearhead.circuits.curves.attention_edges import AttentionEdges, describe_circuits, describe_edges
from clearhead.circuits.curves.curve import score, trace_curve
from clearhead.circuits.patching.metrics import METRICS
from clearhead.data.tasks import logit_difference
from clearhead.errors import ClearheadError, UnknownNameError
from tests.circuits import induction
from tests.circuits.induction import induction_model, induction_rows
from tests.circuits.planted import planted_model, planted_rows
from tests.circuits.random_rows import double_model, random_rows, ungrouped_model
from tests.sparsify.gated_models import gated_model

ROWS = random_rows()
PLANTED = ["edge.0.1.0@5", "edge.1.2.5@5"]


def level_of(kind, ablation="corrupt", **options):
    name, _, sink = kind.partition("+")
    family, _, gated = name.partition(" ")
    model = gated_model(family, float(sink) if sink else None)[0] if gated else double_model(family)
    return AttentionEdges(model, ablation, reference=[random_rows(4, seed=1)], **options)


def masked_metric(level, rows, keep):
    """Σ over prompts of the logit difference under a mask [b, l, h, q, k] of numbers."""
    run = level._patching(rows).run(keep, read=["logits"], grad=True)
    return logit_difference(run.logits[:, 0], rows).sum()


def full_mask(level, rows):
    t = rows.clean.shape[1]
    shape = (len(rows.items), level.model.n_layers, level.model.n_heads, t, t)
    return torch.ones(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "ablation", "gates"),
    [
        ("llama", "corrupt", "recomputed"),
        ("llama", "positional_mean", "recomputed"),
        ("gemma2", "zero", "recomputed"),
        ("mistral", "corrupt", "recomputed"),
        ("llama gated", "corrupt", "recomputed"),
        ("llama gated", "corrupt", "frozen"),
        ("gpt2 gated+0.5", "zero", "frozen"),
        ("gpt2 gated+0.5", "corrupt", "recomputed"),
    ],
)
def test_one_backward_gives_the_gradient_of_every_edges_mask(kind, ablation, gates):
    level = level_of(kind, ablation, gates=gates)
    mask = full_mask(level, ROWS).requires_grad_()
    (expected,) = torch.autograd.grad(masked_metric(level, ROWS, mask), mask)
    expected = expected.flatten(1)[:, level.places(7).flat]
    scores = level.attribution(ROWS)
    assert torch.allclose(scores, expected, rtol=0, atol=1e-10 * expected.abs().max())
    assert len(scores[0].unique()) > 20


def test_the_gradient_of_the_mask_is_its_difference_quotient():
    level = level_of("gpt2")  # its softmax is in float64
    scores, flat = level.attribution(ROWS), level.places(7).flat
    for edge in scores[0].abs().argsort(descending=True)[:3].tolist():
        sides = []
        for step in (1e-4, -1e-4):
            mask = full_mask(level, ROWS)
            mask[0].view(-1)[flat[edge]] += step
            sides.append(masked_metric(level, ROWS, mask).detach())
        assert torch.allclose((sides[0] - sides[1]) / 2e-4, scores[0, edge], rtol=1e-6, atol=1e-9)


def test_integrated_gradients_sum_to_the_whole_effect():
    level = level_of("llama")
    n = level.count(ROWS)
    ends = level.evaluate(torch.tensor([[[True]], [[False]]]).expand(-1, 1, n), ROWS)[..., 0]
    total = ends[0] - ends[1]
    errors = [(level.attribution(ROWS, steps=steps).sum(1) - total).abs().max() for steps in (2, 16)]
    assert errors[1] < 0.05 * total.abs().max()
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize("kind", ["llama", "llama gated"])
def test_exact_effects_are_those_of_single_patches(kind):
    level, rows = level_of(kind), random_rows(2, 5)
    n = level.count(rows)
    effects = level.exact_effects(rows)
    keep = torch.ones(n, 1, n, dtype=torch.bool)
    keep[torch.arange(n), 0, torch.arange(n)] = False
    whole = level.evaluate(torch.ones(1, 1, n, dtype=torch.bool), rows)[..., 0]
    assert torch.allclose(effects, (whole - level.evaluate(keep, rows)[..., 0]).T, rtol=0, atol=1e-12)
    some = torch.tensor([[3, 50], [0, 7]])
    assert torch.allclose(level.exact_effects(rows, some), effects.gather(1, some), rtol=0, atol=1e-12)
    assert (effects != 0).sum() > 40


def test_closed_edges_have_no_effect():
    level = level_of("llama gated", gates="frozen")
    effects, scores = level.exact_effects(ROWS), level.attribution(ROWS)
    opened = level.model.run(ROWS.clean, read=["pattern.*"])
    closed = torch.stack([opened["pattern.0"] == 0, opened["pattern.1"] == 0], 1).flatten(1)[:, level.places(7).flat]
    assert 0.2 < closed.double().mean() < 0.9
    assert not effects[closed].any()
    assert not scores[closed].any()


def test_metrics_of_a_circuit_are_those_of_a_plain_run():
    level = level_of("llama")
    n = level.count(ROWS)
    keep = torch.rand(5, 3, n, generator=torch.Generator().manual_seed(0)) < 0.5
    keep[0] = True
    keep[1, :, level.places(7).layer == 0] = True
    found = level.evaluate(keep, ROWS)
    assert found.shape == (5, 3, len(METRICS))
    t, patching = 7, level._patching(ROWS)
    for circuit in range(5):
        mask = torch.ones(3, 2 * 4 * t * t, dtype=torch.bool)
        mask[:, level.places(t).flat] = keep[circuit]
        logits = patching.run(mask.view(3, 2, 4, t, t), read=["logits"]).logits[:, 0]
        assert torch.allclose(found[circuit, :, 0], logit_difference(logits, ROWS), rtol=0, atol=1e-10)
    own = logit_difference(level.model.run(ROWS.clean, path="eager").logits[:, -1], ROWS)
    assert torch.allclose(found[0, :, 0], own, rtol=0, atol=1e-10)


def test_grouped_keys_score_as_their_copies_do(monkeypatch):
    grouped, copied = double_model("llama"), ungrouped_model(monkeypatch)
    first, second = (AttentionEdges(model).attribution(ROWS) for model in (grouped, copied))
    assert torch.allclose(first, second, rtol=0, atol=1e-6 * first.abs().max())


@pytest.mark.parametrize("method", ["exact", "ig"])
def test_planted_edges_are_found(method):
    level, rows = AttentionEdges(planted_model()), planted_rows(2)
    names = level.names(rows)
    (scores,) = level.scores(method, [rows])
    for row in scores:
        assert sorted(names[i] for i in row.argsort(descending=True)[:2]) == PLANTED
    keep = torch.tensor([name in PLANTED for name in names])
    n = level.count(rows)
    ends = torch.stack([torch.zeros(n), torch.ones(n)]).bool()
    empty, full, circuit = level.evaluate(torch.cat([ends, keep[None]])[:, None], rows)[..., 0]
    assert (((circuit - empty) / (full - empty)) > 0.9).all()
    curve = trace_curve(level, score(level, method, [], [rows]), "signed", [rows], dict.fromkeys(range(2), "one"))
    assert (curve.first, curve.stable) == (2, 2)
    (counts, *_) = describe_edges(level, rows, keep.expand(2, -1))
    assert (counts.edges, counts.heads, counts.pairs_per_head, counts.bos) == (2, 2, 1.0, 1)
    assert (counts.open_edges, counts.open_bos) == (168, 48)
    means = describe_circuits(level, [rows, rows], [scores, scores], 2)
    assert means == {name: float(number) for name, number in dataclasses.asdict(counts).items()}


@pytest.mark.parametrize("corrupt", ["match", "answer"])
def test_planted_induction_needs_the_edges_of_its_corruption(corrupt):
    level, rows = AttentionEdges(induction_model()), induction_rows(corrupt)
    ranking = score(level, "exact", [], [rows])
    planted = induction.EDGES[corrupt]
    names = level.names(rows)
    for row in ranking.of_batches[0]:
        assert sorted(names[i] for i in row.argsort(descending=True)[: len(planted)]) == planted
    curve = trace_curve(level, ranking, "signed", [rows], dict.fromkeys(range(2), "one"), refine=False)
    assert (curve.first, curve.stable) == (len(planted), len(planted))
    assert curve.complement is not None
    assert abs(curve.complement) < 0.05


def test_edges_to_the_first_token_can_belong_to_every_circuit():
    every, rest = level_of("llama gated"), level_of("llama gated", freeze_bos=True)
    assert (every.count(ROWS), rest.count(ROWS)) == (8 * 28, 8 * 21)
    names, left = every.names(ROWS), rest.names(ROWS)
    assert [name for name in names if ".0@" not in name] == left
    keep = torch.rand(2, 3, len(left), generator=torch.Generator().manual_seed(0)) < 0.5
    wide = torch.ones(2, 3, len(names), dtype=torch.bool)
    wide[..., [names.index(name) for name in left]] = keep
    assert torch.allclose(every.evaluate(wide, ROWS), rest.evaluate(keep, ROWS), rtol=0, atol=1e-12)
    counts = describe_edges(rest, ROWS, torch.ones(3, len(left), dtype=torch.bool))
    assert all(one.bos == 0 and one.edges == one.open_edges < len(left) for one in counts)
    assert any("belong to every circuit and are not counted" in note for note in rest.notes)


def test_windows_bound_the_edges():
    level = level_of("gemma2")  # layer 0 sees 4 keys
    places = level.places(7)
    assert int((places.query - places.key)[places.layer == 0].max()) == 3
    assert int((places.query - places.key)[places.layer == 1].max()) == 6


def test_bad_input_is_refused():
    model = double_model("llama")
    with pytest.raises(UnknownNameError, match="'mean'.*positional_mean"):
        AttentionEdges(model, "mean")
    with pytest.raises(ClearheadError, match="give prompts of a task"):
        AttentionEdges(model, "positional_mean")
    with pytest.raises(ClearheadError, match="no edge gates to freeze"):
        AttentionEdges(model, gates="frozen")
    with pytest.raises(UnknownNameError, match="'relevance'"):
        AttentionEdges(model).scores("relevance", [ROWS])
    with pytest.raises(ClearheadError, match="has lengths \\[5\\]"):
        AttentionEdges(model, "positional_mean", reference=[random_rows(length=5)]).attribution(ROWS)
    with pytest.raises(ClearheadError, match="224 edges"):
        AttentionEdges(model).evaluate(torch.ones(1, 1, 3, dtype=torch.bool), ROWS)
    with pytest.raises(ClearheadError, match="at least 1 step"):
        AttentionEdges(model).attribution(ROWS, steps=0)


def test_edges_that_are_no_components_stay_whole_on_the_path_of_integrated_gradients():
    level = level_of("gpt2", freeze_bos=True)
    n = level.count(ROWS)
    ends = level.evaluate(torch.stack([torch.zeros(1, n).bool(), torch.ones(1, n).bool()]), ROWS)[..., 0]
    summed = level.attribution(ROWS, steps=30).sum(1)
    torch.testing.assert_close(summed, ends[1] - ends[0], rtol=0, atol=0.01)


def test_the_same_items_with_another_corruption_are_other_prompts():
    level, other = level_of("gpt2"), ROWS._replace(corrupt=ROWS.corrupt.roll(1, 0))
    none = torch.zeros(1, 1, level.count(ROWS), dtype=torch.bool)
    before, after = level.evaluate(none, ROWS), level.evaluate(none, other)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, level_of("gpt2").evaluate(none, other), rtol=0, atol=0)
