"""Model.run: what is computed, what is left behind, and errors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model import Model, Run, SelfTestError
from tests.model.conftest import WRITABLE, tiny_model, tiny_tokens
from tests.model.tiny_configs import CONTEXT, VOCABULARY, build


def count_calls(modules: list[nn.Module], act: Callable[[], object]) -> list[int]:
    """How often each module is called while `act` runs."""
    calls = [0] * len(modules)

    def counter(index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            calls[index] += 1

        return hook

    handles = [module.register_forward_pre_hook(counter(index)) for index, module in enumerate(modules)]
    act()
    for handle in handles:
        handle.remove()
    return calls


def test_only_the_layers_below_the_deepest_site_are_computed():
    model, tokens = tiny_model("llama"), tiny_tokens()
    inner = model.hf.model
    modules = [
        inner.layers[0],
        inner.layers[0].mlp,
        inner.layers[1],
        inner.layers[1].self_attn,
        inner.norm,
        model.hf.lm_head,
    ]
    for read, expected in [
        (["attn_in.0", "attn_out.0"], [1, 0, 0, 0, 0, 0]),
        (["resid_post.0"], [1, 1, 0, 0, 0, 0]),
        (["attn_in.1"], [1, 1, 1, 1, 0, 0]),
        (["resid_post.1"], [1, 1, 1, 1, 0, 0]),
        (["attn_out.0", "logits"], [1, 1, 1, 1, 1, 1]),
        (["embed"], [0, 0, 0, 0, 0, 0]),
        ([], [0, 0, 0, 0, 0, 0]),
    ]:
        assert count_calls(modules, lambda read=read: model.run(tokens, read=read)) == expected, read


def test_reading_below_agrees_with_a_full_run():
    model, tokens = tiny_model("gpt2"), tiny_tokens()
    full = model.run(tokens, read=["attn_in.*", "attn_out.*", "logits"])
    part = model.run(tokens, read=["attn_in.0", "attn_out.0"])
    assert list(part) == ["attn_in.0", "attn_out.0"]
    assert len(full) == 5
    for site in part:
        assert torch.equal(part[site], full[site])


def test_edit_callable_sees_what_the_run_has_read():
    model, tokens = tiny_model("llama"), tiny_tokens()
    seen = []

    def double_input(value: Tensor, run: Run) -> Tensor:
        seen.append((str(run.site), sorted(run)))
        return 2 * run["attn_in.0"] + 0 * value

    run = model.run(tokens, read=["attn_in.0", "attn_out.0", "logits"], edit={"attn_out.0": double_input})
    assert seen == [("attn_out.0", ["attn_in.0"])]
    assert torch.equal(run["attn_out.0"], 2 * run["attn_in.0"])
    with pytest.raises(UnknownNameError, match=r"Ask for it: run\(..., read=\['attn_in.0'\]\)"):
        model.run(tokens, edit={"attn_out.0": double_input})


def test_wildcard_edit_reaches_every_layer():
    model, tokens = tiny_model("llama"), tiny_tokens()
    layers = []
    model.run(tokens, edit={"z.*": lambda z, run: (layers.append(run.site.layer), z)[1]})
    assert layers == [0, 1]
    with pytest.raises(ClearheadError, match="edited twice"):
        model.run(tokens, edit={"z.*": lambda z, _: z, "z.1": lambda z, _: z})


def test_zeroed_heads_leave_the_bias():
    model, tokens = tiny_model("gpt2"), tiny_tokens()
    bias = model.hf.transformer.h[0].attn.c_proj.bias.detach()
    for site in ("z.0", "head_out.0"):
        out = model.run(tokens, read=["attn_out.0"], edit={site: lambda x, _: torch.zeros_like(x)})["attn_out.0"]
        torch.testing.assert_close(out, bias.expand_as(out), rtol=0, atol=1e-4)


def test_one_pattern_edited_by_hand():
    model, tokens = tiny_model("llama"), tiny_tokens()
    first = torch.zeros(2, 4, 12, 12)
    first[..., 0] = 1
    run = model.run(tokens, read=["v.0", "z.0", "pattern.0"], edit={"pattern.0": first})
    values = run["v.0"][:, :, :1].repeat_interleave(2, dim=1).expand(-1, -1, 12, -1)
    torch.testing.assert_close(run["z.0"], values.transpose(1, 2))
    assert torch.equal(run["pattern.0"], first)


def test_sink_edit_moves_attention():
    model, tokens = tiny_model("gpt_oss"), tiny_tokens()
    plain = model.run(tokens, read=["pattern.0", "sink.0"])
    assert plain["sink.0"].shape == (2, 4, 12)
    run = model.run(tokens, read=["pattern.0"], edit={"sink.0": lambda sink, _: torch.full_like(sink, -1e9)})
    assert (plain["pattern.0"].sum(-1) < 1 - 1e-4).any()
    torch.testing.assert_close(run["pattern.0"].sum(-1), torch.ones(2, 4, 12))


def test_soft_capped_scores_are_below_the_cap():
    run = tiny_model("gemma2").run(tiny_tokens(), read=["scores.0"])
    shown = run["scores.0"][run["scores.0"] > torch.finfo(torch.float32).min / 2]
    assert 4.5 < shown.abs().max() <= 5.0


def test_sliding_window_is_seen_in_the_pattern():
    pattern = tiny_model("mistral").run(tiny_tokens(), read=["pattern.1"])["pattern.1"]
    assert not pattern.tril(-4).any()
    assert pattern.tril(-3).any()


@pytest.mark.parametrize(("outer", "inner"), [("llama", "gpt_neo"), ("gpt_neo", "llama"), ("gpt_neo", "falcon")])
def test_nested_runs_do_not_see_each_other(outer, inner):
    model, other, tokens = tiny_model(outer), tiny_model(inner), tiny_tokens()
    read = ["pattern.*", "logits"]
    expected = model.run(tokens, read=read)
    same_expected = model.run(tokens.flip(0), read=["attn_out.1"])["attn_out.1"]
    other_expected = other.run(tokens, read=["pattern.1"])["pattern.1"]

    def run_inside(value: Tensor, _: Run) -> Tensor:
        assert torch.equal(model.run(tokens.flip(0), read=["attn_out.1"])["attn_out.1"], same_expected)
        assert torch.equal(other.run(tokens, read=["pattern.1"])["pattern.1"], other_expected)
        return value

    for site in ("attn_in.0", "q_pre.0", "scores.0", "z.1"):
        run = model.run(tokens, read=read, edit={site: run_inside})
        for place in run:
            assert torch.equal(run[place], expected[place]), (site, place)


def state_of(hf: nn.Module) -> list:
    """Everything that a run touches in a model."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training, sorted(vars(m))) for m in hf.modules()]
    return [*hooks, hf.config._attn_implementation, [p.requires_grad for p in hf.parameters()]]


