"""The exact identities of model access, for every family on transformers' attention interface."""

import pytest
import torch
from torch import Tensor

from clearhead.model import Model
from clearhead.model.families import FAMILIES as TABLE
from clearhead.model.places import output_weight
from clearhead.model.sites import LAYER_SITES, SOFTMAX_SITES
from tests.model.conftest import tiny_model, tiny_tokens
from tests.model.tiny_configs import CONFIGS, build

FAMILIES = sorted(CONFIGS)
MASKS = {
    "full": torch.ones(2, 12, dtype=torch.long),
    "left": torch.tensor([[0] * 4 + [1] * 8, [1] * 12]),
    "right": torch.tensor([[1] * 12, [1] * 7 + [0] * 5]),
}
PER_LAYER_INPUTS = {"gemma4_text"}  # its layers also read the tokens, not the residual stream alone


def test_at_least_thirty_families():
    assert len(FAMILIES) >= 30


def has_sink(name: str) -> bool:
    return name == "gpt_oss"


def site_names(model: Model, name: str) -> list[str]:
    """The sites of layers that the family has."""
    missing = {"sink"} if not has_sink(name) else set()
    missing |= {"resid_mid"} if model.family.parallel else set()
    missing |= {"k_pre"} if model.family.layout == "latent" else set()
    return [site for site in LAYER_SITES if site not in missing]


def reads(model: Model, names: list[str]) -> list[str]:
    return [f"{name}.{layer}" for name in names for layer in model.attention_layers]


def plain_logits(name: str, path: str, mask: Tensor | None) -> Tensor:
    """Logits of an untouched HF model loaded on `path`; positions count the tokens, as HF's generate does."""
    hf = build(name, attn=path)
    inputs = {"input_ids": tiny_tokens()}
    if mask is not None:
        inputs |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
    with torch.no_grad():
        return hf(**inputs).logits


