"""Rotations: the model's own tables, the relative form, derivatives, and honest refusals."""

import json
import math

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.model.geometry import attention_geometry, verify_scores
from clearhead.model.rope import RopeSpec, relative, rotate
from tests.model import tiny_configs
from tests.model.tiny_configs import CONFIGS, LLAMA, build

ROPE_TYPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 16,
        "factor": 4.0,
    },
}


def spec(half: int = 4, *, scaling: float = 1.0, interleaved: bool = False, limit: int | None = None) -> RopeSpec:
    return RopeSpec(1.0 / 100 ** (torch.arange(half) / half), scaling, interleaved, 2 * half, limit)


def with_rope(monkeypatch, kind: str):
    parameters = {"rope_theta": 10000.0} | ROPE_TYPES[kind]
    monkeypatch.setitem(tiny_configs.CONFIGS, "scaled", LLAMA | {"model_type": "llama", "rope_parameters": parameters})
    return Model(build("scaled"), self_test=False)


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_scaled_frequencies_are_the_models_own(kind, monkeypatch):
    model = with_rope(monkeypatch, kind)
    assert verify_scores(model, 0, n_tokens=16) < 2e-6
    assert (attention_geometry(model, 0).rope.scaling != 1.0) == (kind in ("yarn", "longrope"))


@pytest.mark.parametrize(("kind", "limit"), [("dynamic", 64), ("longrope", 16)])
def test_frequencies_that_change_with_length_are_refused_beyond_it(kind, limit, monkeypatch):
    model = with_rope(monkeypatch, kind)
    rope = attention_geometry(model, 0).rope
    rope.tables(torch.arange(limit))
    with pytest.raises(ClearheadError, match=f"position {limit} lies beyond {limit}"):
        rope.tables(torch.arange(limit + 1))


def test_longrope_keeps_the_short_frequencies_after_a_long_text(monkeypatch):
    model = with_rope(monkeypatch, "longrope")
    before = attention_geometry(model, 0).rope.inv_freq.clone()
    model.hf(torch.arange(5, 45)[None])
    assert torch.equal(attention_geometry(model, 0).rope.inv_freq, before)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "cohere", "glm4", "olmo3", "gemma3_text"])
def test_tables_equal_those_the_attention_module_receives(name):
    hf = build(name)
    model = Model(hf, self_test=False)
    received = {}
    for layer, attention in enumerate(model.places.attentions):
        attention.register_forward_pre_hook(
            lambda _, args, kwargs, layer=layer: received.update({layer: kwargs["position_embeddings"]}),
            with_kwargs=True,
        )
    hf(torch.arange(5, 45)[None])
    for layer in model.attention_layers:
        rope = attention_geometry(model, layer).rope
        tables = rope.tables(torch.arange(40))
        for ours, theirs in zip(tables, received[layer], strict=True):
            half = theirs[0, :, ::2] if name == "cohere" else theirs[0, :, : ours.shape[-1]]
            assert torch.equal(ours, half)


