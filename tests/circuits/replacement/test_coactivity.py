"""Edges of weights times co-activity: they add up to what they enter."""

import pytest
import torch

from clearhead.circuits.replacement import coactivity
from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.units import Unit
from tests.circuits.induction import induction_model
from tests.circuits.replacement.replaced import copies
from tests.model import tiny_configs
from tests.model.tiny_configs import build


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
    first, second = copies(model)
    with pytest.raises(ClearheadError, match=r"layers \[1\] has no Lorsa"):
        coactivity.CoActivity(model, Dictionaries(model, [first]))
    monkeypatch.setattr(coactivity, "MOST_PAIRS", 100)
    with pytest.raises(ClearheadError, match="too many for the circuit"):
        coactivity.CoActivity(model, Dictionaries(model, [first, second]))


def test_streams_that_do_not_begin_with_tokens_and_positions_are_refused(monkeypatch):
    monkeypatch.setitem(tiny_configs.CONFIGS, "granite", tiny_configs.LLAMA | {"embedding_multiplier": 3.0})
    model = Model(build("granite"), name="granite", self_test=False)
    tracer = coactivity.CoActivity(model, Dictionaries(model, copies(model)))
    tracer.add(torch.tensor([1, 3, 4, 5]))
    with pytest.raises(ClearheadError, match="does not begin with rows of its table"):
        tracer.add(torch.tensor([6, 7, 8, 9]))


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
    tracer.add(torch.tensor([3, 3, 3, 3]))
    assert tracer.rates()[Unit("embedding", index=3)] == 1


def test_with_a_sink_what_is_the_same_at_every_key_is_no_reason_to_look():
    """Of one token over and over, without positions, all keys are the same, however little attention rests on them."""
    model = Model(build("llama").double(), name="llama", self_test=False)
    tracer = coactivity.CoActivity(model, Dictionaries(model, copies(model, sinks=True)))
    tracer.add(torch.full((6,), 5))
    assert tracer.met["looking", 0].abs().max() < 1e-12 < tracer.met["lorsa 0", 0].abs().max()
