"""Tracing: a planted circuit is found, flows are conserved, seeds add up to the logit difference."""

from collections import Counter, defaultdict
from functools import cache

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.spectral import tracing
from clearhead.spectral.signals import SIDES, Firing, threshold
from clearhead.spectral.tracing import (
    NothingToTraceError,
    Target,
    attention,
    find_seeds,
    firing_named,
    logit_writes,
    trace,
)
from clearhead.spectral.writes import Parts, Stream
from clearhead.units import Graph, Unit
from tests.model import tiny_configs
from tests.model.test_weights import TOKENS
from tests.model.tiny_configs import GPT2, build

DEEP = GPT2 | {"model_type": "gpt2", "n_layer": 4}


HEADS_SPEAK = {"attn.c_attn": 0.6, "attn.c_proj": 3.0, "mlp.c_proj": 0.1}
"""Softer attention, louder heads and quieter MLPs than tests of the model want: firings then come from firings."""


@cache
def stream_of(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_configs.CONFIGS, "gpt2_deep", DEEP)
        hf = build(name, seed=int(name == "gpt2_deep")).double()
    if name == "gpt2_deep":
        with torch.no_grad():
            for place, parameter in hf.named_parameters():
                parameter *= next((factor for part, factor in HEADS_SPEAK.items() if part in place), 1.0)
    return Stream(Parts(Model(hf, self_test=False)), TOKENS[:1])


def target_of(stream):
    """The most likely token against the least likely one."""
    logits = stream.run.logits[0, -1]
    return Target((int(logits.argmax()),), (int(logits.argmin()),))


@pytest.fixture(scope="module")
def traced():
    stream = stream_of("gpt2_deep")
    return stream, trace(stream, target_of(stream), depth=3, prompt="a prompt")


@pytest.mark.parametrize("name", ["gpt2", "llama", "olmo2", "cohere", "opt", "gpt_neox"])
def test_what_components_write_adds_up_to_the_logit_difference(name):
    stream = stream_of(name)
    logits = stream.run.logits[0, -1]
    for target in (Target((3, 5), (7,)), Target((3,))):
        _, written, constant = logit_writes(stream, target)
        wrong = logits[7] if target.wrong else logits.mean()
        expected = float(logits[list(target.answers)].mean() - wrong)
        assert float(written.sum()) + constant == pytest.approx(expected, rel=1e-5, abs=1e-5)
        state = stream.state(2, len(stream) - 1)
        assert float(target.difference(stream.parts, state)) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_seeds_are_the_fewest_firings_that_reach_the_difference(traced):
    stream, found = traced
    components, written, _ = logit_writes(stream, target_of(stream))
    by_firing = {
        Firing(c.layer, c.head, 11, c.source): float(w)
        for c, w in zip(components, written, strict=True)
        if c.kind == "head" and w > 0
    }
    fires = {f: w for f, w in by_firing.items() if attention(stream, f) >= threshold(12)}
    ordered = sorted(fires.values(), reverse=True)
    assert [seed.logits for seed in found.seeds] == ordered[: len(found.seeds)]
    assert len(found.seeds) == len(ordered) or sum(ordered[: len(found.seeds)]) >= found.difference
    assert sum(ordered[: len(found.seeds) - 1]) < found.difference
    assert sum(found.carried.values()) == pytest.approx(found.difference)


def test_attention_flows_through_modes_without_loss(traced):
    _, found = traced
    into, out = defaultdict(float), defaultdict(float)
    for source, target, weight in zip(found.graph.source, found.graph.target, found.graph.weight, strict=True):
        into[found.graph.units[target]] += weight
        out[found.graph.units[source]] += weight
    modes = [unit for unit in found.graph.units if unit.kind == "mode"]
    assert modes and all(into[unit] == pytest.approx(out[unit], abs=1e-12) for unit in modes)
    for firing in found.level:
        lost = sum(found.signals[firing, side].weight - found.signals[firing, side].remaining for side in SIDES)
        assert into[Unit("edge", *firing)] == pytest.approx(lost, abs=1e-9)


def test_every_firing_is_traced_once_and_only_firings_are(traced):
    stream, found = traced
    assert len(found.level) > len(found.seeds)
    assert set(found.signals) == {(firing, side) for firing in found.level for side in SIDES}
    assert all(attention(stream, firing) >= threshold(firing.query + 1) for firing in found.level)
    assert max(found.level.values()) == 2 and found.unexplained == []
    for link in found.links:
        if link.source.kind == "edge":
            source, level = firing_named(link.source), found.level[link.firing]
            assert source.query == link.firing.position(link.side) and source.layer < link.firing.layer
            assert found.level[source] <= level + 1 if level < 2 else found.level.get(source, 2) <= 2


def test_depth_limits_the_levels(traced):
    stream, found = traced
    shallow = trace(stream, target_of(stream), depth=1)
    assert set(shallow.level) == {seed.firing for seed in shallow.seeds}
    first = {key: signal for key, signal in found.signals.items() if found.level[key[0]] == 0}
    assert set(first) == set(shallow.signals)
    assert all(torch.equal(first[key].mask, shallow.signals[key].mask) for key in first)


