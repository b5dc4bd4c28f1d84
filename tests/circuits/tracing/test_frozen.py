"""Frozen models: sources and constants reproduce the stream, and carrying up agrees with carrying down."""

from functools import cache

import pytest
import torch

from clearhead.circuits.tracing import frozen as module
from clearhead.circuits.tracing.frozen import Frozen
from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.model.gates import install
from clearhead.spectral.writes import Parts, Stream
from tests.model import tiny_configs
from tests.model.tiny_configs import GPT2, LLAMA, VOCABULARY, build

TOKENS = (torch.arange(5, 17) * 7 % VOCABULARY)[None]
EXACT = ("gpt2", "gpt_neox", "gpt_neox_sequential", "opt", "bloom")  # float64 throughout
FLOAT32_INSIDE = ("llama", "llama_biased", "qwen3", "gemma2", "olmo2", "cohere", "granite_scaled")
CONFIGURED = {
    "granite_scaled": LLAMA | {"model_type": "granite", "residual_multiplier": 0.3},
    "llama_biased": LLAMA | {"model_type": "llama", "attention_bias": True},
    "gpt2_deep": GPT2 | {"model_type": "gpt2", "n_layer": 4},
}


@cache
def model_of(name):
    with pytest.MonkeyPatch.context() as patch:
        if name in CONFIGURED:
            patch.setitem(tiny_configs.CONFIGS, name, CONFIGURED[name])
        return Model(build(name).double(), self_test=False)


@cache
def frozen_of(name, replaced=()):
    return Frozen(Stream(Parts(model_of(name)), TOKENS), replaced)


def pushed(frozen, writes):
    """(depth, write [t, d]) of one component, carried to every depth."""
    places = range(len(frozen))
    depth = [depth for depth, _ in writes for _ in places]
    vectors = torch.cat([write for _, write in writes])
    row = torch.zeros(len(vectors), dtype=torch.int64)
    return {at: stream[0] for at, stream in frozen.push(vectors, depth, [*places] * len(writes), row)}


def all_writes(frozen):
    """The embedding, the MLPs, the constants, and the output of attention layers that carry nothing."""
    places = range(len(frozen))
    writes = [(0, frozen.state(0)), *((constant.depth, constant.write) for constant in frozen.constants)]
    for layer in range(frozen.n_layers):
        writes.append((2 * layer + 2, frozen.mlp_write(layer, frozen.stream.site("mlp_out", layer), places)))
    for layer in frozen.replaced:
        out = frozen.stream.site("attn_out", layer)
        writes.append((frozen.attention_depth(layer), frozen.attention_write(layer, out, places)))
    return writes


@pytest.mark.parametrize("replaced", [(), (0,)])
@pytest.mark.parametrize("name", EXACT + FLOAT32_INSIDE)
def test_sources_and_constants_reproduce_the_stream(name, replaced):
    frozen = frozen_of(name, replaced)
    streams = pushed(frozen, all_writes(frozen))
    assert sorted(streams) == list(range(frozen.top + 1))
    for depth, stream in streams.items():
        assert torch.allclose(stream, frozen.state(depth), rtol=0, atol=1e-10)
    run = frozen.stream.run
    assert torch.equal(frozen.state(2), run["resid_pre.1"][0])
    assert torch.equal(frozen.state(4), run["resid_post.1"][0])
    if not frozen.parallel:
        mid = frozen.stream.parts.model.run(TOKENS, read=["resid_mid.1"])["resid_mid.1"][0]
        assert (frozen.state(3) - mid).abs().max() < 1e-6 * mid.abs().max()