@pytest.mark.parametrize("name", ["llama", "gpt_neo", "gpt_oss"])
def test_model_is_left_as_it_was_also_after_exceptions(name):
    model, tokens = Model(build(name)), tiny_tokens()
    for module in (model.hf, next(iter(model.hf.modules()))):
        module.train()
    model.hf.lm_head.eval()
    before = state_of(model.hf)

    def fail(value: Tensor, _: Run) -> Tensor:
        raise ZeroDivisionError

    for site in [site for site in WRITABLE if name == "llama" or site.split(".")[0] not in {"q", "k"}]:
        with pytest.raises(ZeroDivisionError):
            model.run(tokens, edit={site: fail}, grad=True)
        assert state_of(model.hf) == before, site
    model.run(tokens, read=["pattern.0", "z.1"])
    assert state_of(model.hf) == before
    assert torch.is_grad_enabled()


def test_training_mode_does_not_reach_a_run():
    hf = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=97, n_positions=64)).train()
    model, tokens = Model(hf), tiny_tokens()
    assert torch.equal(model.run(tokens).logits, model.run(tokens).logits), "dropout was on"
    assert hf.training


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (torch.arange(5), r"expected integers \[batch, position\], got torch.int64 \[5\]"),
        (torch.zeros(1, 5), "got torch.float32"),
        (torch.zeros(0, 5, dtype=torch.long), "expected integers"),
        ([1, 2], "got list"),
        (torch.full((1, 5), VOCABULARY), f"0 to {VOCABULARY - 1}, got {VOCABULARY}"),
        (torch.full((1, 5), -1), "got -1"),
        (torch.zeros(1, CONTEXT + 1, dtype=torch.long), f"context of .* is {CONTEXT}"),
    ],
)
def test_bad_tokens_are_refused(tokens, said):
    with pytest.raises(ClearheadError, match=said):
        tiny_model("llama").run(tokens)


