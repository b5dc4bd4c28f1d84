"""Decoding: equal to the last row of the reference, and it reads no value of a closed edge."""

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.ops.gated import gated_attention_reference
from clearhead.ops.gated_decode import gated_decode


def problem(t=37, dtype=torch.float64):
    draw = torch.Generator().manual_seed(3)
    q = torch.randn(2, 6, t, 8, generator=draw, dtype=dtype)
    k, v = (torch.randn(2, 2, t, width, generator=draw, dtype=dtype) for width in (8, 5))
    return q, k, v, torch.randn(6, generator=draw, dtype=dtype)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("first", [None, torch.tensor([0, 30]), torch.tensor([36, 35])])
def test_one_query_is_the_last_row(with_sink, first):
    q, k, v, bias = problem()
    sink = torch.linspace(-2, 2, 6, dtype=torch.float64) if with_sink else None
    starts = None if first is None else first[:, None].expand(2, 37)
    whole = gated_attention_reference(q, k, v, bias, mode="hard", scale=0.4, sink=sink, first=starts).out[:, :, -1:]
    found = gated_decode(q[:, :, -1:], k, v, bias, scale=0.4, sink=sink, first=first)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


def test_values_of_closed_edges_are_not_read():
    q, k, v, bias = problem()
    scores = torch.einsum("bghd,bgkd->bghk", q[:, :, -1].view(2, 2, 3, 8), k) * 0.4 + bias.view(2, 3, 1)
    closed_everywhere = ~(scores > 0).any(2)
    assert closed_everywhere.any()
    expected = gated_decode(q[:, :, -1:], k, v, bias, scale=0.4)
    v[closed_everywhere] = torch.nan
    assert torch.equal(gated_decode(q[:, :, -1:], k, v, bias, scale=0.4), expected)


def test_without_an_open_edge_the_output_is_exactly_zero():
    q, k, v, bias = problem(dtype=torch.float32)
    for sink in (None, torch.zeros(6)):
        out = gated_decode(q[:, :, -1:], k, v, bias - 1e4, scale=0.4, sink=sink)
        assert out.dtype == torch.float32 and not out.any()


def test_shapes_that_do_not_fit_are_refused():
    q, k, v, bias = problem()
    with pytest.raises(ClearheadError, match="expected one query"):
        gated_decode(q, k, v, bias, scale=0.4)
