"""Features of a head on real forwards: the formulas by hand, what is left out, and what is refused."""

import pytest
import torch

from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.model.access import Model
from clearhead.model.weights import attention_norm
from clearhead.spectral.attention_modes import head_modes
from clearhead.spectral.features import recover_features
from tests.data.word_model import word_model
from tests.model.tiny_configs import build

DTYPE = torch.float64


def random_tokens(model: Model, blocks: int = 12, length: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, model.d_vocab, (blocks, length), generator=torch.Generator().manual_seed(seed))


def inputs(model: Model, layer: int, tokens: torch.Tensor) -> torch.Tensor:
    """n(resid_pre) at all positions but the first, [b, t - 1, d]."""
    resid = model.run(tokens, read=[f"resid_pre.{layer}"])[f"resid_pre.{layer}"]
    norm = attention_norm(model, layer)
    return (resid if norm is None else norm.normalise(resid)).double()[:, 1:]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3", "olmo2"])
def test_modes_are_unwhitened_by_the_covariance_of_the_normalised_residual(family):
    model = Model(build(family), self_test=False)
    tokens = random_tokens(model)
    found = recover_features(model, 1, 2, tokens, 3, shrinkage="none", batch_blocks=5)
    x = inputs(model, 1, tokens).flatten(0, 1)
    sigma = torch.cov(x.mT, correction=0)
    modes = head_modes(model, 1, DTYPE)
    for side, reads in ((found.query, modes.svd.U), (found.key, modes.svd.V)):
        expected = torch.nn.functional.normalize(sigma @ reads[2, :, :3], dim=0)
        torch.testing.assert_close(side.features, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(side.turned, (expected * reads[2, :, :3]).sum(0), atol=1e-5, rtol=0)
        second = (x @ side.reads).square().mean(0) / x.square().mean()
        torch.testing.assert_close(side.energy, second, atol=1e-5, rtol=1e-4)
        assert bool((side.outside_cone.mT @ x.mean(0)).abs().max() < 1e-6)
    torch.testing.assert_close(found.sigma, modes.svd.S[2, :3] * model.geometry(1).scale)
    assert found.positions == (12 * 23, 12, 0, 0) and found.covariance.samples == 12 * 23


def test_stability_compares_alternate_blocks():
    model = Model(build("llama"), self_test=False)
    tokens = random_tokens(model)
    found = recover_features(model, 0, 1, tokens, 4, shrinkage="none")
    x = inputs(model, 0, tokens)
    halves = [torch.cov(x[start::2].flatten(0, 1).mT) @ found.query.reads for start in (0, 1)]
    expected = torch.nn.functional.cosine_similarity(*halves, dim=0)
    torch.testing.assert_close(found.query.stability, expected, atol=1e-5, rtol=0)
    many = recover_features(model, 0, 1, random_tokens(model, 120), 4)
    assert float(many.query.stability.min()) > float(expected.min())


@pytest.mark.parametrize("ica", [False, True])
def test_batches_change_nothing(ica):
    model = Model(build("gpt2"), self_test=False)
    tokens = random_tokens(model, 20)
    one, other = (recover_features(model, 1, 0, tokens, 2, ica=ica, batch_blocks=n) for n in (3, 20))
    torch.testing.assert_close(one.query.features, other.query.features, atol=1e-5, rtol=0)
    torch.testing.assert_close(one.key.stability, other.key.stability, atol=1e-5, rtol=0)
    if one.pairs is not None and other.pairs is not None:
        torch.testing.assert_close(one.pairs.strength, other.pairs.strength, atol=1e-3, rtol=0)


def test_first_special_and_massive_positions_are_left_out():
    model = word_model()
    end = model.tokenizer.eos_token_id
    tokens = torch.randint(5, model.d_vocab, (6, 20), generator=torch.Generator().manual_seed(1))
    huge = model.d_vocab - 1
    tokens[tokens == huge] = 5
    with torch.no_grad():
        model.places.embedding.weight[huge] *= 1000
    tokens[0, 4] = tokens[1, 9] = tokens[1, 0] = end
    tokens[3, 7] = huge
    found = recover_features(model, 0, 0, tokens, 2)
    assert found.positions._asdict() == {"used": 6 * 20 - 9, "first": 6, "special": 2, "massive": 1}
    assert found.covariance.samples == 111
    same = tokens.clone()
    same[3, 7] = 5
    plain = recover_features(model, 0, 0, same, 2)
    # one sink less moves little; had it been used, its direction would have become the feature
    assert float((found.query.features * plain.query.features).sum(0).min()) > 0.9


def test_pairs_have_as_many_entries_as_modes_and_stable_signs():
    model = Model.load("clearhead-tiny", self_test=False)
    found = recover_features(model, 1, 0, random_tokens(model, 60, 32), 3, ica=True)
    pairs, query, key = found.pairs, found.pair_query, found.pair_key
    assert pairs is not None and query is not None and key is not None
    assert pairs.strength.shape == (3,) and query.features.shape == key.features.shape == (128, 3)
    assert torch.equal(pairs.strength.abs().sort(descending=True).values, pairs.strength.abs())
    assert bool((query.stability > 0).all()) and bool((key.stability > 0).all())
    torch.testing.assert_close(query.features, pairs.query)
    # the directions read lie in the span of the modes
    span = found.query.reads
    torch.testing.assert_close(span @ (span.mT @ query.reads), query.reads, atol=1e-6, rtol=0)


def test_more_modes_than_the_head_has_give_those_it_has():
    model = Model(build("llama"), self_test=False)
    with torch.no_grad():
        model.weights(0).W_Q[1, :, 3:] = 0
    found = recover_features(model, 0, 1, random_tokens(model), 50)
    assert found.rank == len(found.sigma) == 3
    whole = recover_features(model, 0, 0, random_tokens(model), 50)
    assert whole.rank == len(whole.sigma) == model.d_head


def test_refusals_name_what_to_change():
    model = Model(build("llama"), self_test=False)
    tokens = random_tokens(model)
    cases = [
        ((0, 4, tokens), {}, "no head 4: layer 0 has 4 heads"),
        ((0, 0, tokens[:1]), {}, "at least two blocks"),
        ((0, 0, tokens, 0), {}, "modes: expected at least 1, got 0"),
        ((7, 0, tokens), {}, "layer 7 does not exist"),
        ((0, 0, tokens[:2, :3], 8), {"ica": True}, "too few to separate"),
        ((0, 0, tokens[:, :1]), {}, "do not vary"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(ClearheadError, match=message):
            recover_features(model, *arguments, **options)
    with torch.no_grad():
        model.weights(0).W_Q[2] = 0
    with pytest.raises(ClearheadError, match=r"head 0\.2 has a query-key product of zero"):
        recover_features(model, 0, 2, tokens)
    with torch.no_grad():
        model.places.embedding.weight[5] = torch.nan
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        recover_features(model, 0, 0, torch.full((4, 8), 5))


def test_attention_without_a_query_key_product_is_refused():
    with pytest.raises(ClearheadError, match="has no softmax attention"):
        recover_features(Model(build("lfm2"), self_test=False), 0, 0, torch.zeros(2, 4, dtype=torch.long))
