import dataclasses

import numpy as np
import pytest
import torch

from clearhead.analysis import shares as share
from clearhead.analysis.analyze import analyze
from clearhead.analysis.unit_rows import head_units, lorsa_units
from clearhead.data.text import TokenBlocks
from clearhead.errors import ClearheadError, NonFiniteError

LAYER, CONTEXT, BLOCKS = 1, 24, 10
EVALUATION = {
    "layer": 1,
    "fvu": 0.5,
    "ce_recovered": None,
    "text": "toy",
    "config": {"k": 4},
    "relative_error_by_position": [0.1, 0.2],
}


@pytest.fixture(scope="module")
def blocks(model):
    generator = torch.Generator().manual_seed(0)
    return TokenBlocks(
        tokens=torch.randint(model.d_vocab, (BLOCKS, CONTEXT), generator=generator),
        documents=torch.tensor([0] * 5 + [1] * 5),
        starts=torch.tensor([0, 5 * CONTEXT]),
        names=["first", "second"],
        source="toy",
        split="held_out",
        prefix=0,
        sha256="0" * 64,
    )


@pytest.fixture(scope="module")
def lorsa(make_lorsa, model):
    lorsa = make_lorsa(d_model=model.d_model, n_heads=40, n_groups=8, k=4, activation="topk")
    lorsa.b_V[7] = -100.0  # a head that is never active
    return lorsa


@pytest.fixture(scope="module")
def atlas(lorsa, model, blocks, tmp_path_factory):
    out = tmp_path_factory.mktemp("analysis") / "atlas"
    return analyze(lorsa, model, LAYER, blocks, out, batch_blocks=4, routing_tokens=48, evaluation=EVALUATION)


@pytest.fixture(scope="module")
def activations(lorsa, model, blocks):
    """All activations, dense: [blocks, positions, heads]."""
    x = model.run(blocks.tokens, read=[f"attn_in.{LAYER}"])[f"attn_in.{LAYER}"]
    codes = lorsa.encode(x)
    return torch.zeros(BLOCKS, CONTEXT, 40).scatter(-1, codes.heads, codes.values)


def test_every_head_is_there_once(atlas, lorsa, model):
    rows = atlas.units()
    assert [row["unit_id"] for row in rows] == [
        *(unit.id for unit in head_units(model, LAYER)),
        *(unit.id for unit in lorsa_units(lorsa, LAYER)),
    ]
    assert all(row["dead"] is None for row in atlas.units("head"))


def test_activity_is_that_of_all_tokens_but_the_first(atlas, activations):
    evaluated = activations[:, 1:].flatten(0, 1).numpy()
    for head, row in enumerate(atlas.units("lorsa")):
        own = evaluated[:, head][evaluated[:, head] != 0]
        assert (row["n_tokens"], row["n_active"]) == (BLOCKS * (CONTEXT - 1), len(own))
        assert row["rate"] == len(own) / row["n_tokens"]
        assert row["dead"] == (len(own) == 0)
        assert sum(row["histogram"]) == len(own)
        assert row["group"] == head // 5
        if len(own):
            assert row["mean_activation"] == pytest.approx(own.mean(), rel=1e-4)
            assert row["max_activation"] == pytest.approx(own.max(), rel=1e-4)
    dead = atlas.unit("lorsa.1.7")
    assert dead["dead"]
    assert dead["mean_activation"] is dead["max_activation"] is dead["share_output"] is None
    assert {row["category"] for row in atlas.examples("lorsa.1.7")} == {"negative"}


