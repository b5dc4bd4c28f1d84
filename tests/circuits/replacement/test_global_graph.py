"""Circuits of whole models: the planted induction circuit, and edges that add up to what they enter."""

import dataclasses
from functools import cache

import pytest
import torch

from clearhead.circuits.replacement import coactivity
from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.replacement.global_graph import trace_global
from clearhead.dictionaries.init import from_attention
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.units import Unit
from clearhead.units.bundle import load_graph, save_graph
from tests.circuits.induction import induction_model
from tests.circuits.planted import VOCABULARY, WIDTH
from tests.model import tiny_configs
from tests.model.tiny_configs import build

EDGES = 400


def copies(model, k=None, **changes):
    """Every attention layer's exact copy, with `k` heads kept."""
    for layer in range(model.n_layers):
        exact = from_attention(model.weights(layer), model.geometry(layer))
        place = {
            "model": model.name,
            "layer": layer,
            "input_site": f"attn_in.{layer}",
            "output_site": f"attn_out.{layer}",
        }
        config = dataclasses.replace(exact.config, k=k or exact.config.k, **changes)
        lorsa = Lorsa(config, place).to(exact.W_V.dtype)
        lorsa.load_state_dict(exact.state_dict(), strict=False)
        yield lorsa


@cache
def prompts():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(40):
        x, a, b, y, z = (3 + torch.randperm(8, generator=generator)[:5]).tolist()
        rows.append([1, x, a, b, y, z, a, b])
    return torch.tensor(rows)


@cache
def induction():
    model = induction_model()
    return trace_global(model, Dictionaries(model, copies(model)), prompts(), edges=EDGES, counted_from=7)


def into(graph, kind, layer=1):
    """Edges into units of a kind in the second layer, those that matter most first."""
    edges = [
        (graph.units[s], graph.units[t], w) for s, t, w in zip(graph.source, graph.target, graph.weight, strict=True)
    ]
    return [edge for edge in edges if edge[1].kind == kind and edge[1].layer in (layer, None)]


def test_the_previous_token_head_feeds_the_keys_of_the_induction_head():
    """Head 0.2 writes the token before into the block that head 1.1 searches with its own token, and copies."""
    graph = induction().heads
    previous, copying = (range(n * WIDTH, n * WIDTH + VOCABULARY) for n in (2, 1))
    for source, target, weight in into(graph, "head_k")[:3]:
        assert source.kind == "lorsa" and source.layer == 0 and source.index in previous
        assert target.id == "head_k.1.1" and weight > 0
    assert [(source.kind, target.id) for source, target, _ in into(graph, "head_q")[:3]] == [
        ("embedding", "head_q.1.1")
    ] * 3
    for source, _, weight in into(graph, "logit")[:3]:
        assert source.layer == 1 and source.index in copying and weight > 0
    for source, target, weight in into(graph, "head_k", layer=0)[:1]:
        assert (source.id, target.id) == ("positions", "head_k.0.2") and weight > 0
    assert graph.weights_between("head_k.1.1", into(graph, "logit")[0][0]) > 0
    assert len(graph) == EDGES and graph.labels["head_k.1.1"] == "keys 1.1"
    assert graph.values["influence"].max() == pytest.approx(1)


def test_a_graph_on_disk_is_the_same(tmp_path):
    graph = induction().heads
    loaded = load_graph(save_graph(graph, tmp_path))
    assert loaded.units == graph.units and (loaded.weight == graph.weight).all()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
@torch.no_grad()
def test_edges_add_up_to_what_they_enter(name):
    """The edges into a head are how far its active pre-activation lies above its mean, those into a pattern its scores.

    Biases cancel where means are subtracted; scores are compared without any.
    """
    model = Model(build(name).double(), name=name, self_test=False)
    with torch.no_grad():
        for parameter_name, parameter in model.hf.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.zero_()
    lorsas = list(copies(model, k=5))
    generator = torch.Generator().manual_seed(0)
    for layer in range(model.n_layers):
        place = {"model": name, "layer": layer, "input_site": f"mlp_in.{layer}", "output_site": f"mlp_out.{layer}"}
        one = Transcoder(TranscoderConfig(d_in=32, d_out=32, n_features=12, k=4), place).double()
        with torch.no_grad():
            for parameter in (one.W_enc, one.W_dec):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        lorsas.append(one)
    tokens = torch.randint(0, model.d_vocab, (1, 9), generator=generator)
    held = Dictionaries(model, lorsas)
    tracer = coactivity.CoActivity(model, held)
    tracer.add(tokens[0])
    run = tracer._run(tokens[0])
    layer = model.n_layers - 1
    x, lorsa = run[f"attn_in.{layer}"], held.attention[layer]
    codes = lorsa.encode(x)
    active = torch.zeros(9, lorsa.n_heads, dtype=torch.bool).scatter_(1, codes.heads[0], codes.values[0] != 0)
    active[0] = False
    # position 0 keeps the model's own output, which no unit writes: what it gives is the rest
    own = model_outputs_at_first(tracer, run, 2 * layer)
    virtual = tracer._weights("lorsa", layer)
    pattern = lorsa.patterns(x)[0].repeat_interleave(lorsa.config.pattern_size, 0)
    pre = lorsa.pre_activations(x)[0] - pattern[:, :, 0].T * (own @ lorsa.W_V.T)
    expected = ((pre - pre[1:].mean(0)) * active).sum(0) / 8
    assert torch.allclose(virtual.sum(0), expected, atol=1e-6)
    features = tracer.into_features(layer)
    read = (run[f"mlp_in.{layer}"][0] @ held.mlp[layer].W_enc.T + 100)[1:]
    on = torch.zeros(9, 12, dtype=torch.bool)
    values, units = held.mlp[layer].encode(run[f"mlp_in.{layer}"][0])
    on = on.scatter_(1, units, values != 0)[1:]
    assert torch.allclose(features.weight.sum(0), ((read - read.mean(0)) * on).sum(0) / 8, atol=1e-6)
    q, k = lorsa.queries_keys(x)
    on = active.unflatten(1, (-1, lorsa.config.pattern_size)).any(-1)
    for p, scores in enumerate((q @ k.mT)[0] * lorsa.config.scale):
        spread = lorsa.patterns(x)[0, p] - torch.ones(9, 9).tril().double() / torch.arange(1, 10)[:, None]
        expected = (scores * spread * on[:, p, None]).sum()
        missing = 0.0
        if lorsa.rope is None:  # keys at position 0
            key = lorsa.W_K[p] @ own
            missing = (q[0, p] @ key * lorsa.config.scale * spread[:, 0] * on[:, p]).sum()
            found = tracer._virtual("head_k", layer, tracer._writes(2 * layer), tracer.met["head_k", layer])[:, p]
            assert float(found.sum()) == pytest.approx(float(expected - missing), rel=1e-5, abs=1e-6)
        found = tracer._virtual("head_q", layer, tracer._writes(2 * layer), tracer.met["head_q", layer])[:, p]
        assert float(found.sum()) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)


