"""Circuits of heads and MLPs: the runs against their definition by loops, and what rows share."""

import pytest
import torch
from torch import Tensor

from clearhead.circuits.patching.ablation import Replacement
from clearhead.circuits.patching.components import Components
from clearhead.circuits.patching.metrics import METRICS
from clearhead.circuits.patching.nodes import Nodes, select_rows
from clearhead.data.tasks import TaskBatch, logit_difference
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from clearhead.model import Model
from clearhead.model.gates import install
from tests.circuits.planted import CIRCUIT, planted_model, planted_rows
from tests.model.tiny_configs import VOCABULARY, build


def random_rows(n: int = 3, length: int = 9) -> TaskBatch:
    generator = torch.Generator().manual_seed(2)
    clean, corrupt = torch.randint(5, VOCABULARY, (2, n, length), generator=generator)
    return TaskBatch(list(range(n)), clean, corrupt, [[5, 6]] * n, [[7], [8, 9], [10]][:n], {})


def tiny(name: str) -> Model:
    return Model(build(name).double())


def open_nodes(model: Model, kind: str = "heads+mlps") -> Nodes:
    components = Components.of(model, kind)  # pyright: ignore[reportArgumentType]
    return Nodes(model, components, Replacement(model, components.sites, "corrupt"))


def by_loops(model: Model, rows: TaskBatch, keep: Tensor, kind: str = "heads+mlps") -> float:
    """The logit difference of one circuit on the only prompt of `rows`, from plain forwards."""
    names = Components.of(model, kind).names  # pyright: ignore[reportArgumentType]
    other = model.run(rows.corrupt, read=["z.*", "mlp_out.*"])
    edits = {}
    for layer in range(model.n_layers):
        z = [head for head in range(model.n_heads) if not keep[names.index(f"head.{layer}.{head}")]]

        def cut(value: Tensor, _run: object, heads: list[int] = z, site: str = f"z.{layer}") -> Tensor:
            value = value.clone()
            for head in heads:
                value[:, :, head] = other[site][:, :, head]
            return value

        edits[f"z.{layer}"] = cut
        if kind == "heads+mlps" and not keep[names.index(f"mlp.{layer}")]:
            edits[f"mlp_out.{layer}"] = other[f"mlp_out.{layer}"]
    return float(logit_difference(model.run(rows.clean, edit=edits).logits[:, -1], rows))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_neox", "bloom"])