@pytest.mark.parametrize("name", EXACT + FLOAT32_INSIDE)
def test_constants_are_those_of_the_weights(name):
    frozen = frozen_of(name)
    tolerance = 1e-12 if name in EXACT else 1e-5
    scale = frozen.state(frozen.top).abs().max()
    found = torch.zeros(())
    for layer in range(2):
        writes = [constant.write for constant in frozen.constants if constant.layer == layer]
        found = torch.stack(writes).sum(0)
        assert (found - frozen._attention_bias(layer)).abs().max() < tolerance * scale
    if name in ("gpt2", "llama_biased"):
        assert found.abs().max() > 0.1


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_one_layer_is_the_models_own_attention(name):
    """The difference that a write makes to attn_out when patterns and scales are put back."""
    frozen = frozen_of(name)
    model, run = frozen.stream.parts.model, frozen.stream.run
    write = torch.randn(12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    norm = frozen.stream.parts.layers[1].norm
    assert norm is not None and norm.gain is not None and norm.bias is not None
    scale = norm.frozen_scale(run["resid_pre.1"])
    read = norm.centre(run["resid_pre.1"] + write) * scale * norm.gain + norm.bias
    v = model.weights(1).project(read).v.detach()
    changed = model.run(TOKENS, read=["attn_out.1"], edit={"v.1": v, "pattern.1": run["pattern.1"]})
    expected = changed["attn_out.1"] - run["attn_out.1"]
    assert torch.allclose(frozen.carriers[1].push(write[None]), expected, atol=1e-10)


@pytest.mark.parametrize("replaced", [(), (1,)])
@pytest.mark.parametrize("name", ["gpt2_deep", "gpt_neox", "gemma2", "olmo2", "llama"])
def test_carrying_up_agrees_with_carrying_down(name, replaced, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 1200)  # several blocks
    frozen = frozen_of(name, replaced)
    generator = torch.Generator().manual_seed(2)
    step = 2 if frozen.parallel else 1
    top = frozen.top // step + 1
    depths = [torch.randint(0, top, (9,), generator=generator) * step for _ in range(2)]
    places = [torch.randint(0, 12, (9,), generator=generator) for _ in range(2)]
    writes, reads = torch.randn(2, 9, 32, dtype=torch.float64, generator=generator)
    up = torch.zeros(9, 9, dtype=torch.float64)
    for depth, stream in frozen.push(writes, depths[0], places[0]):
        for m in (depths[1] == depth).nonzero()[:, 0]:
            up[:, m] = stream[:, places[1][m]] @ reads[m]
    down = torch.zeros(9, 9, dtype=torch.float64)
    for depth, gradient in frozen.pull(reads, depths[1], places[1]):
        for n in (depths[0] == depth).nonzero()[:, 0]:
            down[n] = gradient[:, places[0][n]] @ writes[n]
    assert (up - down).abs().max() < 1e-10 * up.abs().max()
    assert (up != 0).sum() > 8
    assert not up[(depths[0][:, None] > depths[1]) | (places[0][:, None] > places[1])].any()


def test_streams_handed_out_are_not_changed_later():
    frozen = frozen_of("gpt2_deep")
    reads = torch.randn(3, 32, dtype=torch.float64)
    kept, sums = [], []
    for _, gradient in frozen.pull(reads, [8, 5, 2], [11, 4, 7]):
        kept.append(gradient)
        sums.append(gradient.sum().clone())
    assert [gradient.sum() for gradient in kept] == sums and len(kept) == 9


def test_reads_of_one_row_add_up():
    frozen = frozen_of("gpt2_deep")
    reads = torch.randn(3, 32, dtype=torch.float64)
    apart = dict(frozen.pull(reads, [8, 5, 2], [11, 4, 7]))
    together = dict(frozen.pull(reads, [8, 5, 2], [11, 4, 7], [0, 0, 1]))
    for depth, gradient in together.items():
        assert torch.allclose(gradient, torch.stack([apart[depth][:2].sum(0), apart[depth][2]]), atol=1e-12)


def test_gated_patterns_are_what_is_held():
    model = Model(build("llama").double(), self_test=False)
    install(model, bias=-0.5)
    frozen = Frozen(Stream(Parts(model), TOKENS))
    closed = frozen.carriers[1].pattern[..., torch.ones(12, 12).tril().bool()] == 0
    assert 0.1 < closed.double().mean() < 0.9
    streams = pushed(frozen, all_writes(frozen))
    assert torch.allclose(streams[4], frozen.stream.run["resid_post.1"][0], atol=1e-10)


def test_what_cannot_be_frozen_is_refused():
    stream = frozen_of("gpt2").stream
    with pytest.raises(ClearheadError, match=r"layers \[7\] are replaced, but the model has layers 0 to 1"):
        Frozen(stream, [0, 7])
    read = torch.zeros(1, 32, dtype=torch.float64)
    with pytest.raises(ClearheadError, match="depth 5 lies outside .*: 0 to 4"):
        next(frozen_of("gpt2").pull(read, [5], [0]))
    with pytest.raises(ClearheadError, match="position 12 lies outside .*: 0 to 11"):
        next(frozen_of("gpt2").push(read, [0], [12]))
    with pytest.raises(ClearheadError, match="got 1 vectors, 2 depths, 1 positions, 1 rows"):
        next(frozen_of("gpt2").pull(read, [0, 1], [0]))
