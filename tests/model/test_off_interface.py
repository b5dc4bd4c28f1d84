"""Families that compute attention without transformers' attention interface."""

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.model.places import output_weight
from clearhead.model.sites import LAYER_SITES
from tests.model.conftest import tiny_model, tiny_tokens
from tests.model.tiny_configs import OFF_INTERFACE, build

FAMILIES = sorted(OFF_INTERFACE)
MASK = torch.tensor([[0] * 4 + [1] * 8, [1] * 12])


def sites_of(model: Model) -> list[str]:
    """The sites of layers that the family has."""
    missing = {"sink"} | ({"q", "k", "v"} - model.family.plain)
    missing |= {"resid_mid"} if model.family.parallel else set()
    return [f"{site}.{layer}" for site in LAYER_SITES if site not in missing for layer in range(model.n_layers)]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_bitwise_those_of_transformers(name):
    model, tokens = tiny_model(name), tiny_tokens()
    for mask in (None, MASK):
        inputs = {} if mask is None else {"attention_mask": mask}
        if mask is not None and name in ("gpt_neo", "falcon", "falcon_alibi"):
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
        shown = slice(None) if mask is None else mask.bool()
        with torch.no_grad():
            eager = build(name, attn="eager")(tokens, **inputs).logits[shown]
            fused = build(name, attn="sdpa" if name == "falcon" else "eager")(tokens, **inputs).logits[shown]
        run = model.run(tokens, attention_mask=mask)
        assert run.path == ("sdpa" if name == "falcon" else "eager")
        assert torch.equal(run.logits[shown], fused)
        run = model.run(tokens, read=[*sites_of(model), "embed", "logits"], attention_mask=mask)
        assert run.path == "eager"
        assert torch.equal(run.logits[shown], eager)


@pytest.mark.parametrize("name", FAMILIES)
def test_identities_within_a_run(name):
    model = tiny_model(name)
    run = model.run(tiny_tokens(), read=sites_of(model))
    for layer in range(model.n_layers):
        pattern, z = run[f"pattern.{layer}"], run[f"z.{layer}"]
        assert pattern.shape == (2, 4, 12, 12)
        torch.testing.assert_close(run[f"scores.{layer}"].softmax(-1), pattern, rtol=0, atol=1e-6)
        assert not pattern.triu(1).any()
        if "v" in model.family.plain:
            v = run[f"v.{layer}"]
            mixed = (pattern @ v.repeat_interleave(4 // v.shape[1], dim=1)).transpose(1, 2)
            torch.testing.assert_close(mixed, z, rtol=0, atol=1e-5 * float(v.abs().max()))
        bias = output_weight(model.places.attentions[layer].get_submodule(model.family.output))[1]
        total = run[f"head_out.{layer}"].sum(-2) + (0 if bias is None else bias.detach())
        torch.testing.assert_close(total, run[f"attn_out.{layer}"], rtol=0, atol=1e-4)
        if not model.family.parallel:
            between = run[f"resid_pre.{layer}"] + run[f"attn_out.{layer}"]
            torch.testing.assert_close(between, run[f"resid_mid.{layer}"], rtol=0, atol=1e-4)
            after = run[f"resid_mid.{layer}"] + run[f"mlp_out.{layer}"]
        else:
            after = run[f"resid_pre.{layer}"] + run[f"attn_out.{layer}"] + run[f"mlp_out.{layer}"]
        torch.testing.assert_close(after, run[f"resid_post.{layer}"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_writing_what_was_read_changes_nothing_and_other_values_do(name):
    model, tokens = tiny_model(name), tiny_tokens()
    sites = sites_of(model)
    run = model.run(tokens, read=[*sites, "logits"])
    for site in sites:
        same = model.run(tokens, edit={site: run[site].clone()}, path="eager")
        assert torch.equal(same.logits, run.logits), site
        other = model.run(tokens, edit={site: run[site].roll(1, dims=-2) * 0.5}, path="eager")
        assert not torch.equal(other.logits, run.logits), site


def test_projections_give_the_scores_where_they_are_used_as_they_are():
    run = tiny_model("gpt_neo").run(tiny_tokens(), read=["q.0", "k.0", "scores.0"])
    products = run["q.0"] @ run["k.0"].transpose(-1, -2)  # GPT-Neo does not scale
    below = torch.ones(12, 12).tril().bool()
    torch.testing.assert_close(run["scores.0"][..., below], products[..., below], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("site", ["q.0", "k.1"])
def test_rotated_queries_and_keys_are_refused_with_the_reason(site):
    model, tokens = tiny_model("falcon"), tiny_tokens()
    said = f"site {site}: this falcon model changes .* neither read nor written; available there are .*pattern.*z"
    with pytest.raises(ClearheadError, match=said):
        model.run(tokens, read=[site])
    with pytest.raises(ClearheadError, match=said):
        model.run(tokens, edit={site: lambda x, _: x})


def test_gpt2_with_reordered_attention_is_read_off_the_interface():
    hf = build("gpt2")
    hf.config.reorder_and_upcast_attn = True
    for block in hf.transformer.h:
        block.attn.reorder_and_upcast_attn = True
    model, tokens = Model(hf), tiny_tokens()
    with torch.no_grad():
        expected = hf(tokens).logits
    run = model.run(tokens, read=["pattern.0", "z.0", "logits"])
    assert torch.equal(run.logits, expected)
    assert not model.family.interface
