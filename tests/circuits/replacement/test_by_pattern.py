"""The circuit between patterns: sums of single edges, the planted induction circuit, and the same without it."""

import pytest
import torch

from clearhead.circuits.replacement.by_pattern import NEXT, Grouping
from clearhead.circuits.replacement.coactivity import CoActivity
from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.replacement.global_graph import trace_global
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.units import Unit
from tests.circuits.induction import induction_model
from tests.circuits.planted import WIDTH
from tests.circuits.replacement.replaced import EDGES, copies, induction, prompts


def transcoder(model, layer):
    """One whose features read and write at random."""
    place = {"model": model.name, "layer": layer, "input_site": f"mlp_in.{layer}", "output_site": f"mlp_out.{layer}"}
    one = Transcoder(TranscoderConfig(d_in=model.d_model, d_out=model.d_model, n_features=12, k=4), place).double()
    generator = torch.Generator().manual_seed(layer)
    with torch.no_grad():
        for parameter in (one.W_enc, one.W_dec):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 10)
    return one


def test_members_are_summed_and_features_go_with_what_feeds_them():
    model = induction_model()
    placed = [*copies(model, k=9), *(transcoder(model, layer) for layer in range(2))]
    activity = CoActivity(model, Dictionaries(model, placed))
    for block in prompts()[:3]:
        activity.add(block)
    grouping = Grouping(activity)
    assert grouping(Unit("lorsa", 1, WIDTH + 1)) == Unit("head", 1, 1)
    assert grouping(Unit("embedding", index=3)) == Unit("input") and grouping(Unit("logit", index=3)) == NEXT
    assert grouping(Unit("head_k", 1, 2)) == Unit("head_k", 1, 2)
    graph = trace_global(model, activity.dictionaries, prompts()[:3], edges=10**6).patterns
    for block in activity.incoming():
        expected = {}
        for row, source in enumerate(block.sources):
            for column in block.weight[row].nonzero().flatten().tolist():
                ends = grouping(source), grouping(block.targets[column])
                expected[ends] = expected.get(ends, 0.0) + float(block.weight[row, column])
        found = {ends: graph.weights_between(ends[0].id, ends[1].id) for ends in expected}
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    sources = [unit for unit in grouping.words if unit.kind in ("input", "positions", "head", "features")]
    block = activity.into_features(1)
    for feature, column in zip(block.targets, block.weight.unbind(1), strict=True):
        fed = {}
        for source, weight in zip(block.sources, column.tolist(), strict=True):
            fed[grouping(source)] = fed.get(grouping(source), 0.0) + weight
        assert sources.index(max(fed, key=fed.__getitem__)) == grouping(feature).index
    words = {grouping.words[grouping(Unit("feature", layer, n))][:14] for layer in range(2) for n in range(12)}
    assert words == {"MLP 0: fed by ", "MLP 1: fed by "}


def test_the_planted_circuit_is_seen_at_a_glance():
    """Head 0.2 looks at the token before and feeds the keys of head 1.1, whose queries are the token itself."""
    circuit = induction()
    graph = circuit.patterns
    into = {}
    for source, target, weight in zip(graph.source, graph.target, graph.weight, strict=True):
        into.setdefault(graph.units[target].id, {})[graph.units[source].id] = float(weight)
    keys, queries = into["head_k.1.1"], into["head_q.1.1"]
    assert max(keys, key=keys.get) == "head.0.2" and keys["head.0.2"] > 0.95 * sum(map(abs, keys.values()))
    assert max(queries, key=queries.get) == "input" and queries["input"] > 0.95 * sum(map(abs, queries.values()))
    assert max(into["target.0"], key=into["target.0"].get) == "head.1.1"
    assert "token before" in graph.labels["head.0.2"]
    without = {unit.id: loss - circuit.loss_replaced for unit, loss in circuit.loss_without.items()}
    needed = {"head.0.2", "head.1.1"}
    assert all((rise > 0.3) == (unit in needed) for unit, rise in without.items())
    place = graph.place(Unit("head", 0, 2))
    assert graph.values["rise of the loss without it"][place] == pytest.approx(without["head.0.2"])
    assert circuit.loss == pytest.approx(circuit.loss_replaced)


def test_without_the_previous_token_head_the_path_is_gone():
    model = induction_model()
    with torch.no_grad():
        dict(model.hf.named_parameters())["transformer.h.0.attn.c_proj.weight"][2 * WIDTH : 3 * WIDTH] = 0
    circuit = trace_global(model, Dictionaries(model, copies(model)), prompts()[:8], edges=EDGES)
    assert Unit("head", 0, 2) not in circuit.patterns and Unit("head", 1, 1) in circuit.patterns
    assert circuit.loss > induction().loss + 0.3