def test_every_row_is_its_own_circuit_on_its_own_prompt(name: str):
    model, rows = tiny(name), random_rows()
    nodes = open_nodes(model)
    n = len(nodes.components)
    assert n == 10
    keep = torch.rand(7, 3, n, generator=torch.Generator().manual_seed(0)) < 0.6
    keep[1, :, :5] = True  # begins at layer 1 from the clean stream
    keep[2, :, :5] = False  # begins at layer 1 from the stream without components
    keep[3], keep[4] = True, False
    found = nodes.evaluate(keep, rows)[..., METRICS.index("logit_difference")]
    expected = [[by_loops(model, select_rows(rows, [j]), keep[i, j]) for j in range(3)] for i in range(7)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_gates_are_recomputed_in_circuits():
    model, rows = Model(build("llama", attn="sdpa")), random_rows()
    install(model, bias=0.5)
    nodes = open_nodes(model, "heads")
    keep = torch.rand(4, 3, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    found = nodes.evaluate(keep, rows)[..., 0]
    expected = [[by_loops(model, select_rows(rows, [j]), keep[i, j], "heads") for j in range(3)] for i in range(4)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-4)


def test_one_mask_serves_all_prompts_and_the_ends_are_the_model_and_the_corrupt_run():
    model, rows = planted_model(), planted_rows()
    nodes = open_nodes(model)
    ends = torch.tensor([[[True] * 10], [[False] * 10]])
    whole, empty = nodes.evaluate(ends, rows)[..., 0]
    torch.testing.assert_close(whole, logit_difference(model.run(rows.clean).logits[:, -1], rows))
    # the token that is copied is all that counts: with every output of the corrupt prompt the answer is its answer
    torch.testing.assert_close(empty, logit_difference(model.run(rows.corrupt).logits[:, -1], rows), rtol=0.05, atol=0)


def test_layers_that_circuits_share_are_not_run_again():
    model, rows = planted_model(), planted_rows()
    nodes = open_nodes(model, "heads")
    nodes.open(rows)
    ran = []
    handle = model.places.attentions[0].register_forward_pre_hook(lambda *_: ran.append(0))  # pyright: ignore
    keep = torch.ones(5, 1, 8, dtype=torch.bool)
    keep[torch.arange(4), 0, 4 + torch.arange(4)] = False
    nodes.evaluate(keep, rows)
    handle.remove()
    assert ran == []


def test_metrics_are_those_of_the_logits():
    model, rows = planted_model(), planted_rows()
    nodes = open_nodes(model, "heads")
    whole, broken = nodes.evaluate(torch.tensor([[[True] * 8], [[True, False] + [True] * 6]]), rows)
    assert whole[:, METRICS.index("kl")].abs().max() < 1e-12
    assert whole[:, METRICS.index("accuracy")].tolist() == [1] * 4
    assert broken[:, METRICS.index("accuracy")].tolist() == [0] * 4
    p = model.run(rows.clean).logits[:, -1].softmax(-1)
    difference = torch.stack([p[i, rows.answers[i][0]] - p[i, rows.wrong_answers[i][0]] for i in range(4)])
    torch.testing.assert_close(whole[:, METRICS.index("probability_difference")], difference)
    assert bool((broken[:, METRICS.index("kl")] < -5).all())


def test_what_makes_no_circuit_is_refused():
    model, rows = planted_model(), planted_rows()
    nodes = open_nodes(model)
    with pytest.raises(ClearheadError, match=r"expected booleans \[circuits, 4 prompts or 1, 10 components\]"):
        nodes.evaluate(torch.ones(2, 1, 9, dtype=torch.bool), rows)
    with pytest.raises(ClearheadError, match="equal length"):
        nodes.open(rows._replace(corrupt=rows.corrupt[:, 1:]))
    with pytest.raises(ClearheadError, match="needs answers and wrong answers"):
        nodes.evaluate(torch.ones(1, 1, 10, dtype=torch.bool), rows._replace(wrong_answers=[[], [3], [3], [3]]))
    with pytest.raises(UnknownNameError, match="did you mean 'head.1.2'"):
        nodes.components.index("head.1.22")
    with pytest.raises(UnknownNameError, match="level of components 'head'"):
        Components.of(model, "head")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ClearheadError, match=r"no values for mlp_out.0"):
        Nodes(model, nodes.components, Replacement(model, ["z.0", "z.1", "mlp_out.1"], "zero"))


def test_a_circuit_is_given_by_names():
    model, rows = planted_model(), planted_rows()
    nodes = open_nodes(model, "heads")
    planted, half = (nodes.evaluate(nodes.components.circuit(names), rows)[0, :, 0] for names in (CIRCUIT, CIRCUIT[:1]))
    assert float(planted.min()) > 8
    assert float(half.max()) < -8
    with pytest.raises(ClearheadError, match="the circuit is empty"):
        nodes.components.circuit([])
    with pytest.raises(UnknownNameError, match="component of level heads 'mlp.0'"):
        nodes.components.circuit(["mlp.0"])


def test_logits_that_are_not_finite_are_named():
    model, rows = planted_model(), planted_rows()
    with torch.no_grad():
        model.hf.lm_head.weight[4] = float("nan")
    with pytest.raises(NonFiniteError, match=r"items \[0, 1, 2, 3\]"):
        open_nodes(model).evaluate(torch.ones(1, 1, 10, dtype=torch.bool), rows)


def test_the_same_items_with_another_corruption_are_other_prompts():
    model, rows = tiny("gpt2"), random_rows()
    nodes, other = open_nodes(model), rows._replace(corrupt=rows.corrupt.roll(1, 0))
    none = torch.zeros(1, 1, len(nodes.components), dtype=torch.bool)
    before, after = nodes.evaluate(none, rows), nodes.evaluate(none, other)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, open_nodes(model).evaluate(none, other), rtol=0, atol=0)
