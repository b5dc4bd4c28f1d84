"""Every reader's own mixture of writers, against the model's own runs and an edit of one head's queries."""

import pytest
import torch

from clearhead.circuits.curves.graph_edges import GraphEdges
from tests.circuits.masked_graphs import EXACT, FLOAT32_INSIDE, ROWS, masked
from tests.circuits.random_rows import double_model


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
