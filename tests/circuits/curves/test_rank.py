"""Scores of components against their definitions: loops, finite differences, sums."""

import pytest
import torch
from torch import Tensor

from clearhead.circuits.curves.attention_edges import AttentionEdges
from clearhead.circuits.curves.node_level import NodeLevel
from clearhead.circuits.curves.rank import attribution, exact_effects, integrated_gradients, mask_gradient, relevance
from clearhead.circuits.patching.ablation import Replacement
from clearhead.circuits.patching.components import Components
from clearhead.circuits.patching.nodes import Nodes, select_rows
from clearhead.data.tasks import logit_difference
from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.model.gates import install
from tests.circuits.patching.test_nodes import by_loops, open_nodes, random_rows, tiny
from tests.circuits.planted import CIRCUIT, planted_model, planted_rows
from tests.model.tiny_configs import build


def difference(nodes: Nodes, mask: Tensor) -> Tensor:
    """M(m) for every prompt, without gradients."""
    opened = nodes.open(random_rows())
    logits = nodes.run_masked(mask, torch.arange(3), opened)
    return logit_difference(logits, opened.rows)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_exact_is_the_definition(name: str):
    model, rows = tiny(name), random_rows()
    found = exact_effects(open_nodes(model), rows)
    for j in range(3):
        one = select_rows(rows, [j])
        whole = by_loops(model, one, torch.ones(10, dtype=torch.bool))
        for i in range(10):
            keep = torch.ones(10, dtype=torch.bool)
            keep[i] = False
            assert float(found[j, i]) == pytest.approx(whole - by_loops(model, one, keep), abs=1e-9)


@pytest.mark.parametrize(
    ("name", "step", "tolerance"),
    [("gpt2", 1e-6, 1e-6), ("gpt_neox", 1e-6, 1e-6), ("llama", 1e-3, 1e-2), ("qwen3", 1e-3, 1e-2)],
)  # RMSNorm computes in float32 whatever the model's format, so its differences need wide steps
@pytest.mark.parametrize("at", [1.0, 0.3])
def test_mask_gradients_are_finite_differences(name: str, step: float, tolerance: float, at: float):
    nodes = open_nodes(tiny(name))
    found = mask_gradient(nodes, nodes.open(random_rows()), at)
    point = torch.full((3, 10), at, dtype=torch.float64)
    for i in (0, 3, 4, 7, 9):
        moved = point.clone()
        moved[:, i] += step
        low = 2 * point - moved
        slope = (difference(nodes, moved) - difference(nodes, low)) / (2 * step)
        torch.testing.assert_close(found[:, i], slope, rtol=tolerance, atol=tolerance)


def test_attribution_is_the_gradient_at_the_outputs_times_what_would_replace_them():
    model, rows = tiny("llama"), random_rows()
    sites = [f"{name}.{layer}" for layer in range(2) for name in ("z", "mlp_out")]
    run = model.run(rows.clean, read=[*sites, "logits"], grad=True)
    gradients = torch.autograd.grad(logit_difference(run.logits[:, -1], rows).sum(), [run[site] for site in sites])
    other = model.run(rows.corrupt, read=sites)
    columns = []
    for site, gradient in zip(sites, gradients, strict=True):
        product = (run[site] - other[site]) * gradient
        columns.append(product.sum((1, 3)) if site.startswith("z") else product.sum((1, 2))[:, None])
    torch.testing.assert_close(attribution(open_nodes(model), rows), torch.cat(columns, 1).detach())


def test_integrated_gradients_sum_to_the_whole_effect():
    nodes = open_nodes(tiny("gpt2"))
    rows = random_rows()
    ones = torch.ones(3, 10, dtype=torch.float64)
    effect = difference(nodes, ones) - difference(nodes, 0 * ones)
    errors = [float((integrated_gradients(nodes, rows, steps=steps).sum(1) - effect).abs().max()) for steps in (5, 80)]
    assert errors[1] < 0.02 * float(effect.abs().max())
    assert errors[1] < errors[0]
    with pytest.raises(ClearheadError, match="at least 1 step"):
        integrated_gradients(nodes, rows, steps=0)


class Linear:
    """Cuts a model down to what is linear in its heads: one layer whose output is read without a norm."""

    @staticmethod
    def model() -> Model:
        hf = build("gpt2").double()
        hf.transformer.h = hf.transformer.h[1:]
        hf.config.n_layer = 1
        block = hf.transformer.h[0]
        block.attn.layer_idx = 0
        hf.transformer.ln_f = torch.nn.Identity()
        with torch.no_grad():
            block.mlp.c_proj.weight.zero_()
        return Model(hf, self_test=False)


def test_one_step_is_exact_where_the_model_is_linear_in_its_components():
    model, rows = Linear.model(), random_rows()
    nodes = open_nodes(model, "heads")
    whole = integrated_gradients(nodes, rows, steps=1)
    torch.testing.assert_close(whole, exact_effects(nodes, rows), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whole, attribution(nodes, rows), rtol=1e-9, atol=1e-9)


def test_gated_models_are_differentiated_through_their_open_edges():
    model = Model(build("gpt2", attn="sdpa").double())
    install(model, bias=0.5)
    nodes = open_nodes(model, "heads")
    found = attribution(nodes, random_rows())
    assert not torch.allclose(found, attribution(open_nodes(tiny("gpt2"), "heads"), random_rows()))
    ones = torch.ones(3, 8, dtype=torch.float64)
    for i in (0, 6):
        step = torch.zeros_like(ones)
        step[:, i] = 1e-6  # too small to open or close an edge
        slope = (difference(nodes, ones + step) - difference(nodes, ones - step)) / 2e-6
        torch.testing.assert_close(found[:, i], slope, rtol=1e-5, atol=1e-5)


def test_planted_heads_rank_first():
    model, rows = planted_model(), planted_rows()
    nodes = open_nodes(model)
    for method in (exact_effects, attribution, integrated_gradients, relevance):
        scores = method(nodes, rows).mean(0)
        best = {nodes.components.names[i] for i in scores.topk(2).indices.tolist()}
        assert best == set(CIRCUIT), method


def test_attribution_underestimates_what_a_norm_cancels_and_relevance_does_not():
    model, rows = planted_model(), planted_rows()
    components = Components.of(model, "heads")
    nodes = Nodes(model, components, Replacement(model, components.sites, "zero"))
    head = components.index("head.0.1")
    exact = exact_effects(nodes, rows)[:, head]
    assert bool((attribution(nodes, rows)[:, head] < 0.1 * exact).all())
    torch.testing.assert_close(relevance(nodes, rows)[:, head], exact, rtol=1e-3, atol=0)


def test_a_path_to_zero_in_front_of_a_norm_is_refused():
    model, rows = tiny("gemma2"), random_rows()
    with pytest.raises(ClearheadError, match="leads nowhere"):
        NodeLevel.open(model, "heads", "zero").scores("ig", [rows])
    with pytest.raises(ClearheadError, match="leads nowhere"):
        AttentionEdges(model, "zero").scores("ig", [rows])
    level = NodeLevel.open(model, "heads", "corrupt")
    n = level.count(rows)
    ends = level.evaluate(torch.stack([torch.zeros(1, n).bool(), torch.ones(1, n).bool()]), rows)[..., 0]
    summed = integrated_gradients(level.nodes, rows, steps=20).sum(1)
    torch.testing.assert_close(summed, ends[1] - ends[0], rtol=0, atol=0.02)