def test_nope_layers_have_no_rotation(monkeypatch):
    config = LLAMA | {"model_type": "smollm3", "no_rope_layers": [1, 0]}
    monkeypatch.setitem(tiny_configs.CONFIGS, "nope", config)
    model = Model(build("nope"), self_test=False)
    assert attention_geometry(model, 0).rope is not None and attention_geometry(model, 1).rope is None
    assert verify_scores(model, 1) < 2e-6
    monkeypatch.setitem(
        tiny_configs.CONFIGS,
        "nope",
        CONFIGS["cohere2"] | {"model_type": "cohere2", "layer_types": ["sliding_attention", "full_attention"]},
    )
    model = Model(build("nope"), self_test=False)
    assert attention_geometry(model, 0).rope is not None and attention_geometry(model, 1).rope is None
    assert verify_scores(model, 1) < 2e-6


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_offset_only(interleaved):
    rope = spec(scaling=1.25, interleaved=interleaved)
    # two components more than turn
    q, k = torch.randn(2, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    size = float(q.norm() * k.norm())  # a score may lie near 0, its rounding does not
    for i, j in ((3, 3), (9, 2), (0, 30)):
        cos, sin = rope.tables(torch.tensor([i, j]), torch.float64)
        score = rotate(q[None], cos[:1], sin[:1], rope)[0] @ rotate(k[None], cos[1:], sin[1:], rope)[0]
        assert math.isclose(score, q @ relative(rope, j - i, 10) @ k, abs_tol=1e-6 * size)


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_of_rotations_are_rotations(interleaved):
    rope = spec(interleaved=interleaved)
    turn = {offset: relative(rope, offset, 8) for offset in (-4, 2, 3, 7)}
    assert torch.allclose(turn[3].T @ turn[7], relative(rope, 4, 8))  # R(i)ᵀ R(j) = R(j − i)
    assert torch.allclose(turn[3].T, relative(rope, -3, 8))
    assert torch.allclose(turn[-4], relative(rope, 4, 8).T)
    assert not torch.allclose(turn[2], turn[2].T)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_equals_the_textbook_form_for_any_layout_in_memory(interleaved):
    rope = spec(interleaved=interleaved)
    x = torch.randn(2, 7, 3, 12, dtype=torch.float64).transpose(1, 2)
    cos, sin = rope.tables(torch.arange(7), torch.float64)
    found = rotate(x, cos, sin, rope)
    for plane in range(4):
        a, b = (2 * plane, 2 * plane + 1) if interleaved else (plane, plane + 4)
        c, s = cos[:, plane], sin[:, plane]
        assert torch.allclose(found[..., a], x[..., a] * c - x[..., b] * s)
        assert torch.allclose(found[..., b], x[..., b] * c + x[..., a] * s)
    assert torch.equal(found[..., 8:], x[..., 8:])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own forward mode
@pytest.mark.parametrize("interleaved", [False, True])
def test_derivatives(interleaved):
    rope = spec(interleaved=interleaved)
    cos, sin = rope.tables(torch.arange(3), torch.float64)
    x = torch.randn(2, 3, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin, rope), x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, cos, sin, rope), x)
    turn = torch.func.vmap(lambda row, cos, sin: rotate(row, cos, sin, rope), in_dims=(0, None, None))
    assert torch.equal(turn(x, cos, sin), rotate(x, cos, sin, rope))
    over_tables = torch.func.vmap(lambda x, cos, sin: rotate(x, cos, sin, rope), in_dims=(None, 1, 1))
    stacked = over_tables(x, cos[:, None].expand(3, 2, 4), sin[:, None].expand(3, 2, 4))
    assert torch.equal(stacked[1], rotate(x, cos, sin, rope)) and len(stacked) == 2


def test_float64_table_of_float32_angles_and_other_types():
    rope = spec()
    x = torch.randn(5, 8)
    cos, sin = rope.tables(torch.arange(5))
    assert cos.dtype == torch.float32
    low = rotate(x.bfloat16(), cos, sin, rope)
    assert low.dtype == torch.bfloat16 and torch.allclose(low.float(), rotate(x, cos, sin, rope), atol=0.05)


def test_round_trip_through_json_is_bitwise():
    model = Model(build("llama"), self_test=False)
    rope = attention_geometry(model, 0).rope
    again = RopeSpec.from_dict(json.loads(json.dumps(rope.to_dict())))
    assert torch.equal(again.inv_freq.view(torch.int32), rope.inv_freq.view(torch.int32))
    assert again.to_dict() == rope.to_dict()


def test_bad_input():
    rope = spec()
    cos, sin = rope.tables(torch.arange(3))
    with pytest.raises(ClearheadError, match="turns 8 components, but x has only 6"):
        rotate(torch.randn(3, 6), cos, sin, rope)
    with pytest.raises(ClearheadError, match="needs 4 frequencies, got 3"):
        RopeSpec.from_dict(rope.to_dict() | {"inv_freq": [1.0, 0.1, 0.01]})


def test_an_unknown_rotation_is_refused(monkeypatch):
    hf = build("llama")
    source = __import__(type(hf).__module__, fromlist=["rotate_half"])
    monkeypatch.setattr(source, "rotate_half", lambda x: x.flip(-1))
    with pytest.raises(ClearheadError, match="in a way clearhead does not know"):
        attention_geometry(Model(hf, self_test=False), 0)


def test_gptj_tables_of_another_base_are_refused():
    hf = build("gptj")
    hf.transformer.rotary_emb.embed_positions.mul_(0.5)
    with pytest.raises(ClearheadError, match="not the sinusoid of base 10000"):
        attention_geometry(Model(hf, self_test=False), 0)