def model_outputs_at_first(tracer, run, depth):
    """What the normalised stream at position 0 holds beside the units' writes."""
    layer = depth // 2
    norm = tracer.parts.layers[layer].norm
    scale, activity = tracer._reads(run, depth)
    units = activity[0] @ tracer._writes(depth)
    whole = norm.centre(run[f"resid_pre.{layer}"][0, 0]) * scale[0]
    return (whole if norm.gain is None else whole * norm.gain) - units


def test_what_is_not_replaced_is_refused(monkeypatch):
    model = induction_model()
    tokens = torch.tensor([[1, 3, 4, 5]])
    first, second = copies(model)
    with pytest.raises(ClearheadError, match=r"layers \[1\] has no Lorsa"):
        trace_global(model, Dictionaries(model, [first]), tokens)
    with pytest.raises(ClearheadError, match="at least 3 tokens"):
        trace_global(model, Dictionaries(model, [first, second]), tokens[:, :2])
    monkeypatch.setattr(coactivity, "MOST_PAIRS", 100)
    with pytest.raises(ClearheadError, match="too many for the circuit"):
        trace_global(model, Dictionaries(model, [first, second]), tokens)


def test_streams_that_do_not_begin_with_tokens_and_positions_are_refused(monkeypatch):
    monkeypatch.setitem(tiny_configs.CONFIGS, "granite", tiny_configs.LLAMA | {"embedding_multiplier": 3.0})
    model = Model(build("granite"), name="granite", self_test=False)
    with pytest.raises(ClearheadError, match="does not begin with rows of its table"):
        trace_global(model, Dictionaries(model, copies(model)), torch.tensor([[1, 3, 4, 5], [6, 7, 8, 9]]))


def test_what_a_skip_connection_writes_is_no_unit():
    model = Model(build("gpt2"), name="gpt2", self_test=False)
    place = {"model": "gpt2", "layer": 0, "input_site": "mlp_in.0", "output_site": "mlp_out.0"}
    one = Transcoder(TranscoderConfig(d_in=32, d_out=32, n_features=4, k=2, skip=True), place)
    with pytest.raises(ClearheadError, match=r"layers \[0\] write past their features"):
        coactivity.CoActivity(model, Dictionaries(model, [*copies(model), one]))


def test_half_precision_gives_the_same_circuit_but_for_rounding():
    tokens = torch.randint(3, 20, (2, 9), generator=torch.Generator().manual_seed(1))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = Model(build("gpt2").to(dtype), name="gpt2", self_test=False)
        tracer = coactivity.CoActivity(model, Dictionaries(model, copies(model)))
        for block in tokens:
            tracer.add(block)
        found[dtype] = tracer
    exact, rounded = (one._weights("head_k", 0) for one in found.values())
    assert (exact - rounded).norm() < 0.1 * exact.norm()


def test_a_token_that_stands_everywhere_is_active_at_every_token_counted():
    model = induction_model()
    tracer = coactivity.CoActivity(model, Dictionaries(model, copies(model)))
    with torch.no_grad():
        tracer.add(torch.tensor([3, 3, 3, 3]))
    assert tracer.rates()[Unit("embedding", index=3)] == 1


def test_with_a_sink_what_is_the_same_at_every_key_is_no_reason_to_look():
    """Of one token over and over, without positions, all keys are the same, however little attention rests on them."""
    model = Model(build("llama").double(), name="llama", self_test=False)
    tracer = coactivity.CoActivity(model, Dictionaries(model, copies(model, sinks=True)))
    with torch.no_grad():
        tracer.add(torch.full((6,), 5))
        looking = tracer.met["looking", 0]
        assert looking.abs().max() < 1e-12 < tracer.met["lorsa 0", 0].abs().max()
