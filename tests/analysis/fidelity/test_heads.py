"""Shares of the error by original head: they sum to 1, a missing head is named, the span holds what it should."""

import pytest
import torch

from clearhead.analysis.fidelity.heads import HeadShares


@pytest.fixture
def heads():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(300, 4, 20, generator=generator) * torch.tensor([1.0, 2.0, 1.0, 0.5])[:, None]


def shares(heads, errors, bias=0.0):
    found = HeadShares(4, 20, len(errors))
    for rows in torch.arange(300).split(100):
        y = heads[rows].sum(1) + bias
        found.add(heads[rows], y, torch.stack([e[rows] for e in errors]), torch.arange(len(rows)).roll(7))
    return found.result()


def test_shares_sum_to_one_and_a_missing_head_is_the_error(heads):
    missing, noise = heads[:, 2], torch.randn(300, 20, generator=torch.Generator().manual_seed(1))
    found = shares(heads, [missing, missing + noise, heads.sum(1)])
    assert sum(found["output_share"]) == pytest.approx(1.0)
    for error in found["errors"]:
        assert sum(error["error_share"]) == pytest.approx(1.0)
    assert found["errors"][0]["error_share"][2] > 0.8
    assert found["errors"][2]["unexplained"] == pytest.approx([1.0] * 4)  # nothing predicted
    assert found["errors"][2]["error_share"] == pytest.approx(found["output_share"])


def test_errors_in_the_span_of_the_heads_are_told_from_others(heads):
    mixed = torch.einsum("nhd,h->nd", heads, torch.tensor([0.3, -1.0, 2.0, 0.1]))
    noise = torch.randn(300, 20, generator=torch.Generator().manual_seed(2))
    found = shares(heads, [mixed, noise])["errors"]
    assert found[0]["inside"] == pytest.approx(1.0, abs=1e-5)
    assert found[0]["inside_other"] < 0.5
    assert found[1]["inside"] == pytest.approx(4 / 20, abs=0.04)


def test_an_output_bias_belongs_to_the_span_and_to_no_head(heads):
    bias = torch.arange(20.0)
    found = shares(heads, [bias.expand(300, 20)], bias)
    assert found["errors"][0]["inside"] == pytest.approx(1.0, abs=1e-5)
    assert sum(found["output_share"]) == pytest.approx(1.0)


def test_an_error_of_zero_gives_no_number(heads):
    error = shares(heads, [torch.zeros(300, 20)])["errors"][0]
    assert error["inside"] is None and error["error_share"] == [None] * 4