def test_the_graph_says_where_it_comes_from_and_survives_the_round_trip(traced):
    stream, found = traced
    about = found.graph.provenance
    assert about.token_ids == tuple(TOKENS[0].tolist()) and about.prompt == "a prompt" and "torch" in about.versions
    assert "2.5/(query+1)" in about.protocol and about.model == stream.parts.model.name
    again = Graph.from_dict(found.graph.to_dict())
    assert again.units == found.graph.units and (again.weight == found.graph.weight).all()
    seed = found.seeds[0].firing
    assert again.unit(Unit("edge", *seed)).activation == pytest.approx(attention(stream, seed))
    logit = Unit("logit", index=target_of(stream).answers[0], position=11)
    assert again.weights_between(Unit("edge", *seed), logit) == pytest.approx(found.seeds[0].logits)


def planted():
    """A model in which head 1.1's first mode reads x, and head 0.2 is the only one that writes x."""
    hf = build("gpt2").double()
    x, y = torch.randn(2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, y = x - x.mean(), y - y.mean()
    x, y = x / x.norm(), y / y.norm()
    y = y - (x @ y) * x
    with torch.no_grad():
        for weight in (hf.transformer.wte.weight, hf.transformer.wpe.weight):
            weight -= (weight @ x)[:, None] * x
        for block in hf.transformer.h:
            for linear in (block.attn.c_proj, block.mlp.c_proj):
                linear.weight -= (linear.weight @ x)[:, None] * x
                linear.bias -= (linear.bias @ x) * x
        hf.transformer.h[0].attn.c_proj.weight[16:24] += 4 * torch.ones(8, 1, dtype=torch.float64) * x
        block = hf.transformer.h[1]
        block.ln_1.weight.fill_(1)
        block.ln_1.bias.zero_()
        attention_ = block.attn.c_attn
        for start in (8, 40):  # queries and keys of head 1
            attention_.weight[:, start : start + 8] = 0
            attention_.bias[start : start + 8] = 0
        attention_.weight[:, 8], attention_.weight[:, 40] = 3.0 * x, y
    return Stream(Parts(Model(hf, self_test=False)), TOKENS[:1])


def test_a_planted_circuit_is_found():
    stream = planted()
    pattern = stream.run["pattern.1"][0, 1]
    query = max(range(4, 12), key=lambda i: float(pattern[i].max()))
    firing = Firing(1, 1, query, int(pattern[query].argmax()))
    found = trace(stream, [firing])
    signal = found.signals[firing, "query"]
    assert signal.modes == [0] and signal.found
    assert {component[:3] for component in signal.components} == {("head", 0, 2)}
    sources = {link.source for link in found.links if link.firing == firing and link.side == "query"}
    assert sources and all((unit.layer, unit.index, unit.position) == (0, 2, query) for unit in sources)
    assert found.signals[firing, "key"].modes == [0]
    assert found.difference is None and found.carried == {}
    assert not any(unit.kind == "logit" for unit in found.graph.units)


def test_nothing_is_followed_from_a_side_that_cannot_be_silenced(monkeypatch):
    stream = stream_of("gpt2_deep")
    whole = trace(stream, target_of(stream), depth=1)
    deaf = whole.seeds[0].firing
    right = tracing.strip

    def strip(attribution):
        below = -1.0 if (attribution.firing, attribution.side) == (deaf, "query") else None
        return right(attribution, below=below)

    monkeypatch.setattr(tracing, "strip", strip)
    found = trace(stream, target_of(stream), depth=1)
    assert found.unexplained == [(deaf, "query")] and not found.signals[deaf, "query"].testable
    assert found.signals[deaf, "query"].mask.sum() > whole.signals[deaf, "query"].mask.sum()
    assert found.links == [link for link in whole.links if (link.firing, link.side) != (deaf, "query")]


def test_units_say_what_kind_of_component_wrote(traced):
    _, found = traced
    kinds = Counter(link.source.kind for link in found.links)
    assert {"edge", "head", "embedding"} <= set(kinds) <= {"edge", "head", "mlp", "bias", "embedding"}
    for link in found.links:
        position = link.firing.position(link.side)
        assert link.source.position in (position, None) and (
            link.source.position is not None or link.source.kind == "bias"
        )
        if link.source.kind == "embedding":
            assert link.source.index == int(TOKENS[0, position])


def test_starts_that_lead_nowhere_are_refused():
    stream = stream_of("gpt2")
    target = target_of(stream)
    with pytest.raises(NothingToTraceError, match="the logit difference is -") as caught:
        find_seeds(stream, Target(target.wrong, target.answers))
    assert caught.value.reason == "the model does not prefer the answer"
    with pytest.raises(ClearheadError, match="at least one answer"):
        find_seeds(stream, Target(()))
    with pytest.raises(ClearheadError, match="outside the vocabulary of 0 to 96"):
        find_seeds(stream, Target((97,)))
    pattern = stream.run["pattern.1"][0, 0, 9]
    weak = Firing(1, 0, 9, int(pattern[:10].argmin()))
    with pytest.raises(ClearheadError, match="fires there from 0.250; take a stronger one"):
        trace(stream, [weak])
    with pytest.raises(ClearheadError, match="no attention edge bound to a query"):
        firing_named(Unit("head", 1, 2, 3))
