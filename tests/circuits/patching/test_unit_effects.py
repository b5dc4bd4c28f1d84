"""Effects of many cases in shared rows: each equals the same change made alone, by the model itself."""

from functools import cache

import pytest
import torch

from clearhead.circuits.patching import unit_effects
from clearhead.circuits.patching.unit_effects import EffectMeter, reader
from clearhead.circuits.tracing.frozen import Frozen
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.model import Model
from clearhead.model.norms import final_norm, unembedding
from clearhead.spectral.writes import Stream
from tests.model.tiny_configs import VOCABULARY, build

TOKENS = torch.arange(5, 17) * 7 % VOCABULARY
POSITIONS = torch.tensor([3, 3, 0, 10, 3, 7])


@cache
def model_of(name):
    hf = build(name)
    return Model(hf if name == "gpt_oss" else hf.double(), name=name, self_test=False)  # its experts know no float64


def cases(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    change = torch.randn(len(POSITIONS), model.d_model, generator=generator, dtype=torch.float64)
    return change, torch.randn(change.shape, generator=generator, dtype=torch.float64)


def alone(model, layer, position, change, base=None):
    """The forward with one change."""

    def edit(y, _):
        y = (y if base is None else base).clone()
        y[0, position] += change
        return y

    last = f"resid_post.{model.n_layers - 1}"
    run = model.run(TOKENS[None], edit={f"attn_out.{layer}": edit}, read=[last, "logits"], path="eager")
    return run[last][0, position].double(), run["logits"][0, position].double()


@pytest.mark.parametrize(
    "name, layer", [("gpt2", 0), ("gpt2", -1), ("llama", 0), ("gemma2", 0), ("gpt_neox", 0), ("gpt_oss", 0)]
)
def test_cases_that_share_rows_are_measured_as_if_alone(name, layer, monkeypatch):
    model = model_of(name)
    layer %= model.n_layers
    change, readers = cases(model)
    monkeypatch.setattr(unit_effects, "TOKENS_AT_ONCE", 24)  # several forwards
    monkeypatch.setattr(unit_effects, "LOGITS_AT_ONCE", 2 * VOCABULARY)
    meter = EffectMeter(model, layer)
    found = meter.measure(meter.open(TOKENS), POSITIONS, change, readers)
    norm = final_norm(model)
    for case, position in enumerate(POSITIONS.tolist()):
        before, logits = alone(model, layer, position, 0 * change[case])
        after, changed = alone(model, layer, position, change[case])
        shift = norm.normalise(after) - norm.normalise(before)
        assert float(found.effect[case]) == pytest.approx(float(shift @ readers[case]), abs=2e-5)
        p, q = logits.log_softmax(-1), changed.log_softmax(-1)
        assert float(found.kl[case]) == pytest.approx(float((p.exp() * (p - q)).sum()), abs=2e-5)
        gold = TOKENS[position + 1]
        assert float(found.loss[case]) == pytest.approx(float(p[gold] - q[gold]), abs=2e-5)
    assert float(found.effect.abs().min()) > 1e-3 and float(found.kl.min()) > 0


@pytest.mark.parametrize("name, step, error", [("gpt2", 1e-4, 1e-6), ("gemma2", 1e-2, 1e-3)])
def test_the_gradient_is_the_limit_of_small_changes(name, step, error, monkeypatch):
    """Central differences in float64 (Gemma's softmax is float32), several changes of a case, in several backwards."""
    model = model_of(name)
    monkeypatch.setattr(unit_effects, "TOKENS_WITH_GRADIENT", 12)
    change, readers = cases(model)
    meter = EffectMeter(model, 0)
    changes = torch.stack([change, -change, change * step, change * -step])
    found = meter.measure(meter.open(TOKENS), POSITIONS, changes, readers)
    assert found.effect.shape == found.kl.shape == (4, len(POSITIONS))
    assert torch.allclose((found.effect[2] - found.effect[3]) / (2 * step), found.gradient[0], atol=error)
    assert torch.allclose(found.gradient[1], -found.gradient[0])
    assert float((found.effect[0] - found.gradient[0]).abs().min()) > 1e-3  # whole changes are not small


def test_without_layers_above_and_with_the_norm_held_the_direct_path_is_all():
    """In a parallel block the last layer's MLP does not read what its attention wrote."""
    model = model_of("gpt_neox")
    change, readers = cases(model)
    meter = EffectMeter(model, model.n_layers - 1)
    block = meter.open(TOKENS)
    found = meter.measure(block, POSITIONS, change * 1e-5, readers)
    assert torch.equal(found.linear, found.direct)
    norm, before = final_norm(model), block.last[POSITIONS]
    scale = norm.frozen_scale(before)
    along = norm.normalise(before)
    # what the frozen scale leaves out: the norm shortens along the stream
    turned = norm.centre(change) - along * (norm.centre(change) * along).mean(1, keepdim=True)
    assert torch.allclose(found.effect, (turned * scale * readers).sum(1) * 1e-5, atol=1e-8)
    assert torch.allclose(found.direct, (norm.centre(change) * scale * readers).sum(1) * 1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_the_linear_path_is_the_frozen_model(name):
    """Against `Frozen.push`, which carries whole prompts."""
    model = model_of(name)
    meter = EffectMeter(model, 0)
    change, readers = cases(model)
    block = meter.open(TOKENS)
    found = meter.measure(block, POSITIONS, change, readers)
    frozen = Frozen(Stream(meter.parts, TOKENS[None]))
    scale = meter.parts.final_norm.frozen_scale(frozen.state(frozen.top))
    for case, position in enumerate(POSITIONS.tolist()):
        write = frozen.attention_write(0, change[case][None], [position])
        carried = dict(frozen.push(write, [1], [position]))[frozen.top][0, position]
        expected = meter.parts.final_norm.centre(carried) @ readers[case] * scale[position]
        assert float(found.linear[case]) == pytest.approx(float(expected), rel=1e-5)


def test_readers_are_the_tokens_raised_less_those_lowered():
    model = model_of("gpt2")
    W_U, _ = unembedding(model)
    found = reader(W_U, torch.tensor([[1, 2]]), torch.tensor([[3, 4]]))
    x = torch.randn(model.d_model, dtype=torch.float64)
    logits = x @ W_U.detach()
    assert float(found[0] @ x) == pytest.approx(float((logits[1] + logits[2] - logits[3] - logits[4]) / 2))


def test_what_cannot_be_measured_is_refused():
    model = model_of("gpt2")
    change, readers = cases(model)
    meter = EffectMeter(model, 0)
    block = meter.open(TOKENS)
    with pytest.raises(ClearheadError, match="positions 0 to 10 of a block of 12"):
        meter.measure(block, POSITIONS + 8, change, readers)
    with pytest.raises(ClearheadError, match="as many positions as changes"):
        meter.measure(block, POSITIONS[:2], change, readers)
    with pytest.raises(NonFiniteError, match="not finite"):
        meter.measure(block, POSITIONS, change * torch.inf, readers)
    with pytest.raises(ClearheadError, match="no layer 9"):
        EffectMeter(model, 9)