@pytest.mark.parametrize("padding", [None, "full", "left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_bitwise_those_of_transformers(name, padding):
    model, tokens = tiny_model(name), tiny_tokens()
    mask = MASKS[padding] if padding else None
    shown = torch.ones(2, 12, dtype=torch.bool) if mask is None else mask.bool()
    outside = [site for site in site_names(model, name) if site not in SOFTMAX_SITES]
    default = "sdpa" if model.hf._supports_sdpa else "eager"
    expected = plain_logits(name, default, mask)[shown]
    for read in (["logits"], [*reads(model, outside), "logits"]):
        run = model.run(tokens, read=read, attention_mask=mask)
        assert run.path == default
        assert torch.equal(run.logits[shown], expected)
    expected = plain_logits(name, "eager", mask)[shown]
    for read, path in ((["logits"], "eager"), ([*reads(model, site_names(model, name)), "logits"], None)):
        run = model.run(tokens, read=read, attention_mask=mask, path=path)
        assert run.path == "eager"
        assert torch.equal(run.logits[shown], expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_half_precision_is_bitwise_too(name):
    model, tokens = Model(build(name).to(torch.bfloat16)), tiny_tokens()
    layer = model.attention_layers[-1]
    run = model.run(tokens, read=[f"pattern.{layer}", f"z.{layer}", "logits"])
    with torch.no_grad():
        assert torch.equal(run.logits, model.hf(tokens).logits)
    edited = model.run(tokens, edit={f"pattern.{layer}": run[f"pattern.{layer}"].double()})
    assert torch.equal(edited.logits, run.logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_identities_within_a_run(name):
    model, tokens = tiny_model(name), tiny_tokens()
    names = ["q", "k", "v", "scores", "pattern", "z", "head_out", "attn_out", "resid_pre"]
    run = model.run(tokens, read=reads(model, [*names, "sink"] if has_sink(name) else names))
    assert model.attention_layers
    for layer in model.attention_layers:
        scores, pattern, z = (run[f"{site}.{layer}"] for site in ("scores", "pattern", "z"))
        b, h, t, _ = pattern.shape
        logits = torch.cat([scores, run[f"sink.{layer}"][..., None]], -1) if has_sink(name) else scores
        torch.testing.assert_close(logits.softmax(-1)[..., :t], pattern, rtol=0, atol=1e-6)
        assert not pattern.triu(1).any(), "attends to later tokens"
        assert pattern.max() > 0.6, "the test model's attention must not be near uniform"
        v = run[f"v.{layer}"]
        mixed = pattern @ v.repeat_interleave(h // v.shape[1], dim=1)
        torch.testing.assert_close(mixed.transpose(1, 2), z, rtol=0, atol=1e-5 * float(v.abs().max()))
        bias = output_weight(model.places.attentions[layer].get_submodule(model.family.output))[1]
        total = run[f"head_out.{layer}"].sum(-2) + (0 if bias is None else bias.detach())
        torch.testing.assert_close(total, run[f"attn_out.{layer}"], rtol=0, atol=1e-4)
        assert run[f"head_out.{layer}"].shape == (b, t, h, model.d_model)
        assert run[f"q.{layer}"].shape[:3] == (b, h, t)
        assert run[f"k.{layer}"].shape[:3] == (b, v.shape[1], t)


SCALED = {"biogpt", "opt"}  # these two scale queries between projection and attention
ROTATED = [
    name for name in FAMILIES if name not in SCALED and TABLE[CONFIGS[name].get("model_type", name)].query_norm is None
]


@pytest.mark.parametrize("name", ROTATED)
def test_projected_queries_and_keys_have_the_lengths_of_the_rotated_ones(name):
    """A rotation keeps each head's length, so a wrong cut of a fused projection shows."""
    model = tiny_model(name)
    pairs = [("q_pre", "q")] if model.family.layout == "latent" else [("q_pre", "q"), ("k_pre", "k")]
    run = model.run(tiny_tokens(), read=reads(model, ["q_pre", "q", "k", *(before for before, _ in pairs)]))
    for layer in model.attention_layers:
        for before, after in pairs:
            projected, rotated = run[f"{before}.{layer}"], run[f"{after}.{layer}"]
            assert projected.shape == rotated.shape
            torch.testing.assert_close(projected.norm(dim=-1), rotated.norm(dim=-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_writing_what_was_read_changes_nothing(name):
    model, tokens = tiny_model(name), tiny_tokens()
    sites = reads(model, site_names(model, name))
    run = model.run(tokens, read=[*sites, "embed", "logits"], path="eager")
    for site in [*sites, "embed", "logits"]:
        edited = model.run(tokens, edit={site: run[site].clone()}, path="eager")
        assert torch.equal(edited.logits, run.logits), site
    if model.hf._supports_sdpa:
        outside = [site for site in sites if site.split(".")[0] not in SOFTMAX_SITES]
        run = model.run(tokens, read=[*outside, "logits"])
        edited = model.run(tokens, edit={site: run[site].clone() for site in outside})
        assert run.path == edited.path == "sdpa"
        assert torch.equal(edited.logits, run.logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_editing_any_site_changes_the_logits(name):
    model, tokens = tiny_model(name), tiny_tokens()
    plain = model.run(tokens, path="eager").logits
    layer = model.attention_layers[0]
    for site in site_names(model, name):
        edited = model.run(tokens, edit={f"{site}.{layer}": lambda x, _: x.roll(1, dims=-2) * 0.5}, path="eager")
        assert not torch.equal(edited.logits, plain), site
        assert edited.logits.isfinite().all(), site


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - PER_LAYER_INPUTS))
def test_residual_stream_of_other_tokens_gives_their_logits(name):
    """What follows a site of the residual stream depends on it alone, so both branches must see an edit."""
    model, tokens = tiny_model(name), tiny_tokens()
    others = tokens.flip(0)
    layer = model.attention_layers[-1]
    sites = [f"{site}.{layer}" for site in ("resid_pre", "resid_mid", "resid_post")]
    if model.family.parallel:
        sites.remove(f"resid_mid.{layer}")
    there = model.run(others, read=[*sites, "logits"])
    for site in sites:
        here = model.run(tokens, read=[site, f"resid_post.{layer}", "logits"], edit={site: there[site]})
        assert torch.equal(here.logits, there.logits), site
        assert torch.equal(here[site], there[site])
        assert torch.equal(here[f"resid_post.{layer}"], there[f"resid_post.{layer}"])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_padding_changes_nothing_for_the_tokens(name, side):
    model = tiny_model(name)
    row = tiny_tokens()[:1, :7]
    padding = torch.full((1, 5), 3)
    padded = torch.cat([padding, row] if side == "left" else [row, padding], dim=1)
    mask = torch.cat(
        [torch.zeros(1, 5), torch.ones(1, 7)] if side == "left" else [torch.ones(1, 7), torch.zeros(1, 5)], 1
    )
    span = slice(5, 12) if side == "left" else slice(0, 7)
    read = [*reads(model, ["pattern", "z"]), "logits"]
    alone, among = model.run(row, read=read), model.run(padded, read=read, attention_mask=mask)
    scale = float(alone.logits.abs().max())
    torch.testing.assert_close(among.logits[:, span], alone.logits, rtol=0, atol=2e-5 * scale)
    for layer in model.attention_layers:
        pattern = among[f"pattern.{layer}"][:, :, span]
        torch.testing.assert_close(pattern[..., span], alone[f"pattern.{layer}"], rtol=0, atol=2e-5)
        assert pattern.sum() == pytest.approx(float(alone[f"pattern.{layer}"].sum()), rel=1e-5), (
            "padding is attended to"
        )