def test_examples_show_the_text_and_the_activations(atlas, activations, blocks, model):
    texts = model.token_strings(range(model.d_vocab))
    rows = atlas.sql("select * from examples order by example_id")
    assert [row["example_id"] for row in rows] == list(range(len(rows)))
    for row in rows:
        head, block, start = int(row["unit_id"].split(".")[-1]), row["block"], row["start"]
        window = slice(start, start + len(row["tokens"]))
        ids = blocks.tokens[block, window].tolist()
        assert row["token_ids"] == ids
        assert row["tokens"] == [texts[i] for i in ids]
        np.testing.assert_allclose(row["activations"], activations[block, window, head], atol=1e-5)
        assert row["activation"] == row["activations"][row["position"] - start]
        assert row["document"] == ["first", "second"][block // 5]
        assert (row["activation"] == 0) == (row["category"] == "negative")
        assert row["position"] >= 1
    for head in range(40):
        top = [row["activation"] for row in atlas.examples(f"lorsa.1.{head}", "top")]
        expected = activations[:, 1:, head].flatten().sort(descending=True).values[: len(top)]
        np.testing.assert_allclose(top, expected, atol=1e-5)
        assert len(top) == min(16, int((activations[:, 1:, head] != 0).sum()))


def test_patterns_sum_to_the_activation(atlas, lorsa, model, blocks):
    x = model.run(blocks.tokens, read=[f"attn_in.{LAYER}"])[f"attn_in.{LAYER}"]
    patterns, values = lorsa.patterns(x), lorsa.values(x)
    rows = atlas.sql("select p.*, e.* from patterns p join examples e using (example_id) order by example_id")
    expected = atlas.sql("select count(*) as n from examples where category <> 'negative'")
    assert len(rows) == expected[0]["n"] > 300
    for row in rows:
        assert row["query"] == row["position"] - row["start"]
        assert row["row_sum"] == pytest.approx(row["activation"], abs=1e-5, rel=1e-5)
        assert sum(row["weights"]) + row["rest"] == pytest.approx(row["row_sum"], abs=1e-5, rel=1e-5)
        head, block, query = int(row["unit_id"].split(".")[-1]), row["block"], row["position"]
        whole = patterns[block, head // 5, query] * values[block, :, head]
        np.testing.assert_allclose(row["weights"], whole[row["keys"]], atol=1e-5, rtol=1e-5)
        assert set(np.flatnonzero(whole.abs() > 0.0101 * abs(row["row_sum"]))) <= set(row["keys"])


def test_logits_and_shares_are_those_of_their_formulas(atlas, lorsa, model):
    weights = share.shares(share.weight_coefficients(lorsa, model.weights(LAYER)))
    for head, row in enumerate(atlas.units("lorsa")):
        if weights[head].isnan().any():  # no original head does anything like it
            assert row["share_weights"] is row["participation_weights"] is None
        else:
            np.testing.assert_allclose(row["share_weights"], weights[head], atol=1e-6)
            assert row["participation_weights"] == pytest.approx(1 / sum(p * p for p in row["share_weights"]), rel=1e-4)
        assert [effect["logit"] for effect in row["raised"]] == sorted(
            (e["logit"] for e in row["raised"]), reverse=True
        )
        assert len(row["raised"]) == len(row["lowered"]) == 10
        for name in ("output", "routing"):
            if row[f"share_{name}"] is not None:
                assert sum(row[f"share_{name}"]) == pytest.approx(1, abs=1e-5)


def test_output_share_is_measured_on_the_models_own_heads(atlas, activations, lorsa, model, blocks):
    head_out = model.run(blocks.tokens, read=[f"head_out.{LAYER}"])[f"head_out.{LAYER}"]
    measured = 0
    for head, row in enumerate(atlas.units("lorsa")):
        active = activations[:, 1:, head] != 0
        mean = head_out[:, 1:][active].mean(0) @ lorsa.W_O[head]
        if not (mean > 0).any():  # nowhere active, or every original head writes against it
            assert row["share_output"] is None
        else:
            np.testing.assert_allclose(row["share_output"], mean.clamp_min(0) / mean.clamp_min(0).sum(), atol=1e-4)
            measured += 1
    assert measured > 20


def test_routing_share_compares_with_the_models_own_patterns(activations, lorsa, model, blocks, tmp_path):
    found = analyze(lorsa, model, LAYER, blocks, tmp_path / "a", batch_blocks=4, routing_tokens=10**6)
    x = model.run(blocks.tokens, read=[f"attn_in.{LAYER}"])[f"attn_in.{LAYER}"]
    theirs = model.run(blocks.tokens, read=[f"pattern.{LAYER}"])[f"pattern.{LAYER}"]
    overlap = share.pattern_overlap(lorsa.patterns(x), theirs)
    for head, row in enumerate(found.units("lorsa")):
        active = activations[:, 1:, head] != 0
        if active.any():
            mean = overlap[:, 1:, head // 5][active].mean(0)
            np.testing.assert_allclose(row["share_routing"], mean / mean.sum(), atol=1e-5)
        else:
            assert row["share_routing"] is None


def test_layer_metrics_and_provenance(atlas, blocks):
    metrics = atlas.layers()[(LAYER, "lorsa")]
    assert metrics["fvu"] == 0.5
    assert metrics["relative_error_by_position_1"] == 0.2
    assert not {"ce_recovered", "text", "layer", "config"} & set(metrics)
    for name in ("output", "weights", "routing", "output_shuffled"):
        found = (metrics[f"spanning_{name}{end}"] for end in ("_low", "", "_high"))
        low, fraction, high = found
        assert 0 <= low <= fraction <= high <= 1
    assert metrics["spanning_weights_heads"] == sum(row["share_weights"] is not None for row in atlas.units("lorsa"))
    assert metrics["analysed_dead_share"] > 0
    about = atlas.about
    assert (about["layer"], about["tokens"], about["text_sha256"]) == (1, BLOCKS * CONTEXT, blocks.sha256)
    assert about["dictionary"]["n_heads"] == 40


def test_neither_batches_nor_memory_change_the_result(atlas, lorsa, model, blocks, tmp_path):
    other = analyze(lorsa, model, LAYER, blocks, tmp_path / "a", batch_blocks=3, keep_bytes=0, routing_tokens=48)
    for table, key in (("units", "unit_id"), ("examples", "example_id"), ("patterns", "example_id")):
        for mine, theirs in zip(*(a.sql(f"select * from {table} order by {key}") for a in (atlas, other)), strict=True):
            assert mine.keys() == theirs.keys()
            for name in mine:
                if "routing" in name:  # a different sample of tokens
                    continue
                if isinstance(mine[name], float):
                    assert mine[name] == pytest.approx(theirs[name], abs=1e-4)
                elif not isinstance(mine[name], list) or not mine[name] or isinstance(mine[name][0], int | str):
                    assert mine[name] == theirs[name] or name == "keys"
                elif isinstance(mine[name][0], float) and name != "weights":
                    np.testing.assert_allclose(mine[name], theirs[name], atol=1e-4)


def test_a_model_without_a_tokenizer_shows_numbers(lorsa, model, blocks, tmp_path):
    from clearhead.model.access import Model

    bare = Model(model.hf, None, name=model.name, self_test=False)
    found = analyze(lorsa, bare, LAYER, blocks, tmp_path / "a", top=1, quantiles=0, negatives=0, routing_tokens=1)
    row = found.sql("select * from examples limit 1")[0]
    assert row["tokens"] == [f"<{i}>" for i in row["token_ids"]]


def test_signed_heads_keep_their_sign(make_lorsa, model, blocks, tmp_path):
    signed = make_lorsa(d_model=model.d_model, n_heads=12, n_groups=4, k=3, activation="signed-topk")
    found = analyze(signed, model, LAYER, blocks, tmp_path / "a", routing_tokens=1)
    rows = found.units("lorsa")
    assert min(row["max_activation"] for row in rows if not row["dead"]) < 0
    assert all(sum(row["histogram"]) == row["n_active"] for row in rows)
    top = found.examples(rows[0]["unit_id"], "top")
    sizes = [abs(row["activation"]) for row in top]
    assert sizes == sorted(sizes, reverse=True)


def test_what_does_not_belong_together_is_refused(make_lorsa, lorsa, model, blocks, tmp_path):
    with pytest.raises(ClearheadError, match="reads 16 dimensions"):
        analyze(make_lorsa(), model, LAYER, blocks, tmp_path / "a")
    other = make_lorsa(d_model=model.d_model)
    other.provenance["model"] = "org/other"
    with pytest.raises(ClearheadError, match="trained on org/other, not .*tiny-gpt2-2L; load that model"):
        analyze(other, model, LAYER, blocks, tmp_path / "a")
    with pytest.raises(ClearheadError, match="trained on layer 1, not 0"):
        analyze(lorsa, model, 0, blocks, tmp_path / "a")
    with pytest.raises(ClearheadError, match="no token blocks"):
        analyze(lorsa, model, LAYER, dataclasses.replace(blocks, tokens=blocks.tokens[:0]), tmp_path / "a")
    with pytest.raises(ClearheadError, match="top must be 1 or more"):
        analyze(lorsa, model, LAYER, blocks, tmp_path / "a", top=0)
    assert not (tmp_path / "a").exists()


def test_a_site_that_is_not_finite_is_named(lorsa, model, blocks, tmp_path, monkeypatch):
    run = model.run

    def poisoned(tokens, **options):
        result = run(tokens, **options)
        result["attn_in.1"][1, 3, 0] = float("inf")
        return result

    monkeypatch.setattr(model, "run", poisoned)
    with pytest.raises(NonFiniteError, match=r"attn_in.1 is inf in block 1 .* at position 3"):
        analyze(lorsa, model, LAYER, blocks, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_units_carry_their_vectors(lorsa, model):
    weights = model.weights(LAYER)
    for m, unit in enumerate(head_units(model, LAYER)):
        torch.testing.assert_close(unit.read.T @ unit.write, weights.W_V[m] @ weights.W_O[m])
    unit = lorsa_units(lorsa, LAYER)[3]
    assert unit.id == "lorsa.1.3"
    assert torch.equal(unit.read, lorsa.W_V[3])
    assert torch.equal(unit.write, lorsa.W_O[3])
