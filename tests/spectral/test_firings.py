"""Firings against loops over the model's own pattern, for windows, grouped keys and sampling."""

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.spectral.attention_modes import head_modes
from clearhead.spectral.firings import Pairs, Prompts, express, find_firings, read_sites, verify_pattern
from tests.model.test_weights import FAMILIES, TOKENS
from tests.model.tiny_configs import build


def firings_of(model, layer, basis="fixed"):
    modes, sites = head_modes(model, layer), read_sites(model, [layer], TOKENS)[layer]
    found = find_firings(modes, sites, torch.arange(len(TOKENS)) + 10, torch.Generator().manual_seed(0))
    return modes, sites, express(modes, found, basis)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2"])
def test_equal_to_loops_over_the_models_own_pattern(name):
    model = Model(build(name).double(), self_test=False)
    for layer in model.attention_layers:
        modes, sites, found = firings_of(model, layer)
        seen = {
            (int(row), int(head), int(query), int(key))
            for row, head, query, key in zip(found.prompt - 10, found.head, found.query, found.key, strict=True)
        }
        pattern = model.run(TOKENS, read=[f"pattern.{layer}"])[f"pattern.{layer}"]
        expected = set()
        for row, head, query, key in (pattern > 0.5).nonzero().tolist():
            count = query + 1 if modes.geometry.window is None else min(query + 1, modes.geometry.window)
            if pattern[row, head, query, key] > min(1, 2.5 / count):
                expected.add((row, head, query, key))
        assert seen == expected and len(expected) > 5
        ratio, window = modes.geometry.n_heads // modes.geometry.n_kv_heads, modes.geometry.window
        for one in range(len(found)):
            row, head, query = int(found.prompt[one]) - 10, int(found.head[one]), int(found.query[one])
            key = int(found.key[one])
            first = 0 if window is None else max(0, query + 1 - window)
            scores = sites.k[row, head // ratio, first : query + 1] @ sites.q[row, head, query] * modes.geometry.scale
            own = scores[key - first]
            others = (scores.sum() - own) / (len(scores) - 1)
            assert abs(float(found.score[one] - own)) < 1e-9
            assert abs(float(found.contributions[one].sum() - (own - others))) < 1e-9
            assert bool(found.sink[one]) == (key == 0)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "falcon_alibi"])
def test_attention_is_rebuilt_from_the_modes_of_every_family(name):
    model = Model(build(name), self_test=False)
    for layer in model.attention_layers:
        modes, sites, _ = firings_of(model, layer)
        verify_pattern(modes, sites, model.dtype)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3", "mistral"])
def test_the_basis_of_each_pairs_offset_has_the_same_sums_and_other_terms(name):
    model = Model(build(name).double(), self_test=False)
    modes, sites, fixed = firings_of(model, 1)
    _, _, found = firings_of(model, 1, "offset")
    assert torch.equal(found.query, fixed.query) and torch.equal(found.score, fixed.score)
    # the models rotate by float32 tables, which turning back in float64 does not undo to the last digit
    assert (found.contributions.sum(-1) - fixed.contributions.sum(-1)).abs().max() < 5e-6
    away = found.query != found.key
    assert (found.contributions - fixed.contributions)[away].abs().max() > 0.01
    for one in (away.nonzero()[0, 0], away.nonzero()[-1, 0]):
        at = modes.at_offset(int(found.key[one] - found.query[one]))
        assert torch.allclose(found.S[one], at.svd.S[found.head[one]], rtol=1e-9)
        A, _ = at.project(at.unrotate(sites.q), at.unrotate(sites.k))
        expected = A[found.prompt[one] - 10, found.head[one], found.query[one]]
        assert torch.allclose(found.A[one].abs(), expected.abs(), rtol=1e-6)


def test_a_family_without_one_score_is_refused_by_name():
    with pytest.raises(ClearheadError, match="no single score"):
        head_modes(Model(build("falcon_alibi"), self_test=False), 0)


def test_a_family_that_is_misread_is_noticed():
    model = Model(build("llama"), self_test=False)
    _, sites, _ = firings_of(model, 0)
    with pytest.raises(ClearheadError, match="rebuilt from its modes differs"):
        verify_pattern(head_modes(model, 0), sites._replace(k=sites.k.flip(-1)), model.dtype)


def test_queries_that_see_one_key_never_fire(monkeypatch):
    monkeypatch.setitem(
        __import__("tests.model.tiny_configs", fromlist=["CONFIGS"]).CONFIGS,
        "narrow",
        {
            "model_type": "mistral",
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 97,
            "sliding_window": 1,
        },
    )
    _, sites, found = firings_of(Model(build("narrow"), self_test=False), 0)
    assert (sites.pattern.diagonal(0, -2, -1) == 1).all() and len(found) == 0


def synthetic(n, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(5, (n,), generator=generator)
    return Pairs(
        head=torch.randint(heads, (n,), generator=generator),
        prompt=integers,
        query=torch.arange(n),
        key=integers,
        sink=torch.rand(n, generator=generator) < 0.5,
        attention=torch.rand(n, generator=generator),
        score=torch.rand(n, generator=generator),
        x=torch.rand(n, 3, generator=generator),
        d=torch.rand(n, 3, generator=generator),
        priority=torch.rand(n, generator=generator),
    )


def test_sampling_keeps_the_same_firings_whether_done_at_once_or_batch_by_batch():
    whole = synthetic(4000, 3, 0)
    at_once = whole.sampled(50, 8)
    piecewise = whole.where(torch.arange(0))
    for part in torch.arange(4000).split(700):
        piecewise = Pairs.joined([piecewise, whole.where(part)]).sampled(50, 8)
    assert sorted(at_once.query.tolist()) == sorted(piecewise.query.tolist())
    for head in range(3):
        assert int(((at_once.head == head) & ~at_once.sink).sum()) == 50
        assert int(((at_once.head == head) & at_once.sink).sum()) == 8
    few = whole.where(torch.arange(20)).sampled(50, 8)
    assert int((~few.sink).sum()) == int((~whole.sink[:20]).sum())


def test_texts_that_cannot_be_compared_are_refused():
    with pytest.raises(ClearheadError, match="no text was given"):
        Prompts([], [], "nothing")
    with pytest.raises(ClearheadError, match="'one' has 1 token"):
        Prompts(["two", "one"], [torch.tensor([1, 2]), torch.tensor([1])], "texts")


def test_batches_hold_texts_of_one_length_and_all_texts(monkeypatch):
    model = Model(build("llama"), self_test=False)
    rows = [torch.arange(length) for length in (3, 5, 3, 3, 5)]
    prompts = Prompts([str(n) for n in range(5)], rows, "texts")
    batches = list(prompts.batches(model))
    assert [numbers.tolist() for numbers, _ in batches] == [[0, 2, 3], [1, 4]]
    monkeypatch.setattr("clearhead.spectral.firings.PATTERN_BYTES", 1)
    assert [numbers.tolist() for numbers, _ in prompts.batches(model)] == [[0], [2], [3], [1], [4]]
    assert prompts.n_tokens == 19
