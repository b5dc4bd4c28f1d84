"""The census against loops, and the controls that run a model."""

import dataclasses

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.model.weights import attention_norm
from clearhead.spectral import census as census_module
from clearhead.spectral.attention_modes import head_modes
from clearhead.spectral.census import REPEATED_BLOCKS, decompose_layers, repeated_behaviour, take_census
from clearhead.spectral.control_runs import compare_subspaces, compare_untrained, sides_of_firings, untrained
from clearhead.spectral.firings import Prompts
from clearhead.spectral.sparsity import rolls_tovee
from tests.model.test_weights import TOKENS
from tests.model.tiny_configs import build


@pytest.fixture(scope="module")
def tiny():
    return Model.load("clearhead-tiny")


@pytest.fixture(scope="module")
def prompts(tiny):
    generator = torch.Generator().manual_seed(3)
    once = torch.randint(tiny.d_vocab, (6, 20), generator=generator)
    return Prompts([f"row {n}" for n in range(6)], list(once.repeat(1, 2)), "random tokens said twice")


@pytest.fixture(scope="module")
def census(tiny, prompts):
    return take_census(tiny, prompts)


def texts():
    return Prompts(["a", "b"], list(TOKENS), "tokens")


def test_behaviour_and_counts_are_those_of_the_pattern(tiny, prompts, census):
    tokens = torch.stack(list(prompts.tokens))
    run = tiny.run(tokens, read=["pattern.*"])
    for layer, found in census.layers.items():
        pattern = run[f"pattern.{layer}"]
        previous = torch.stack([pattern[:, :, t, t - 1] for t in range(1, 40)]).mean((0, 1))
        assert torch.allclose(found.behaviour["previous"], previous.double(), atol=1e-5)
        assert torch.allclose(found.behaviour["sink"], pattern[:, :, 1:, 0].mean((0, 2)).double(), atol=1e-5)
        fires = pattern > (2.5 / torch.arange(1, 41.0)).clamp(0.5, 1)[:, None]
        assert found.n_sink.tolist() == fires[..., 0].sum((0, 2)).tolist()
        assert (found.n_firings + found.n_sink).tolist() == fires.sum((0, 2, 3)).tolist()


def test_induction_and_duplicate_scores_are_read_at_the_earlier_copy(tiny):
    scores = repeated_behaviour(tiny, [0, 1], seed=0)
    generator = torch.Generator().manual_seed(0)
    once = torch.randint(tiny.d_vocab, (REPEATED_BLOCKS, 25), generator=generator)
    pattern = tiny.run(once.repeat(1, 2), read=["pattern.1"])["pattern.1"]
    loop = torch.stack([pattern[:, :, t, t - 25 + 1] for t in range(25, 50)]).mean((0, 1))
    assert torch.allclose(scores[1]["induction"], loop, atol=1e-6)
    assert float(scores[1]["induction"].max()) > 0.5  # the model is known to have induction heads
    assert float(scores[0]["induction"].max()) < 0.1
    copies = torch.stack([pattern[:, :, t, t - 25] for t in range(26, 50)]).mean((0, 1))  # not the first, a sink
    assert torch.allclose(scores[1]["duplicate"], copies, atol=1e-6)


def test_several_batches_count_what_one_batch_counts(tiny, prompts, census, monkeypatch):
    monkeypatch.setattr("clearhead.spectral.firings.BATCH_TOKENS", 80)
    again = take_census(tiny, prompts)
    for layer, found in census.layers.items():
        other = again.layers[layer]
        assert torch.equal(other.n_firings, found.n_firings) and torch.equal(other.n_sink, found.n_sink)
        assert torch.allclose(other.behaviour["previous"], found.behaviour["previous"], rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "opt", "qwen3", "gpt2", "olmo2"])
def test_energy_is_that_of_the_normalised_stream_along_the_directions(name):
    model = Model(build(name), self_test=False)
    for layer, found in take_census(model, texts()).layers.items():
        norm = attention_norm(model, layer)
        x = model.run(TOKENS, read=[f"resid_pre.{layer}"])[f"resid_pre.{layer}"].flatten(0, 1)
        x = x if norm is None else norm.normalise(x)
        x = x / x.square().mean().sqrt()
        real = found.modes.svd.rank
        for head in range(found.modes.n_heads):
            U, V = found.modes.svd.U[head, :, : real[head]], found.modes.svd.V[head, :, : real[head]]
            assert abs(float(found.energy_query[head]) - float((x @ U).square().mean())) < 1e-5
            assert abs(float(found.energy_key[head]) - float((x @ V).square().mean())) < 1e-5


