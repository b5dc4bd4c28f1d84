"""Edges split over heads: every kind of path against its definition, in blocks and whole."""

from functools import cache

import pytest
import torch

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.tracing import loadings
from clearhead.circuits.tracing.frozen import Frozen
from clearhead.circuits.tracing.largest import count_carriers
from clearhead.circuits.tracing.loadings import split_edge, split_edges
from clearhead.circuits.tracing.readers import read_units
from clearhead.circuits.tracing.sources import open_prompt
from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.spectral.writes import Parts
from clearhead.units import Unit
from tests.circuits.opened_prompts import TOKENS, lorsa, opened, transcoder
from tests.model import tiny_configs
from tests.model.tiny_configs import CONFIGS, build

DEEP = {
    "gpt2": {"n_layer": 4},
    "gpt_neox": {"num_hidden_layers": 4},
    "llama": {"num_hidden_layers": 4},
    "gemma2": {"num_hidden_layers": 4},
}


@cache
def prompt_of(name):
    """Four layers, transcoders at 1 and 3 and a Lorsa at 2, so that all kinds of sources and targets occur."""
    if name == "clt":
        prompt = opened("llama", "clt")
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(tiny_configs.CONFIGS, name, CONFIGS[name] | DEEP[name])
            model = Model(build(name).double(), name=name, self_test=False)
        placed = [transcoder(model, 1), transcoder(model, 3), lorsa(model, 2)]
        prompt = open_prompt(Parts(model), TOKENS, Dictionaries(model, placed))
    last = len(prompt) - 1
    targets = [Unit("logit", index=v, position=p) for v, p in ((3, last), (8, last), (3, 6))]
    targets += [unit for unit in prompt.sources.units if unit.kind in ("feature", "lorsa") and unit.position in (5, 9)]
    reads = read_units(prompt, targets)
    edges = reads.edges(prompt)
    target, source = edges.nonzero(as_tuple=True)
    some = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:200]
    source = torch.cat([source[some], torch.tensor([prompt.sources.place[Unit("bias", 0)]] * 3)])
    target = torch.cat([target[some], torch.arange(3)])
    return prompt, reads, source, target, edges[target, source]


NAMES = [*DEEP, "clt"]


def split(name, paths):
    prompt, reads, source, target, edge = prompt_of(name)
    return split_edges(prompt, reads, source, target, edge, paths)


def near(found, expected):
    return bool((found - expected).abs().max() < 1e-10 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("paths", ["last", "first"])
@pytest.mark.parametrize("name", NAMES)
def test_the_last_and_the_first_head_of_every_path_add_up_to_the_edge(name, paths):
    found = split(name, paths)
    assert near(found.remainder + found.edge, found.edge)
    assert found.weight.abs().sum() > 1


@pytest.mark.parametrize("name", NAMES)
def test_one_head_is_what_order_resolved_components_say(name):
    """Components that have passed no head and exactly one head, carried explicitly."""
    prompt, reads, source, target, _ = prompt_of(name)
    found, frozen, sources = split(name, "one"), prompt.frozen, prompt.sources
    none = torch.zeros(len(sources), len(frozen), 32, dtype=torch.float64)
    once = torch.zeros_like(none)
    direct, single = torch.zeros(2, len(reads), len(sources), dtype=torch.float64)
    for depth in range(frozen.top + 1):
        here = sources.depth == depth
        none.index_put_((sources.unit[here], sources.position[here]), sources.write[here], accumulate=True)
        for entry in (reads.depth == depth).nonzero()[:, 0].tolist():
            place, vector = int(reads.position[entry]), reads.vector[entry]
            direct[reads.row[entry]] += none[:, place] @ vector
            single[reads.row[entry]] += once[:, place] @ vector
        carrier = frozen.carrier(depth)
        if carrier is not None:
            once = once + carrier.push(none)
    assert near(found.direct, direct[target, source])
    assert near(found.weight.sum((1, 2)), single[target, source])
    assert near(found.remainder + found.direct + single[target, source], found.edge)
    if name in DEEP:
        assert found.remainder.abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_what_goes_past_a_layer_is_the_edge_without_its_heads(name):
    prompt, reads, source, target, _ = prompt_of(name)
    found, frozen = split(name, "any"), prompt.frozen
    for layer in frozen.carriers:
        without = Frozen(prompt.stream, {*frozen.replaced, layer})
        left = prompt.sources.edges(without.pull(reads.vector, reads.depth, reads.position, reads.row))
        assert near(found.bypass[:, layer], left[target, source])
        assert found.weight[:, layer].abs().max() > 1e-3
    replaced = [layer for layer in range(frozen.n_layers) if layer not in frozen.carriers]
    assert not found.weight[:, replaced].any()


@pytest.mark.parametrize("paths", ["one", "last", "first", "any"])
def test_blocks_change_nothing(paths, monkeypatch):
    whole = split("llama", paths)
    monkeypatch.setattr(loadings, "CHUNK", 6000)
    blocks = split("llama", paths)
    assert near(blocks.weight, whole.weight) and near(blocks.direct, whole.direct)


@pytest.mark.parametrize("paths", ["one", "last", "first", "any"])
@pytest.mark.parametrize("name", NAMES)
def test_an_edge_over_positions_adds_up_to_its_heads(name, paths):
    prompt, reads, source, target, edge = prompt_of(name)
    whole = split(name, paths)
    for x in (int(edge.abs().argmax()), len(edge) - 1):
        parts = split_edge(prompt, reads, int(source[x]), int(target[x]), paths)
        found = torch.zeros_like(whole.weight[0]).index_put((parts.layer, parts.head), parts.weight, accumulate=True)
        assert near(found, whole.weight[x])
        assert bool((parts.key <= parts.query).all()) and bool((parts.weight.abs().diff() <= 0).all())
        keys = torch.stack(parts[:4])
        assert keys.unique(dim=1).shape == keys.shape
        # a feature writes at one position: what is read there by one head alone has that key
        if paths in ("one", "first") and prompt.sources.units[source[x]].position is not None:
            assert set(parts.key.tolist()) <= {prompt.sources.units[source[x]].position}
    if paths == "one" and name == "llama":
        assert 0 < count_carriers(parts.weight) <= len(parts.weight)


def test_loadings_of_a_graph_keep_the_largest():
    found = split("gpt2", "last")
    edges = torch.arange(len(found.edge)) * 2
    whole, most = found.loadings(edges), found.loadings(edges, 0.8)
    assert whole.kind == "last paths" and len(most) < len(whole)
    x = int(found.edge.abs().argmax())
    assert sum(whole.of(2 * x).values()) == pytest.approx(float(found.weight[x].sum()))
    kept = sorted((abs(weight) for weight in most.of(2 * x).values()), reverse=True)
    assert len(kept) == count_carriers(found.weight[x], 0.8)
    assert kept == pytest.approx(found.weight[x].abs().flatten().topk(len(kept)).values.tolist())


def test_bad_requests_are_refused():
    prompt, reads, source, target, edge = prompt_of("gpt2")
    with pytest.raises(ClearheadError, match=r"one length; got \[203\], \[203\], \[2\]"):
        split_edges(prompt, reads, source, target, edge[:2])
    with pytest.raises(ClearheadError, match="'one', 'last', 'first' or 'any' .*; got 'both'"):
        split_edges(prompt, reads, source, target, edge, "both")
    with pytest.raises(ClearheadError, match="do not add up over layers"):
        _ = split("gpt2", "any").remainder
    with pytest.raises(ClearheadError, match="any paths alone"):
        _ = split("gpt2", "one").bypass
