"""Attention scores over pairs of units: exact sums, the pairs of definition, Lorsa heads at what they move most."""

from functools import cache

import pytest
import torch

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.tracing import qk
from clearhead.circuits.tracing.qk import ask_edge, explain, explain_edge, explain_lorsa
from clearhead.circuits.tracing.sources import open_prompt
from clearhead.dictionaries.lorsa import Lorsa, LorsaConfig
from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.spectral.signals import Firing, read_stream
from clearhead.spectral.writes import Parts
from clearhead.units import Unit
from tests.model import tiny_configs
from tests.model.test_weights import VARIANTS
from tests.model.tiny_configs import VOCABULARY, build

TOKENS = (torch.arange(5, 17) * 7 % VOCABULARY)[None]
EXACT = ("gpt2", "gpt_neox", "opt", "stablelm_qk_norm", "phi_qk_norm")  # float64 throughout
FLOAT32_INSIDE = ("llama", "qwen3", "gemma2", "olmo2", "cohere_qk_norm", "hunyuan_v1_dense")
FIRING = Firing(1, 2, 9, 7)


@cache
def opened_of(name):
    with pytest.MonkeyPatch.context() as patch:
        if name in VARIANTS:
            patch.setitem(tiny_configs.CONFIGS, name, VARIANTS[name])
        model = Model(build(name).double(), self_test=False)
    return open_prompt(Parts(model), TOKENS)


@pytest.mark.parametrize("against", [None, 8, "mean"])
@pytest.mark.parametrize("name", EXACT + FLOAT32_INSIDE)
def test_pairs_add_up_to_the_score(name, against):
    opened = opened_of(name)
    split = explain_edge(opened, FIRING, against)
    product = split.U @ split.V.T
    frozen = 0.0
    query = read_stream(opened.stream, FIRING, "query")
    A = opened.frozen.state(2)[9] @ query.map + query.offset
    weights = {
        None: {7: 1.0},
        8: {7: 1.0, 8: -1.0},
        "mean": {k: (k == 7) - 1 / 10 for k in range(10)},
    }[against]
    for k, weight in weights.items():
        reader = read_stream(opened.stream, Firing(1, 2, 9, k), "key")
        frozen += weight * float(A @ (opened.frozen.state(2)[k] @ reader.map + reader.offset))
    size = float(product.abs().sum())
    assert float(product.sum()) == pytest.approx(frozen, abs=1e-10 * max(1, size / 100))
    assert split.total == pytest.approx(split.score, abs=1e-10 if name in EXACT else 1e-5 * size)
    assert torch.allclose(split.queries, product.sum(1)) and torch.allclose(split.keys, product.sum(0))
    assert float(split.modes.sum()) == pytest.approx(split.total)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_the_score_is_the_models_own(name):
    opened = opened_of(name)
    scores = opened.stream.run["scores.1"][0, 2, 9]
    assert explain_edge(opened, FIRING).score == pytest.approx(float(scores[7]), abs=1e-10)
    assert explain_edge(opened, FIRING, 3).score == pytest.approx(float(scores[7] - scores[3]), abs=1e-10)
    mean = float(scores[7] - scores[:10].mean())
    assert explain_edge(opened, FIRING, "mean").score == pytest.approx(mean, abs=1e-10)


def test_a_pair_is_what_the_score_changes_when_its_units_change():
    """By definition: the frozen readers applied to each unit's own component of the stream."""
    opened = opened_of("gpt2")
    split = explain_edge(opened, FIRING)
    components = next(c for depth, c in opened.sources.components(opened.frozen) if depth == 2)
    query, key = (read_stream(opened.stream, FIRING, side) for side in ("query", "key"))
    U, V = components[:, 9] @ query.map, components[:, 7] @ key.map
    own = opened.sources.place[Unit("bias", 1)]
    assert not U[own].any()
    U[own], V[own] = query.offset, key.offset
    assert torch.allclose(split.U, U, atol=1e-12) and torch.allclose(split.V, V, atol=1e-12)
    assert V[own].abs().max() > 0.01


def test_readers_pulled_down_and_units_pushed_up_agree(monkeypatch):
    opened = opened_of("gpt_neox")
    firings = [(FIRING, None), (Firing(0, 1, 5, 2), 4), (Firing(1, 0, 11, 3), "mean")]
    questions = [ask_edge(opened, firing, against) for firing, against in firings]
    called = []
    monkeypatch.setattr(qk, "CHUNK", 2000)  # several blocks of units
    for way in (qk._push_units, qk._pull_readers):
        monkeypatch.setattr(qk, "_push_units", way)
        monkeypatch.setattr(qk, "_pull_readers", way)
        called.append(explain(opened, questions))
    for up, down in zip(*called, strict=True):
        assert torch.allclose(up.U, down.U, atol=1e-12) and torch.allclose(up.V, down.V, atol=1e-12)
        assert up.U.abs().max() > 0.01


def test_embeddings_alone_write_what_the_first_layer_reads():
    opened = opened_of("llama")
    split = explain_edge(opened, Firing(0, 1, 6, 2))
    assert {split.units[i].id for i, _, _ in split.pairs(100)} == {opened.sources.units[6].id}
    assert split.count_pairs() == 1


