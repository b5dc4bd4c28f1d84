"""Sources of a prompt: pushed through the frozen model they are the stream, whatever dictionaries stand in it."""

import dataclasses

import pytest
import torch

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.tracing.sources import open_prompt
from clearhead.errors import ClearheadError, NonFiniteError
from tests.circuits.opened_prompts import KINDS, TOKENS, model_of, opened, parts_of, transcoder

FAMILIES = ("gpt2", "gpt_neox", "gemma2", "olmo2", "granite_scaled")


def assert_sources_are_the_stream(prompt, tolerance):
    depths = []
    for depth, components in prompt.sources.components(prompt.frozen):
        state = prompt.frozen.state(depth)
        assert (components.sum(0) - state).abs().max() < tolerance * state.abs().max()
        depths.append(depth)
    assert depths == list(range(2 * prompt.stream.n_layers + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_dictionaries_add_up_to_the_stream(kind):
    assert_sources_are_the_stream(opened("llama", kind), 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_add_up_to_the_stream(family):
    assert_sources_are_the_stream(opened(family, "all"), 1e-12)


def test_a_model_in_bfloat16_is_opened_in_float32():
    prompt = opened("llama", "all", torch.bfloat16)
    assert prompt.sources.write.dtype == torch.float32
    assert_sources_are_the_stream(prompt, 1e-5)


def test_what_modules_read_is_what_the_model_gives_them():
    for family in ("llama", "gemma2", "gpt_neox", "cohere", "olmo2"):
        prompt = opened(family, "all")
        run = model_of(family).run(TOKENS, read=["mlp_in.1", "attn_in.1"])
        for site, code in (("mlp_in.1", prompt.mlp[1]), ("attn_in.1", prompt.attention[1])):
            assert torch.allclose(code.x, run[site][0], atol=1e-5), (family, site)


def test_active_features_write_activation_times_decoder_and_errors_the_rest():
    prompt = opened("llama", "transcoder")
    sources, dictionary = prompt.sources, prompt.dictionaries.mlp[1]
    features = [u for u in sources.units if u.kind == "feature" and u.layer == 1 and u.position == 4]
    assert len(features) == 3
    for unit in features:
        entry = int((sources.unit == sources.place[unit]).nonzero())
        assert torch.allclose(sources.write[entry], unit.activation * dictionary.W_dec[unit.index])
        assert (int(sources.depth[entry]), int(sources.position[entry])) == (4, 4)
    coded = dictionary(prompt.mlp[1].x)
    entries = (
        sources.unit
        == torch.tensor([u.kind == "error" and u.layer == 1 for u in sources.units]).nonzero().T[0][:, None]
    )
    errors = sources.write[entries.any(0)]
    assert torch.allclose(errors, prompt.stream.site("mlp_out", 1) - coded.y, atol=1e-12)


def test_a_cross_layer_feature_writes_behind_every_mlp_above_it():
    sources = opened("llama", "clt").sources
    unit = next(u for u in sources.units if u.kind == "feature" and u.layer == 0)
    assert sources.depth[sources.unit == sources.place[unit]].tolist() == [2, 4]


def test_attention_of_parallel_blocks_enters_with_the_mlp():
    sources = opened("gpt_neox", "lorsa").sources
    heads = torch.tensor([unit.kind == "lorsa" for unit in sources.units])
    assert set(sources.depth[heads[sources.unit]].tolist()) == {4}


def test_bad_prompts_are_refused():
    parts = parts_of("llama")
    with pytest.raises(ClearheadError, match="no tokens"):
        open_prompt(parts, TOKENS[:, :0])
    with pytest.raises(ClearheadError, match=r"reads \d+: give a shorter"):
        open_prompt(parts, TOKENS.repeat(1, 20))
    with pytest.raises(ClearheadError, match="is traced"):
        open_prompt(parts, TOKENS, Dictionaries(model_of("gpt2")))
    with pytest.raises(ClearheadError, match="no gradients"):
        opened("llama", "none").sources.edges([])


def test_a_dictionary_that_writes_nan_is_refused():
    model = model_of("llama")
    broken = transcoder(model, 0)
    broken.W_dec.data[:] = torch.nan
    with pytest.raises(NonFiniteError, match="dictionaries write"):
        open_prompt(parts_of("llama"), TOKENS, Dictionaries(model, [broken]))


def test_entries_are_sorted_and_belong_to_their_units():
    sources = opened("gemma2", "all").sources
    keys = sources.depth * 100 + sources.position
    assert bool((keys.diff() >= 0).all())
    for entry, unit in enumerate(sources.unit.tolist()):
        position = sources.units[unit].position
        assert position is None or position == int(sources.position[entry])
    assert dataclasses.fields(sources)[0].name == "units" and len(set(sources.units)) == len(sources)
