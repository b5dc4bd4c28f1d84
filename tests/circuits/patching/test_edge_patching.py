"""Replaced attention edges against loops, the model's own forward, and gates that are held."""

import pytest
import torch

from clearhead.circuits.patching.edge_patching import open_edges, open_patching
from clearhead.errors import ClearheadError, UnknownNameError
from tests.circuits.random_rows import double_model, random_rows
from tests.sparsify.gated_models import gated_model

ROWS = random_rows()


def random_mask(patching, r, seed=0):
    t = patching.clean.shape[1]
    shape = (r, len(patching.layers), patching.model.n_heads, t, t)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2", "mistral"])
@pytest.mark.parametrize("kind", ["corrupt", "reference", "zero"])
def test_z_is_the_sum_of_kept_and_replaced_edges(family, kind):
    model = double_model(family)
    other = {"corrupt": ROWS.corrupt, "reference": random_rows(4, seed=1).clean}.get(kind)
    patching = open_patching(model, ROWS.clean, **({} if other is None else {kind: other}))
    prompt = torch.tensor([2, 0, 0, 1])
    keep = random_mask(patching, 4)
    run = patching.run(keep, prompt, read=["z.0", "z.1"])
    sources = None if other is None else model.run(other, read=["pattern.*", "v.*"])
    for layer in (0, 1):
        ratio = model.n_heads // model.geometry(layer).n_kv_heads
        v = run[f"v.{layer}"].repeat_interleave(ratio, 1)
        expected = keep[:, layer, ..., None] * run[f"pattern.{layer}"][..., None].double() * v[:, :, None]
        if sources is not None:
            values = sources[f"v.{layer}"].repeat_interleave(ratio, 1)
            carried = sources[f"pattern.{layer}"][..., None].double() * values[:, :, None]
            carried = carried[prompt] if kind == "corrupt" else carried.mean(0, keepdim=True)
            expected = expected + ~keep[:, layer, ..., None] * carried
        assert torch.allclose(run[f"z.{layer}"], expected.sum(3).transpose(1, 2), atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral"])
def test_all_edges_kept_is_the_model_and_none_is_the_other_prompts_attention(family):
    model = double_model(family)
    patching = open_patching(model, ROWS.clean, corrupt=ROWS.corrupt)
    ones = torch.ones(3, 2, 1, 1, 1, dtype=torch.bool)
    own = model.run(ROWS.clean, read=["pattern.0", "logits"]).logits[:, -1]
    assert torch.allclose(patching.run(ones, read=["logits"]).logits[:, 0], own, rtol=0, atol=1e-10)
    z = model.run(ROWS.corrupt, read=["pattern.0", "z.*"])
    expected = model.run(ROWS.clean, edit={site: z[site] for site in ("z.0", "z.1")}, path="eager").logits[:, -1]
    found = patching.run(~ones, read=["logits"]).logits[:, 0]
    assert torch.allclose(found, expected, rtol=0, atol=1e-10)
    assert not torch.allclose(own, expected, rtol=0, atol=0.1)


def test_a_forward_begins_where_the_first_edge_is_replaced():
    patching = open_patching(double_model("llama"), ROWS.clean, corrupt=ROWS.corrupt)
    keep = random_mask(patching, 3)
    keep[:, 0] = True
    whole = patching.run(keep, read=["resid_pre.1", "logits"])
    later = patching.run(keep, read=["logits"], begin=(1, whole["resid_pre.1"]))
    assert torch.allclose(whole.logits, later.logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sink", [None, 0.5])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_frozen_gates_hold_the_clean_prompts_open_edges_in_every_run(family, sink):
    model, _ = gated_model(family, sink)
    opened = open_edges(model, ROWS.clean)
    pattern = model.run(ROWS.clean, read=["pattern.*"])
    for layer, edges in opened.items():
        assert torch.equal(edges, pattern[f"pattern.{layer}"] > 0)
        assert not torch.equal(edges, open_edges(model, ROWS.corrupt)[layer])
    frozen = open_patching(model, ROWS.clean, corrupt=ROWS.corrupt, gates="frozen")
    own = model.run(ROWS.clean, path="eager").logits[:, -1]
    assert torch.allclose(frozen.run(None, read=["logits"]).logits[:, 0], own, rtol=0, atol=1e-10)
    keep = random_mask(frozen, 3)
    run = frozen.run(keep, read=["logits"])
    recomputed = open_patching(model, ROWS.clean, corrupt=ROWS.corrupt).run(keep, read=["logits"])
    for layer, edges in opened.items():
        assert not frozen.replaced[layer].pattern[:, 0][~edges].any()
        assert torch.equal(run[f"pattern.{layer}"] > 0, edges)
    assert not torch.equal(recomputed["pattern.1"] > 0, opened[1])
    # what gates close may be replaced or not
    closed = ~torch.stack(list(opened.values()), 1)
    assert torch.equal(frozen.run(keep | closed, read=["logits"]).logits, run.logits)
    assert model.gates is not None
    assert model.gates.control.mode == "hard"


def test_bad_input_is_refused():
    model = double_model("llama")
    with pytest.raises(ClearheadError, match="7 tokens, the others 5"):
        open_patching(model, ROWS.clean, corrupt=ROWS.corrupt[:, :5])
    with pytest.raises(ClearheadError, match="a corrupt prompt for each of 3 clean ones, got 2"):
        open_patching(model, ROWS.clean, corrupt=ROWS.corrupt[:2])
    with pytest.raises(ClearheadError, match="leave one out"):
        open_patching(model, ROWS.clean, corrupt=ROWS.corrupt, reference=ROWS.clean)
    with pytest.raises(UnknownNameError, match="'frosen'.*frozen"):
        open_patching(model, ROWS.clean, gates="frosen")
    with pytest.raises(ClearheadError, match="has no edge gates to freeze"):
        open_patching(model, ROWS.clean, gates="frozen")
    with pytest.raises(ClearheadError, match="which the reference prompts do not have"):
        open_patching(gated_model("llama")[0], ROWS.clean, reference=ROWS.clean, gates="frozen")