def test_directions_that_no_token_holds_catch_no_energy():
    hf = build("llama")
    model = Model(hf, self_test=False)
    stream = model.run(TOKENS, read=["resid_pre.0"])["resid_pre.0"].flatten(0, 1)
    norm = hf.model.layers[0].input_layernorm
    assert len(stream) <= 24  # so that 8 of the 32 dimensions are free of tokens
    unused = torch.linalg.svd(stream.double()).Vh[-8:]
    with torch.no_grad():
        hf.model.layers[0].self_attn.q_proj.weight[:8] = unused.float() / norm.weight
    dead = take_census(model, texts()).layers[0]
    assert dead.energy_query[0] < 1e-6 and (dead.energy_query[1:] > 0.2).all()


def test_layers_without_attention_are_listed_with_the_reason():
    with pytest.raises(ClearheadError, match="no softmax attention"):
        decompose_layers(Model(build("qwen3_next"), self_test=False), [0])
    modes, refused = decompose_layers(Model(build("llama"), self_test=False), [0, 7])
    assert list(modes) == [0] and "layer 7 does not exist" in refused[7]


@pytest.mark.parametrize("threshold", [0.3, 1.0])
def test_thresholds_that_let_two_keys_pass_are_refused(tiny, prompts, threshold):
    with pytest.raises(ClearheadError, match="threshold"):
        take_census(tiny, prompts, threshold=threshold)


def test_attention_that_the_modes_do_not_rebuild_stops_the_census(tiny, prompts, monkeypatch):
    def wrong(model, layer, dtype):
        modes = head_modes(model, layer, dtype)
        return dataclasses.replace(modes, G_q=modes.G_q * 1.5)  # as if the scale of the scores were another

    monkeypatch.setattr(census_module, "head_modes", wrong)
    with pytest.raises(ClearheadError, match="rebuilt from its modes"):
        take_census(tiny, prompts)


def test_the_same_model_gives_its_own_sides_back(tiny, prompts, census):
    modes = {layer: found.modes for layer, found in census.layers.items()}
    firings = {layer: found.firings for layer, found in census.layers.items()}
    seen = 0
    for layer, chosen, seen_again in sides_of_firings(tiny, modes, firings, prompts, "offset"):
        assert torch.allclose(seen_again.A, firings[layer].A[chosen], atol=1e-4)
        assert torch.allclose(seen_again.D, firings[layer].D[chosen], atol=1e-4)
        seen += len(chosen)
    assert seen == sum(map(len, firings.values()))


def test_untrained_weights_follow_the_seed_and_leave_the_global_generator_alone(tiny):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one, same, other = untrained(tiny, 0), untrained(tiny, 0), untrained(tiny, 1)
    assert torch.equal(torch.rand(3), expected)
    weights = [model.weights(0).W_Q for model in (one, same, other, tiny)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2]) and not torch.equal(weights[0], weights[3])


def test_untrained_and_random_subspaces_stand_where_products_of_gaussians_do(tiny, prompts, census):
    blank = compare_untrained(tiny, prompts, census, seed=0)
    random = compare_subspaces(tiny, prompts, census, seed=0)
    for (layer, head), (found,) in blank.items():
        own = census.layers[layer].firings.of_head(head)
        assert found.control == "untrained" and found.draws == 3 and found.p is None
        assert 0.3 < found.sparsity < 0.45
        measured = float(rolls_tovee(own.contributions).double().mean())
        assert abs(found.effect - (found.sparsity - measured)) < 1e-6
        (subspace,) = random[layer, head]
        assert subspace.control == "subspace" and subspace.draws == 20 and 0.1 < subspace.sparsity < 0.45


def test_subspaces_keep_the_singular_values(tiny, prompts, census, monkeypatch):
    # with the head's own directions in place of random ones (no rotary embedding, no bias here) it is the head itself
    from clearhead.spectral import control_runs

    layer, found = 0, census.layers[0]
    head = int(found.firings.head[(~found.firings.sink).nonzero()[0, 0]])
    own = found.modes.svd.U[head].expand(20, -1, -1), found.modes.svd.V[head].expand(20, -1, -1)
    monkeypatch.setattr(control_runs, "_random_frames", lambda *_: own)
    for module in tiny.hf.modules():
        assert not type(module).__name__.startswith("Rotary")
    with torch.no_grad():
        attention = tiny.hf.transformer.h[layer]
        saved = attention.attn.c_attn.bias.clone(), attention.ln_1.bias.clone()
        attention.attn.c_attn.bias.zero_()
        attention.ln_1.bias.zero_()
    try:
        again = take_census(tiny, prompts)
        drawn = compare_subspaces(tiny, prompts, again, seed=0)
        mine = again.layers[layer].firings.of_head(head)
        (subspace,) = drawn[layer, head]
        assert abs(subspace.sparsity - float(rolls_tovee(mine.contributions).double().mean())) < 1e-4
    finally:
        with torch.no_grad():
            attention.attn.c_attn.bias.copy_(saved[0])
            attention.ln_1.bias.copy_(saved[1])