def test_bad_masks_are_refused():
    model, tokens = tiny_model("llama"), tiny_tokens()
    with pytest.raises(ClearheadError, match=r"expected shape \[2, 12\], got \[2, 11\]"):
        model.run(tokens, attention_mask=torch.ones(2, 11))
    with pytest.raises(ClearheadError, match="hides all"):
        model.run(tokens, attention_mask=torch.tensor([[1] * 12, [0] * 12]))


def test_bad_edits_are_refused():
    model, tokens = tiny_model("llama"), tiny_tokens()
    with pytest.raises(ClearheadError, match=r"edit of z.0: expected shape \[2, 12, 4, 8\], got \[2, 12, 32\]"):
        model.run(tokens, edit={"z.0": torch.zeros(2, 12, 32)})
    with pytest.raises(ClearheadError, match="expected a tensor, got NoneType"):
        model.run(tokens, edit={"z.0": lambda z, _: None})
    with pytest.raises(UnknownNameError, match="did you mean 'attn_out'"):
        model.run(tokens, edit={"atn_out.0": torch.zeros(1)})


def test_sites_a_model_lacks_are_refused_with_the_reason():
    tokens = tiny_tokens()
    with pytest.raises(ClearheadError, match="run in parallel on resid_pre"):
        tiny_model("gpt_neox").run(tokens, read=["resid_mid.0"])
    with pytest.raises(
        ClearheadError, match=r"layer 0 of this lfm2 model has no softmax attention \(layers \[1\] have\)"
    ):
        tiny_model("lfm2").run(tokens, read=["pattern.0"])
    with pytest.raises(ClearheadError, match="no softmax attention"):
        tiny_model("qwen3_next").run(tokens, edit={"attn_out.0": torch.zeros(1)})
    with pytest.raises(ClearheadError, match="this llama model has no sink"):
        tiny_model("llama").run(tokens, read=["sink.0"])
    with pytest.raises(ClearheadError, match="latent shared by all heads"):
        tiny_model("deepseek_v3").run(tokens, read=["k_pre.0"])
    with pytest.raises(ClearheadError, match="scores.0 exists only on the eager path"):
        tiny_model("llama").run(tokens, read=["scores.0"], path="sdpa")
    with pytest.raises(ClearheadError, match="gemma2 has no sdpa path"):
        tiny_model("gemma2").run(tokens, path="sdpa")
    with pytest.raises(ClearheadError, match="hook_attn_out.*after the norm"):
        tiny_model("gemma2").run(tokens, read=["blocks.0.hook_attn_out"])


def test_unknown_family_names_the_missing_module():
    hf = build("llama")
    hf.config.model_type = "lama"
    hf.model.layers[0].self_attn.o_projection = hf.model.layers[0].self_attn.o_proj
    for layer in hf.model.layers:
        del layer.self_attn.o_proj
    with pytest.raises(UnknownNameError, match="did you mean 'llama'.*no 'model.layers.*.self_attn.o_proj'"):
        Model(hf)