def test_tables_hold_the_largest():
    opened = opened_of("gpt2")
    split = explain_edge(opened, FIRING, 4)
    table = split.table(20)
    product = split.U @ split.V.T
    assert table.unit == "edge.1.2.7@9" and table.against == 4 and len(table.pairs) == len(table.triples) == 20
    assert abs(table.pairs[0][2]) == pytest.approx(float(product.abs().max()))
    assert table.total == pytest.approx(table.score)
    triples = split.U[:, None] * split.V[None]
    sizes = [abs(entry[3]) for entry in table.triples]
    assert sizes == pytest.approx(triples.abs().flatten().topk(20).values.tolist())
    i, mode, j, weight = split.triples(1)[0]
    assert weight == pytest.approx(float(triples[i, j, mode])) and split.count_pairs() < product.numel()
    assert dict(table.queries)[split.units[i].id] == pytest.approx(float(split.queries[i]))
    assert explain_edge(opened, FIRING, "mean").table().against is None


@cache
def opened_lorsa(name, qk_norm=None, patterns=1):
    model = Model(build(name).double(), name=name, self_test=False)
    geometry = model.geometry(1)
    rope = None if geometry.rope is None else geometry.rope.to_dict()
    config = LorsaConfig(
        d_model=32, n_heads=12, n_groups=4, d_qk=8, k=3, scale=0.3, rope=rope, qk_norm=qk_norm, qk_norm_eps=1e-6,
        patterns_per_group=patterns,
    )  # fmt: skip
    place = {"model": name, "layer": 1, "input_site": "attn_in.1", "output_site": "attn_out.1"}
    lorsa = Lorsa(config, place).double()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        for parameter in lorsa.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
        lorsa.W_Q[2], lorsa.W_K[2, 4:] = 0, 0  # groups whose product has a lower rank
    return open_prompt(Parts(model), TOKENS, Dictionaries(model, [lorsa]))


def lorsa_units(opened):
    return [unit for unit in opened.sources.units if unit.kind == "lorsa" and unit.position > 4]


@pytest.mark.parametrize("against", [None, 1, "mean"])
@pytest.mark.parametrize(
    "name, qk_norm, patterns",
    [("gpt2", None, 1), ("llama", None, 1), ("llama", "rms", 1), ("gpt2", "layer", 1), ("llama", "rms", 3)],
)
def test_lorsa_heads_are_explained_by_their_pattern(name, qk_norm, patterns, against):
    opened = opened_lorsa(name, qk_norm, patterns)
    lorsa, x = opened.dictionaries.attention[1], opened.attention[1].x
    q, k = lorsa.queries_keys(x[None])
    scores = 0.3 * q[0] @ k[0].mT
    for unit in lorsa_units(opened)[:9]:
        split = explain_lorsa(opened, unit, against, key=2)
        row = scores[unit.index * patterns // 3, unit.position]
        base = {None: 0.0, 1: row[1], "mean": row[: unit.position + 1].mean()}[against]
        assert split.score == pytest.approx(float(row[2] - base), abs=1e-9)
        size = float((split.U @ split.V.T).abs().sum())
        assert split.total == pytest.approx(split.score, abs=max(1e-10, 1e-6 * size if name == "llama" else 0))


def test_lorsa_heads_are_explained_where_they_move_most():
    opened = opened_lorsa("gpt2")
    lorsa, x = opened.dictionaries.attention[1], opened.attention[1].x
    patterns, values = lorsa.patterns(x[None])[0], lorsa.values(x[None])[0]
    differs = 0
    for unit in lorsa_units(opened):
        row = patterns[unit.index // 3, unit.position]
        split = explain_lorsa(opened, unit)
        assert split.key == int((row * values[:, unit.index]).abs().argmax())
        differs += split.key != int(row.argmax())
    assert differs and split.table(5).unit == unit.id


def test_what_does_not_exist_is_refused():
    opened = opened_of("gpt2")
    for firing, message in (
        ((5, 0, 3, 1), "the model has 2 layers of 4 heads, the prompt 12 tokens"),
        ((1, 0, 12, 1), "the prompt 12 tokens"),
        ((1, 0, 3, 4), "query 3 sees keys 0 to 3, not 4"),
    ):
        with pytest.raises(ClearheadError, match=message):
            explain_edge(opened, Firing(*firing))
    with pytest.raises(ClearheadError, match="query 9 sees keys 6 to 9, not 5"):
        explain_edge(opened_of("gemma2"), Firing(0, 0, 9, 5))
    with pytest.raises(ClearheadError, match="sees keys 0 to 9, not 10"):
        explain_edge(opened, FIRING, 10)
    with pytest.raises(ClearheadError, match="key 7 is compared with itself"):
        explain_edge(opened, FIRING, 7)
    with pytest.raises(ClearheadError, match="head.1.2 is no Lorsa head that is active"):
        explain_lorsa(opened, Unit("head", 1, 2))
