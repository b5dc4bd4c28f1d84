"""Steering: edges predict what is measured when all but the linear part is held, and the real model is what it is."""

import math

import pytest
import torch

from clearhead.circuits.tracing.readers import read_units
from clearhead.circuits.tracing.steer import predict, steer
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from clearhead.spectral.tracing import Target
from clearhead.units import Unit
from clearhead.units.graph import Graph
from clearhead.units.provenance import Provenance
from tests.circuits.opened_prompts import LAST, TOKENS, opened

LOGITS = [Unit("logit", index=3, position=LAST), Unit("logit", index=40, position=6)]
FAMILIES = ("gpt2", "gpt_neox", "llama", "gemma2", "olmo2", "granite_scaled")


def turned(prompt):
    """An embedding, a constant, and several of what dictionaries say, one unit of every kind, early positions."""
    kinds: dict[str, Unit] = {}
    for unit in prompt.sources.units:
        if unit.position in (None, 2, 5) and (unit.layer or 0) == 0:
            kinds.setdefault(unit.kind, unit)
    return dict(zip(kinds.values(), (0.0, 2.0, -1.0, 0.5, 3.0, 1.5, -2.0), strict=False))


@pytest.mark.parametrize("kind", ["none", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_everything_held_the_measured_effect_is_the_prediction(family, kind):
    prompt = opened(family, kind)
    factors = turned(prompt)
    features = [u for u in prompt.sources.units if u.kind in ("feature", "lorsa") and u.layer == 1 and u.position == 7]
    effect = steer(prompt, factors, [*LOGITS, *features[:3]], "everything")
    size = max(1.0, float(effect.predicted.abs().max()))
    assert len(factors) >= 3 and size > 1e-3
    assert (effect.measured - effect.predicted).abs().max() < 1e-10 * size
    assert torch.equal(effect.before, read_units(prompt, effect.targets).value)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_nothing_held_it_is_the_models_own_answer(family):
    prompt = opened(family, "all")
    model = prompt.parts.model
    place = prompt.sources.units[2]
    effect = steer(prompt, {place: 0.25}, LOGITS)
    assert place.kind == "embedding" and place.position == 2

    def edit(value, _run):
        value = value.clone()
        value[:, 2] -= 0.75 * prompt.frozen.state(0)[2]
        return value

    run = model.run(TOKENS, read=["logits", "resid_post.1"], edit={"resid_pre.0": edit}, path="eager")
    cap = model.hf.config.to_dict().get("final_logit_softcapping")
    after, before = ((x if cap is None else cap * torch.atanh(x / cap)) for x in (run.logits, prompt.stream.run.logits))
    change = (after - after.mean(-1, keepdim=True)) - (before - before.mean(-1, keepdim=True))
    expected = torch.stack([change[0, LAST, 3], change[0, 6, 40]])
    assert torch.allclose(effect.measured, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(effect.predicted, expected, rtol=0.05)


def test_with_attention_held_mlps_answer():
    prompt = opened("gpt2", "all")
    factors = turned(prompt)
    effects = [steer(prompt, factors, LOGITS, held) for held in ("everything", "attention", "nothing")]
    assert (effects[0].measured - effects[1].measured).abs().max() > 1e-3
    assert (effects[1].measured - effects[2].measured).abs().max() > 1e-3
    # what only the last MLP could answer to is the same for both: nothing lies above its writes
    last = next(unit for unit in prompt.sources.units if unit.kind == "feature" and unit.layer == 1)
    direct = [steer(prompt, {last: 0.0}, [Unit("logit", index=3, position=last.position)], h) for h in HELD_TWO]
    assert float(direct[0].measured) == pytest.approx(float(direct[1].measured), abs=1e-10)
    assert float(direct[0].measured) == pytest.approx(float(direct[0].predicted), abs=1e-10)


HELD_TWO = ("everything", "attention")


def test_a_factor_of_one_changes_nothing():
    prompt = opened("llama", "all")
    for held in ("everything", "attention", "nothing"):
        effect = steer(prompt, dict.fromkeys(turned(prompt), 1.0), LOGITS, held)
        assert not effect.measured.any() and not effect.predicted.any()


def test_differences_of_logits_are_targets_too():
    prompt = opened("gpt2", "none")
    effect = steer(prompt, {prompt.sources.units[2].id: 0.0}, Target((3,), (5,)), "everything")
    single = steer(prompt, {prompt.sources.units[2]: 0.0}, [Unit("logit", index=v, position=LAST) for v in (3, 5)])
    assert float(effect.predicted) == pytest.approx(float(single.predicted[0] - single.predicted[1]))
    assert float(effect.measured) == pytest.approx(float(effect.predicted), abs=1e-10)


def test_a_graph_predicts_by_its_edges():
    prompt = opened("llama", "all")
    reads = read_units(prompt, LOGITS)
    edges = reads.edges(prompt)
    units = [*prompt.sources.units, *reads.targets]
    target, source = edges.nonzero(as_tuple=True)
    graph = Graph(units, source, target + len(prompt.sources), edges[target, source], Provenance("tiny", "edges"))
    factors = turned(prompt)
    found = predict(graph, factors)
    effect = steer(prompt, factors, LOGITS, "everything")
    for unit, expected in zip(effect.targets, effect.predicted.tolist(), strict=True):
        assert found[unit] == pytest.approx(expected)
    assert predict(graph, {units[0].id: 1.0}) == {}


def test_bad_requests_are_refused():
    prompt = opened("gpt2", "all")
    unit = prompt.sources.units[0]
    with pytest.raises(UnknownNameError, match="feature.0.999@2"):
        steer(prompt, {"feature.0.999@2": 0.0}, LOGITS)
    with pytest.raises(UnknownNameError, match="part to hold"):
        steer(prompt, {unit: 0.0}, LOGITS, "mlps")
    with pytest.raises(ClearheadError, match="at least one unit with a factor"):
        steer(prompt, {}, LOGITS)
    with pytest.raises(NonFiniteError, match="factor of .* is nan"):
        steer(prompt, {unit: math.nan}, LOGITS)
    with pytest.raises(NonFiniteError, match="grow without bound"):
        steer(opened("llama", "none"), {opened("llama", "none").sources.units[2]: 1e200}, LOGITS, "attention")
    graph = Graph([unit], [], [], [], Provenance("tiny", "edges"))
    with pytest.raises(NonFiniteError, match="is inf"):
        predict(graph, {unit: math.inf})
    with pytest.raises(UnknownNameError, match="unit of this graph"):
        predict(graph, {"logit.3@2": 0.0})
