"""Signals: the stream is the sum of its writes, head vectors are sums of pieces, attributions add up to the weight."""

import dataclasses
from functools import cache

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.spectral import signals
from clearhead.spectral.signals import SIDES, Firing, attribute, read_row, strip, threshold
from clearhead.spectral.writes import Parts, Stream
from tests.model import tiny_configs
from tests.model.test_weights import EXPERTS, TOKENS, VARIANTS
from tests.model.tiny_configs import LLAMA, build

EXACT = ("gpt2", "gpt_neox", "opt", "stablelm_qk_norm", "phi_qk_norm", "bloom", "mpt")  # float64 throughout
FLOAT32_INSIDE = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "hunyuan_v1_dense",
    "cohere",
    "granite_scaled",
)
FAMILIES = (*EXACT, *FLOAT32_INSIDE, "gpt_oss")
CONFIGURED = VARIANTS | {"granite_scaled": LLAMA | {"model_type": "granite", "residual_multiplier": 0.3}}
FIRING = Firing(1, 1, 9, 8)


@cache
def stream_of(name):
    with pytest.MonkeyPatch.context() as patch:
        if name in CONFIGURED:
            patch.setitem(tiny_configs.CONFIGS, name, CONFIGURED[name])
        hf = build(name)
    model = Model(hf if name in EXPERTS else hf.double(), self_test=False)
    return Stream(Parts(model), TOKENS[:1])


def tolerance(name):
    return 1e-12 if name in EXACT else 3e-6


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_add_up_to_the_head_vector(name, side):
    stream = stream_of(name)
    modes = stream.parts.modes(1)
    A, B = modes.project(stream.run["q.1"], stream.run["k.1"])
    found = attribute(stream, FIRING, side)
    expected = A[0, 1, 9] if side == "query" else B[0, 1, 8]
    error = (found.pieces.sum(0) - expected).abs().max() / found.pieces.abs().sum(0).max()
    assert error < tolerance(name)
    assert len(found.components) == len(found.pieces) == len(set(found.components))


@pytest.mark.parametrize("name", FAMILIES)
def test_writes_add_up_to_the_stream_and_a_heads_to_its_output(name):
    stream = stream_of(name)
    components = stream.components(2, 5)
    vectors = stream.read(2, 5, torch.eye(32, dtype=stream.parts.dtype))
    state = stream.state(2, 5)
    assert (vectors.sum(0) - state).abs().max() < tolerance(name) * state.abs().max()
    if stream.parts.layers[1].behind_mlp is None:
        mlp = stream.site("mlp_out", 1)[5] * stream.parts.multiplier
        assert torch.allclose(vectors[components.index(("mlp", 1, None, None))], mlp, atol=1e-12)
    head = [place for place, component in enumerate(components) if component[:3] == ("head", 1, 2)]
    assert [components[place].source for place in head] == list(range(6))
    if stream.parts.layers[1].behind_attention is None:
        written = stream.parts.model.run(TOKENS[:1], read=["head_out.1"])["head_out.1"][0, 5, 2]
        written = written * stream.parts.multiplier
        assert (vectors[head].sum(0) - written).abs().max() < 1e-6 * vectors.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_row_is_the_models_own_attention(name):
    stream = stream_of(name)
    for layer in (0, 1):
        row = read_row(stream, Firing(layer, 2, 9, 7))
        own = stream.run[f"pattern.{layer}"][0, 2, 9]
        first = 10 - len(row.rest)
        assert torch.allclose(row._pattern(row.scores), own[first:10].to(row.A.dtype), atol=1e-6)
        assert own[:first].sum() == 0 and row.key == 7 - first


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gpt_oss"])
def test_gradients_are_those_of_autograd(name):
    row = read_row(stream_of(name), FIRING)
    scores = (0.1 * row.scores).detach().requires_grad_()
    (expected,) = torch.autograd.grad(row.weight(scores), scores)
    assert torch.allclose(row.gradient(scores.detach()), expected, atol=1e-6)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma2", "gpt_oss", "bloom"])
def test_attributions_add_up_to_weight_less_baseline(name, side):
    stream = stream_of(name)
    coarse, fine = (attribute(stream, FIRING, side, steps=steps) for steps in (8, 512))
    assert fine.matrix().sum() == pytest.approx(fine.weight - fine.baseline, abs=1e-5)
    assert abs(fine.gap) < 1e-5 and abs(fine.gap) <= abs(coarse.gap) + 1e-7
    assert abs(attribute(stream, FIRING, side).gap) < 2e-3


def test_baselines_are_a_query_and_a_key_that_read_nothing():
    stream = stream_of("gpt2")

    def without(part, position):
        def edit(x, _run):
            x = x.clone()
            x[:, 1, position] = 0
            return x

        run = stream.parts.model.run(TOKENS[:1], read=["pattern.1"], edit={f"{part}.1": edit})
        return float(run["pattern.1"][0, 1, 9, 8])

    assert attribute(stream, FIRING, "query").baseline == pytest.approx(without("q", 9), abs=1e-12)
    assert attribute(stream, FIRING, "query").baseline == pytest.approx(0.1)
    assert attribute(stream, FIRING, "key").baseline == pytest.approx(without("k", 8), abs=1e-12)


def strongest(stream, layer=1):
    """The firing with the largest attention away from the first tokens."""
    pattern = stream.run[f"pattern.{layer}"][0].clone()
    pattern[:, :4] = 0
    head, query, key = (int(number) for number in torch.unravel_index(pattern.argmax(), pattern.shape))
    return Firing(layer, head, query, key)


