import numpy as np
import torch

from clearhead.analysis import shares
from clearhead.view.spread import host, spans


def test_same_criterion_as_the_analysis():
    drawn = np.random.default_rng(0).dirichlet(np.full(9, 0.3), 400)
    expected = shares.spans(torch.from_numpy(drawn))
    assert [spans(row) for row in drawn.tolist()] == expected.tolist()
    assert 0 < expected.mean() < 1
    assert [host(row) for row in drawn.tolist()] == drawn.argmax(1).tolist()


def test_a_unit_without_shares_has_no_host_and_spans_nothing():
    assert host(None) is None and host([0.0, 0.0]) is None
    assert not spans(None) and not spans([0.0, 0.0]) and not spans([1.0])
