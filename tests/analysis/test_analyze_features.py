import numpy as np
import pytest
import torch

from clearhead.analysis.analyze_features import analyze_features
from clearhead.data.text import TokenBlocks
from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import TranscoderConfig
from clearhead.errors import ClearheadError, NonFiniteError

CONTEXT, BLOCKS, FEATURES = 24, 10, 40


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
def sae(model):
    config = TranscoderConfig(d_in=model.d_model, d_out=model.d_model, n_features=FEATURES, k=4)
    provenance = {"model": model.name, "layer": 1, "input_site": "attn_out.1", "output_site": "attn_out.1"}
    sae = Sae(config, provenance).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for weight in (sae.W_enc, sae.W_dec):
        weight.copy_(torch.randn(weight.shape, generator=generator))
    sae.b_enc[7] = -100.0  # a feature that is never active
    return sae


@pytest.fixture(scope="module")
def atlas(sae, model, blocks, tmp_path_factory):
    out = tmp_path_factory.mktemp("features") / "atlas"
    return analyze_features(sae, model, blocks, out, batch_blocks=4)


@pytest.fixture(scope="module")
def activations(sae, model, blocks):
    codes = sae.encode(model.run(blocks.tokens, read=["attn_out.1"])["attn_out.1"])
    return torch.zeros(BLOCKS, CONTEXT, FEATURES).scatter(-1, codes.features, codes.values).numpy()


def test_units_are_counted(atlas, activations):
    units = atlas.units("sae")
    assert [unit["unit_id"] for unit in units] == [f"feature.1.{i}" for i in range(FEATURES)]
    assert [unit["n_active"] for unit in units] == (activations[:, 1:] != 0).sum((0, 1)).tolist()
    np.testing.assert_allclose([u["max_activation"] or 0 for u in units], activations[:, 1:].max((0, 1)), rtol=1e-6)
    assert units[7]["dead"] and units[7]["mean_activation"] is None and atlas.examples("feature.1.7", "top") == []
    assert atlas.layers()[1, "sae"]["analysed_tokens"] == BLOCKS * (CONTEXT - 1)


def test_examples_show_what_is_active_and_where(atlas, activations, blocks):
    unit = max(atlas.units("sae"), key=lambda unit: unit["n_active"])
    index = unit["index"]
    rows = atlas.examples(unit["unit_id"])
    assert {row["category"] for row in rows} == {"top", "quantile", "negative"}
    strongest = np.sort(activations[:, 1:, index].reshape(-1))[::-1]
    assert [r["activation"] for r in rows if r["category"] == "top"] == pytest.approx(strongest[:16].tolist())
    for row in rows:
        window = slice(row["start"], row["start"] + len(row["tokens"]))
        np.testing.assert_allclose(row["activations"], activations[row["block"], window, index], rtol=1e-5)
        assert row["token_ids"] == blocks.tokens[row["block"], window].tolist()
        assert (row["activation"] == 0) == (row["category"] == "negative")
    assert atlas.patterns(unit["unit_id"]) == []


def test_what_does_not_belong_together_is_refused(sae, model, blocks, tmp_path):
    for change, said in (({"model": "other"}, "trained on other"), ({"layer": None}, "does not say its layer")):
        provenance = {key: value for key, value in (sae.provenance | change).items() if value is not None}
        other = Sae(sae.config, provenance)
        with pytest.raises(ClearheadError, match=said):
            analyze_features(other, model, blocks, tmp_path / "atlas")
    narrow = Sae(TranscoderConfig(d_in=3, d_out=3, n_features=4, k=1), sae.provenance)
    with pytest.raises(ClearheadError, match="reads 3 dimensions"):
        analyze_features(narrow, model, blocks, tmp_path / "atlas")
    assert not (tmp_path / "atlas").exists()


def test_an_input_that_is_not_finite_is_named(sae, model, blocks, tmp_path, monkeypatch):
    run = model.run

    def broken(tokens, **options):
        found = run(tokens, **options)
        found["attn_out.1"][1, 5] = float("nan")
        return found

    monkeypatch.setattr(model, "run", broken)
    with pytest.raises(NonFiniteError, match="attn_out.1 is nan in block 1 .* at position 5"):
        analyze_features(sae, model, blocks, tmp_path / "atlas")
