"""Scores of graph edges are gradients of their masks; integrated, with frozen scales, with grouped keys."""

import pytest
import torch

from clearhead.circuits.curves.graph_edges import GraphEdges
from clearhead.circuits.curves.graph_scores import score_edges
from clearhead.circuits.patching.graph_parts import GraphParts
from clearhead.data.tasks import logit_difference
from tests.circuits.masked_graphs import EXACT, FLOAT32_INSIDE, ROWS, masked
from tests.circuits.random_rows import double_model, random_rows


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
