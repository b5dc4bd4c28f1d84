"""Starting weights: what they copy, what they find in data, and what they refuse."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clearhead.dictionaries.init import (
    METHODS,
    draw_sample,
    from_attention,
    initialise,
    lorsa_config,
    start_sinks,
    with_original_queries_keys,
)
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.access import Model
from clearhead.model.geometry import attention_geometry
from clearhead.model.weights import attention_weights
from clearhead.training.dictionary_task import measure_scales
from tests.model.tiny_configs import build

TINY = Path(__file__).parent.parent / "assets" / "tiny-gpt2-2L"


def start(model: Model, method: str, *, heads: int, groups: int, k: int = 8, seed: int = 0, **options):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, model.d_vocab - 1, (24, 32), generator=generator)
    sample = draw_sample(model, 1, tokens)
    scales = measure_scales(sample.x, sample.y)
    shape = lorsa_config(attention_geometry(model, 1), model.d_model, heads=heads, groups=groups, k=k, **options)
    lorsa = Lorsa(shape)
    initialise(lorsa, method, attention_weights(model, 1), sample, scales.input, scales.output, seed)
    return lorsa, sample, scales


def fvu(lorsa, sample, scales) -> float:
    y = sample.y[:, 1:]
    guess = lorsa(sample.x * scales.input).y[:, 1:] / scales.output
    return float((y - guess).square().sum() / (y - y.mean((0, 1))).square().sum())


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("method", ["data", "original"])
def test_patterns_start_as_the_original_ones(family, method):
    model = Model(build(family), self_test=False)
    lorsa, sample, scales = start(model, method, heads=4 * 3 * 8, groups=12)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, model.d_vocab - 1, (24, 32), generator=generator)
    pattern = model.run(tokens, read=["pattern.1"])["pattern.1"]
    own = lorsa.patterns(sample.x * scales.input)
    torch.testing.assert_close(own, pattern.repeat_interleave(3, 1), atol=2e-4, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gpt_oss"])
def test_patterns_of_a_group_start_as_one(family):
    model = Model(build(family), self_test=False)
    shared, sample, scales = start(model, "original", heads=32, groups=4)
    own, *_ = start(model, "original", heads=32, groups=4, patterns_per_group=2)
    x = sample.x * scales.input
    torch.testing.assert_close(own.patterns(x), shared.patterns(x).repeat_interleave(2, 1), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_without_a_rotation_gates_scale_singular_directions():
    model = Model(build("gpt2"), self_test=False)
    own, *_ = start(model, "data", heads=32, groups=4, patterns_per_group=8)
    for weight, bias in ((own.W_Q, own.b_Q), (own.W_K, own.b_K)):
        rows = torch.cat([weight, bias[..., None]], -1)
        products = rows @ rows.mT
        lengths = products.diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(products, torch.diag_embed(lengths), atol=1e-5, rtol=1e-3)
        assert bool((lengths.diff(dim=-1) <= 1e-6).all())


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_added_sink_starts_as_nothing(family):
    model = Model(build(family), self_test=False)
    lorsa, sample, scales = start(model, "data", heads=32, groups=4, patterns_per_group=2, sink=True)
    x = sample.x[:8] * scales.input
    start_sinks(lorsa, x)
    taken = 1 - lorsa.patterns(x).sum(-1)[:, :, 1:]
    torch.testing.assert_close(
        taken.transpose(0, 1).flatten(1).median(1).values, torch.full((8,), 1e-3), rtol=0.15, atol=0
    )


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt_oss"])
def test_copied_queries_and_keys_restore_the_original_patterns(family):
    model = Model(build(family), self_test=False)
    options = {"patterns_per_group": 2, "sink": True, "heads": 32, "groups": 8}
    lorsa, sample, _ = start(model, "original", **options)
    for name, parameter in lorsa.named_parameters():
        if name not in ("W_V", "W_O", "b_V", "b_D"):
            parameter.normal_()
    before = {name: tensor.clone() for name, tensor in lorsa.state_dict().items()}
    weights = attention_weights(model, 1)
    own = from_attention(weights, attention_geometry(model, 1)).patterns(sample.x)
    twin = with_original_queries_keys(lorsa, weights)
    torch.testing.assert_close(twin.patterns(sample.x), own.repeat_interleave(4, 1), atol=1e-5, rtol=1e-4)
    host = torch.tensor([3, 1, 0, 2, 2, 0, 1, 3])
    chosen = with_original_queries_keys(lorsa, weights, host).patterns(sample.x)
    torch.testing.assert_close(chosen, own[:, host].repeat_interleave(2, 1), atol=1e-5, rtol=1e-4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in lorsa.state_dict().items())
    assert torch.equal(twin.W_V, lorsa.W_V) and torch.equal(twin.W_O, lorsa.W_O)


@torch.no_grad()
def test_reference_start_leaves_out_query_and_key_biases_and_ours_does_not():
    model = Model(build("qwen2"), self_test=False)
    weights = attention_weights(model, 1).per_head()
    with torch.no_grad():
        weights.b_Q.normal_()
    theirs, _, _ = start(model, "reference", heads=32, groups=4)
    ours, _, _ = start(model, "data", heads=32, groups=4)
    assert float(theirs.b_Q.abs().max()) == 0
    torch.testing.assert_close(ours.b_Q, weights.b_Q)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_decoder_rows_have_norm_one(method):
    model = Model.load(str(TINY), self_test=False)
    lorsa, _, _ = start(model, method, heads=256, groups=4)
    torch.testing.assert_close(lorsa.W_O.norm(dim=-1), torch.ones(256))


@torch.no_grad()
def test_the_model_helps_and_its_data_helps_more():
    model = Model.load(str(TINY), self_test=False)
    score = {m: fvu(*start(model, m, heads=512, groups=8, k=16)) for m in METHODS}
    assert score["data"] < score["original"] < score["random"]
    assert score["data"] < score["reference"]


@torch.no_grad()
def test_the_same_seed_gives_the_same_weights():
    model = Model.load(str(TINY), self_test=False)
    first, second, other = (start(model, "data", heads=256, groups=4, seed=s)[0].state_dict() for s in (3, 3, 4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["W_V"], other["W_V"])


def test_fewer_groups_than_heads_are_refused():
    model = Model.load(str(TINY), self_test=False)
    with pytest.raises(ClearheadError, match="Raise --groups"):
        start(model, "data", heads=64, groups=2)


def test_unknown_methods_are_named():
    model = Model.load(str(TINY), self_test=False)
    with pytest.raises(UnknownNameError, match="did you mean 'original'"):
        start(model, "originl", heads=64, groups=4)


@torch.no_grad()
def test_copied_queries_of_a_norm_without_gains_keep_no_trained_ones():
    model = Model(build("qwen3"), self_test=False)
    weights = attention_weights(model, 1)
    assert weights.q_norm is not None
    lorsa = from_attention(weights, attention_geometry(model, 1))
    lorsa.q_gain.fill_(3.0)
    twin = with_original_queries_keys(lorsa, replace(weights, q_norm=replace(weights.q_norm, gain=None)))
    assert bool((twin.q_gain == 1).all()) and torch.equal(twin.k_gain, lorsa.k_gain)
