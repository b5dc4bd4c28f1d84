"""The pass over text: FVU equals that of `evaluate`, a copy of the main dictionary has its errors, heads sum."""

import pytest
import torch

from clearhead.analysis.fidelity.errors import Candidate, Comparison, measure_errors
from clearhead.data.text import TokenBlocks
from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import TranscoderConfig
from clearhead.training.evaluate import evaluate


@pytest.fixture(scope="module")
def blocks(model):
    tokens = torch.randint(0, model.d_vocab, (9, 12), generator=torch.Generator().manual_seed(0))
    return TokenBlocks(
        tokens, torch.zeros(9, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), ["a"], "t", "held_out", 0, "x"
    )


def make_sae(d, seed):
    sae = Sae(TranscoderConfig(d_in=d, d_out=d, n_features=2 * d, k=4)).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
        sae.normalise_decoder()
    return sae


@pytest.fixture(scope="module")
def found(model, blocks):
    first, second = make_sae(model.d_model, 1), make_sae(model.d_model, 2)
    candidates = [
        Candidate("main", 1, first, "attn_in"),
        Candidate("copy", 1, first, "attn_in"),
        Candidate("sae", 1, second, "attn_out"),
        Candidate("below", 0, second, "attn_out"),
    ]
    return measure_errors(model, blocks, candidates, {1: Comparison(0, 2)}, batch_blocks=4)


def test_fvu_is_that_of_evaluate(model, blocks, found):
    sites = {"main": ("attn_in", "attn_out"), "sae": ("attn_out", "attn_out")}
    for place, name in ((0, "main"), (2, "sae")):
        module = found[1].candidates[place].module
        alone = evaluate(module, model, 1, blocks, sites=sites[name], downstream_tokens=0, batch_blocks=4)
        assert found[1].metrics()[place] == alone
    assert [metrics["layer"] for metrics in found[0].metrics()] == [0]


def test_a_copy_has_the_same_errors_and_another_dictionary_others(model, found):
    report = found[1].result([str(i) for i in range(model.d_vocab)], frozenset())
    copy, sae = report["overlap"]
    assert (copy["run"], sae["run"]) == ("copy", "sae")
    assert copy["cosine"] == pytest.approx(1.0) and copy["correlation"] == pytest.approx(1.0)
    assert sae["cosine"] < 0.9 and abs(copy["shuffled_cosine"]) < 0.9
    assert report["tokens"] + report["massive_tokens"] == 9 * 11


def test_shares_of_heads_and_tables_of_tokens_are_whole(model, found):
    report = found[1].result([str(i) for i in range(model.d_vocab)], frozenset())
    assert sum(report["heads"]["output_share"]) == pytest.approx(1.0, abs=1e-4)
    for name in ("main", "sae"):
        assert sum(report["heads"][name]["error_share"]) == pytest.approx(1.0, abs=1e-4)
        assert 0 < report["heads"][name]["inside"] <= 1
        for table in ("positions", "repeats", "classes"):
            rows = report["by_token"][name][table]
            assert sum(row["share_of_error"] for row in rows) == pytest.approx(1.0)
            assert sum(row["tokens"] for row in rows) == report["tokens"]
