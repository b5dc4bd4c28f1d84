"""From a census to an atlas and its headline numbers: complete, finite, and the same as the parts."""

import math

import pytest
import torch

from clearhead.atlas import Atlas
from clearhead.model import Model
from clearhead.spectral.census import take_census
from clearhead.spectral.firings import Prompts
from clearhead.spectral.judging import compare_all, judge_all
from clearhead.spectral.nearest import chance_cosine
from clearhead.spectral.record import summarise, write_spectral_atlas
from clearhead.spectral.sparsity import n_recon, rolls_tovee
from tests.model.tiny_configs import build


@pytest.fixture(scope="module")
def model():
    return Model.load("clearhead-tiny")


@pytest.fixture(scope="module")
def prompts(model):
    once = torch.randint(model.d_vocab, (4, 16), generator=torch.Generator().manual_seed(3))
    return Prompts([f"row {n}" for n in range(4)], list(once.repeat(1, 2)), "random tokens said twice")


@pytest.fixture(scope="module")
def taken(model, prompts):
    census = take_census(model, prompts)
    separations = compare_all(model, prompts, census, draws=30, seed=0)
    return census, separations, judge_all(census, separations)


def test_every_table_is_filled_and_every_number_finite(model, prompts, taken, tmp_path):
    census, separations, judged = taken
    write_spectral_atlas(tmp_path / "atlas", model, prompts, census, separations, judged, {"model": "tiny"}, seed=0)
    atlas = Atlas(tmp_path / "atlas")
    assert len(atlas.sql("select * from prompts")) == 4
    spectra = atlas.sql("select * from spectra order by layer, head")
    assert [(row["layer"], row["head"]) for row in spectra] == [(layer, head) for layer in (0, 1) for head in range(4)]
    for row in spectra:
        assert row["verdict"] == judged.verdicts[row["layer"], row["head"]]
        assert row["sigma"] == sorted(row["sigma"], reverse=True) and len(row["sigma"]) == 32
    controls = {row["control"] for row in atlas.sql("select control from controls")}
    assert controls == {"gauge", "span", "shuffle", "subspace", "untrained"}
    firing = atlas.sql("select * from firings where not sink order by layer, head, prompt, query limit 1")[0]
    found = census.layers[firing["layer"]].firings
    place = int(
        (
            (found.head == firing["head"]) & (found.prompt == firing["prompt"]) & (found.query == firing["query"])
        ).nonzero()
    )
    c = found.contributions[place]
    assert math.isclose(firing["sparsity"], float(rolls_tovee(c)), rel_tol=1e-6)
    assert firing["n_recon"] == int(n_recon(c))
    assert math.isclose(sum(firing["contributions"]) + firing["rest"], float(c.sum()), rel_tol=1e-4, abs_tol=1e-4)
    assert math.isclose(firing["relative"], float(c.sum()), rel_tol=1e-5)
    assert firing["modes"] == c.abs().topk(8).indices.tolist()
    mode = atlas.sql("select * from modes order by layer, head, share desc limit 1")[0]
    assert mode["unit_id"] == f"mode.{mode['layer']}.{mode['head']}.{mode['mode']}"
    chance = chance_cosine(model.d_vocab, model.d_model, 0.99)
    shown = [entry for row in atlas.sql("select * from modes") for entry in row["query_tokens"] + row["key_tokens"]]
    assert shown and all(abs(entry["logit"]) > chance for entry in shown) and len(mode["query_tokens"]) <= 6
    assert len(atlas.sql("select * from shared_modes")) == 2 * 2 * 6


def test_headline_numbers_are_those_of_the_parts(taken):
    census, separations, judged = taken
    summary = summarise(census, separations, judged)
    assert summary["heads"] == 8 and sum(summary["verdicts"].values()) == 8
    assert summary["firings"] == sum(int(found.n_firings.sum()) for found in census.layers.values())
    assert set(summary["seconds"]) > {"decomposition", "forward", "statistics", "rotations and shuffles"}
    drawn = sorted(separations[place]["gauge"].sparsity for place in separations)
    assert summary["control_gauge"]["heads"] == len(drawn)
    assert drawn[0] <= summary["control_gauge"]["sparsity"][1] <= drawn[-1]
    # thirty draws give no p value, so nothing is called separated
    assert "heads_with_q_up_to_0.05" not in summary["control_gauge"]
    assert set(summary["verdicts"]) <= {"not separated", "sink", "too few firings", "no firings"}


def test_heads_without_a_product_or_firings_are_rows_with_words_not_nan(tmp_path):
    hf = build("gpt2")
    with torch.no_grad():
        hf.transformer.h[0].attn.c_attn.weight[:, :8] = 0  # head 0 of layer 0 asks for nothing
        hf.transformer.h[0].attn.c_attn.weight[:, 40:48] *= 1e-3  # head 1 hardly prefers any key
        hf.transformer.h[0].attn.c_attn.bias[8:16] = 0
    model = Model(hf, self_test=False)
    prompts = Prompts(["one"], [torch.arange(9)], "one text")
    census = take_census(model, prompts)
    separations = compare_all(model, prompts, census, draws=10, seed=0, untrained=False)
    judged = judge_all(census, separations)
    assert judged.verdicts[0, 0] == "no query–key product" and judged.numbers[0, 0].sparsity is None
    assert (0, 0) not in separations
    assert judged.verdicts[0, 1] == "no firings" and judged.numbers[0, 1].sparsity is None
    write_spectral_atlas(tmp_path / "atlas", model, prompts, census, separations, judged, {"model": "gpt2"}, seed=0)
    rows = {row["head"]: row for row in Atlas(tmp_path / "atlas").sql("select * from spectra where layer = 0")}
    assert rows[0]["rank"] == 0 and rows[1]["sparsity"] is None
    assert summarise(census, separations, judged)["heads"] == 8


def test_a_model_without_controls_is_described_but_not_judged(model, prompts):
    census = take_census(model, prompts)
    judged = judge_all(census, {})
    assert set(judged.verdicts.values()) <= {"not compared", "sink", "too few firings", "no firings"}
    assert "separated_share" not in summarise(census, {}, judged)