def weight_without(attribution, places):
    """The weight when these triples are gone, one by one and by the definition."""
    row, pieces = attribution.row, attribution.pieces.clone()
    for c, m in places:
        pieces[c, m] = 0
    A, B = row.A.clone(), row.B.clone()
    if attribution.side == "query":
        A = pieces.sum(0)
    else:
        B[row.key] = pieces.sum(0)
    return float(row.weight(B @ A))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma2", "stablelm_qk_norm"])
def test_stripping_removes_the_fewest_in_order_of_attribution(name, side):
    stream = stream_of(name)
    found = attribute(stream, strongest(stream), side)
    limit = 0.3 * found.weight
    signal = strip(found, below=limit)
    matrix = found.matrix()
    places = [found.components.index(component) for component in signal.components]
    taken = [(places[c], m) for c, m in signal.mask.nonzero().tolist()]
    taken.sort(key=lambda place: -float(matrix[place]))
    n = len(taken)
    assert n and signal.found and sorted(matrix.flatten().tolist())[-n:] == sorted(float(matrix[t]) for t in taken)
    assert signal.remaining == pytest.approx(weight_without(found, taken), abs=1e-6)
    assert weight_without(found, taken[:-1]) >= limit > signal.remaining
    assert signal.drop.sum() == pytest.approx(found.weight - signal.remaining, abs=1e-9)
    assert float(signal.drop[~signal.mask].abs().sum()) == 0
    assert torch.equal(signal.pieces, found.pieces[places])


def test_stripping_in_blocks_is_stripping_at_once(monkeypatch):
    found = attribute(stream_of("qwen3"), strongest(stream_of("qwen3")), "query")
    whole = strip(found, below=1e-3)
    monkeypatch.setattr(signals, "CHUNK", found.row.B.numel() * 3)
    parts = strip(found, below=1e-3)
    assert torch.equal(whole.mask, parts.mask) and torch.allclose(whole.drop, parts.drop, atol=1e-12)
    assert int(whole.mask.sum()) > 3


def test_what_does_not_fire_has_no_signal_and_what_cannot_be_silenced_says_so():
    found = attribute(stream_of("gpt2"), strongest(stream_of("gpt2")), "query")
    idle = strip(found, below=found.weight * 1.01)
    assert idle.components == [] and idle.modes == [] and idle.found and not idle.testable
    deaf = strip(found, below=-1.0)
    assert not deaf.found and int(deaf.mask.sum()) == int((found.matrix() > 0).sum())


def test_the_threshold_is_that_of_accpp():
    assert [threshold(keys) for keys in (1, 2, 5, 10, 100)] == [1.0, 1.0, 0.5, 0.25, 0.025]
    stream = stream_of("gemma2")  # a window of four keys in layer 0
    assert strip(attribute(stream, Firing(0, 0, 9, 8), "query")).threshold == threshold(4)


@pytest.mark.parametrize(
    ("firing", "says"),
    [
        (Firing(2, 0, 5, 1), "there is no firing"),
        (Firing(1, 4, 5, 1), "there is no firing"),
        (Firing(1, 0, 12, 1), "there is no firing"),
        (Firing(1, 0, 5, 6), "sees keys 0 to 5, not 6"),
        (Firing(1, 0, 0, 0), "sees no key but its own"),
    ],
)
def test_firings_that_cannot_be_are_refused(firing, says):
    with pytest.raises(ClearheadError, match=says):
        attribute(stream_of("gpt2"), firing, "query")


def test_keys_outside_the_window_are_refused():
    with pytest.raises(ClearheadError, match="sees keys 6 to 9, not 5"):
        attribute(stream_of("gemma2"), Firing(0, 0, 9, 5), "query")


@pytest.mark.parametrize("text", ["9.6.15", "a.b.c.d", "1.2.3.-4", ""])
def test_a_firing_is_four_numbers(text):
    assert Firing.parse("9.6.15.3") == Firing(9, 6, 15, 3)
    with pytest.raises(ClearheadError, match="LAYER|layer.head.query.key"):
        Firing.parse(text)


def test_models_whose_stream_is_more_than_heads_and_mlps_are_refused():
    gemma4 = Model(build("gemma4_text"), self_test=False)
    with pytest.raises(ClearheadError, match="writes more into the residual stream"):
        Stream(Parts(gemma4), TOKENS[:1])
    with pytest.raises(ClearheadError, match=r"layers \[0\] of lfm2 have no softmax attention"):
        Parts(Model(build("lfm2"), self_test=False))
    with pytest.raises(ClearheadError, match="one prompt is traced at a time"):
        Stream(stream_of("gpt2").parts, TOKENS)


def test_a_reader_that_does_not_add_up_is_refused(monkeypatch):
    stream = stream_of("gpt2")
    right = signals.read_stream

    def wrong(*args):
        reader = right(*args)
        return reader._replace(offset=reader.offset + 1)

    monkeypatch.setattr(signals, "read_stream", wrong)
    with pytest.raises(ClearheadError, match="does not add up to what head 1.1 reads"):
        attribute(stream, FIRING, "query")


def test_attributions_are_kept_as_two_factors():
    found = attribute(stream_of("gpt2"), FIRING, "key")
    shapes = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    assert shapes["pieces"].shape == (2 + 4 * 9 + 2, 8) and shapes["coefficients"].shape == (8,)
