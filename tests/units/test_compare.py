import numpy as np
import pytest

from clearhead.errors import ClearheadError
from clearhead.units import AttentionTable, Graph, Loadings, Provenance, Unit
from clearhead.units.compare import Change, Overlap, compare

PROVENANCE = Provenance("m", "p")
UNITS = [Unit("feature", 0, i, 1) for i in range(4)] + [Unit("logit", index=0, position=1)]


def graph(sources, weights, **said):
    """Edges from features to the logit; only the units that they touch."""
    units = [UNITS[s] for s in sources] + [UNITS[4]]
    n = len(sources)
    return Graph(units, list(range(n)), [n] * n, weights, PROVENANCE, **said)


def test_two_graphs_by_hand():
    pairs = (("feature.0.0@1", "bias.0", 8.0), ("feature.0.1@1", "bias.0", 1.5), ("feature.0.2@1", "bias.0", 0.5))
    dense = graph(
        [0, 1, 2],
        [6.0, 3.0, -1.0],
        loadings=Loadings([0, 1, 2], [0, 1, 1], [0, 1, 2], [6.0, 3.0, -1.0], "order 1"),
        attention=[AttentionTable("lorsa.0.0@1", 10.0, 10.0, None, pairs)],
    )
    sparse = graph([0, 1, 3], [9.0, 0.5, 0.5], loadings=Loadings([0, 1, 2], [0, 0, 1], [0, 0, 3], [9.0, 0.5, 0.5], "x"))
    found = compare(dense, sparse)
    assert found.units == Overlap(4, 4, 3)
    assert found.edges == Overlap(3, 3, 2)
    assert found.units.iou == 3 / 5
    # 6 + 3 of 10 carry 90 % of the one, 9 of 10 that of the other
    assert found.heaviest == Overlap(2, 1, 1)
    assert found.correlation is None  # two edges in both
    assert found.correlation_of_all == pytest.approx(np.corrcoef([6, 3, -1, 0], [9, 0.5, 0, 0.5])[0, 1])
    one, other = found.carried
    assert (one.weight, one.edges, one.heads, one.pairs) == (10, 2, 2, 2)
    assert (other.weight, other.edges, other.heads, other.pairs) == (10, 1, 1, None)
    assert found.only == ({"feature.0.2@1": 1}, {"feature.0.3@1": 0.5})
    assert found.changes[0] == Change("feature.0.0@1", "logit.0@1", 6.0, 9.0)
    assert [abs(change.first - change.second) for change in found.changes] == [3, 2.5, 1, 0.5]
    assert found.heads == {(0, 0): (0.6, 0.95), (1, 1): (0.3, 0), (1, 2): (0.1, 0), (1, 3): (0, 0.05)}


def test_a_graph_is_like_itself():
    one = graph([0, 1, 2], [6.0, 3.0, -1.0])
    found = compare(one, one)
    assert (found.units.iou, found.edges.iou, found.heaviest.iou) == (1, 1, 1)
    assert found.correlation == pytest.approx(1)
    assert found.only == ({}, {})
    assert found.heads == {}
    assert not any(change.first - change.second for change in found.changes)


def test_prompts_of_different_length_meet_at_their_ends():
    one = Graph(UNITS[3:], [0], [1], [1.0], PROVENANCE, tokens=["a", "b"])
    late = [Unit("feature", 0, 3, 4), Unit("logit", index=0, position=4)]
    other = Graph(late, [0], [1], [1.0], PROVENANCE, tokens=list("abcde"))
    assert compare(one, other).units.both == 0
    assert compare(one, other, from_end=True).edges.iou == 1


def test_nothing_to_compare_is_refused():
    with pytest.raises(ClearheadError, match="graph 2 of 2 has no edges"):
        compare(graph([0], [1.0]), graph([], []))
    assert Overlap(0, 0, 0).iou is None