def test_family_outside_the_table_is_tried_as_llama():
    hf = build("llama")
    hf.config.model_type = "newcomer"
    model = Model(hf)
    assert model.family.name == "newcomer"
    assert torch.equal(model.run(tiny_tokens()).logits, tiny_model("llama").run(tiny_tokens()).logits)


class Shifted(nn.Linear):
    """An output projection that adds what no head wrote."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_self_test_refuses_a_model_that_is_not_what_it_seems():
    hf = build("llama")
    hf.model.layers[1].self_attn.o_proj.__class__ = Shifted
    with pytest.raises(SelfTestError, match="heads' sum in layer 1"):
        Model(hf)
    assert Model(hf, self_test=False).n_layers == 2


def test_self_test_refuses_attention_to_the_future():
    hf = build("llama")
    hf.config.is_causal = False
    with pytest.raises(SelfTestError, match="attends to later tokens"):
        Model(hf)


def test_tensor_the_model_overwrites_is_refused():
    def double_input(_module: nn.Module, args: tuple[Tensor], _output: Tensor) -> None:
        args[0].mul_(2)

    model = Model(build("llama"))
    handle = model.hf.model.layers[0].mlp.register_forward_hook(double_input)
    try:
        with pytest.raises(ClearheadError, match="overwrote the tensor of site mlp_in.0"):
            model.run(tiny_tokens(), read=["mlp_in.0", "logits"])
    finally:
        handle.remove()


def test_smollm2_is_bitwise_transformers_on_both_paths(smollm2):
    tokens = smollm2.tokenize("When Mary and John went to the store, John gave a drink to")
    hf = smollm2.hf
    assert (smollm2.n_layers, smollm2.n_heads, smollm2.n_kv_heads, smollm2.d_head) == (30, 9, 3, 64)
    assert "dequantised from Q4_1" in smollm2.note
    hf.set_attn_implementation("eager")
    with torch.no_grad():
        eager = hf(tokens).logits
    hf.set_attn_implementation("sdpa")
    with torch.no_grad():
        sdpa = hf(tokens).logits
    run = smollm2.run(tokens, read=["pattern.*", "v.*", "z.*", "head_out.*", "attn_out.*", "logits"])
    assert torch.equal(run.logits, eager)
    assert torch.equal(smollm2.run(tokens, read=["q.*", "z.*", "attn_out.*", "logits"]).logits, sdpa)
    assert smollm2.token_strings(run.logits[0, -1:].argmax(-1)) == [" Mary"]
    for layer in (0, 12, 29):
        torch.testing.assert_close(run[f"head_out.{layer}"].sum(2), run[f"attn_out.{layer}"], rtol=0, atol=1e-3)
        v = run[f"v.{layer}"].repeat_interleave(3, dim=1)
        mixed = (run[f"pattern.{layer}"] @ v).transpose(1, 2)
        torch.testing.assert_close(mixed, run[f"z.{layer}"], rtol=0, atol=1e-4)


def test_smollm2_texts_and_padding(smollm2):
    texts = ["The capital of France is", "Paris"]
    with pytest.raises(ClearheadError, match="cannot share a batch without padding"):
        smollm2.tokenize(texts)
    with pytest.raises(ClearheadError, match="no tokens"):
        smollm2.tokenize("")
    tokens, mask = smollm2.tokenize_padded(texts, side="left")
    alone = smollm2.run(smollm2.tokenize(texts[1])).logits[0, -1]
    among = smollm2.run(tokens, attention_mask=mask).logits[1, -1]
    torch.testing.assert_close(among, alone, rtol=0, atol=1e-3)
    pieces = smollm2.token_strings(smollm2.tokenize("na\u00efve \U0001f389")[0])
    assert "".join(pieces).startswith("na\u00efve")
    assert pieces[-1].startswith("\\x")
