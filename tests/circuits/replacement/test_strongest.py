"""The edges that matter most: influence handed down by hand, and the graph of what is kept."""

import numpy as np
import pytest
import torch

from clearhead.circuits.replacement.incoming import Incoming
from clearhead.circuits.replacement.strongest import graph_of, strongest
from clearhead.units import Provenance, Unit

A, B, TOP, OTHER, WORD = (
    Unit("lorsa", 0, 0),
    Unit("lorsa", 0, 1),
    Unit("logit", index=0),
    Unit("logit", index=1),
    Unit("input"),
)


def blocks():
    yield Incoming([WORD, A, B], [TOP, OTHER], torch.tensor([[0.0, 1.0], [-6.0, 0.0], [2.0, 1.0]]))
    yield Incoming([WORD], [A, B], torch.tensor([[0.5, 100.0]]))


def test_influence_is_handed_down_in_proportion_to_what_enters():
    kept, influence = strongest(blocks(), 10)
    assert influence == pytest.approx({TOP: 0.8, OTHER: 0.2, A: 0.6, B: 0.3, WORD: 0.1 + 0.9})
    assert [(edge.source, edge.target) for edge in kept[:2]] == [(A, TOP), (WORD, A)]
    # a large weight into what matters little comes after a small one into what matters
    assert [edge.importance for edge in kept] == pytest.approx([0.6, 0.6, 0.3, 0.2, 0.1, 0.1])
    assert [edge.weight for edge in kept[:3]] == pytest.approx([-6.0, 0.5, 100.0])
    assert strongest(blocks(), 2)[0] == kept[:2]


def test_the_graph_stands_from_bottom_to_top_with_cumulative_influence():
    kept, influence = strongest(blocks(), 3)
    graph = graph_of(
        kept,
        influence,
        Provenance("made", "by hand"),
        labels={TOP: "yes", OTHER: "no"},
        values={"rate": {A: 0.25}},
        scores={"loss": 1.5},
    )
    assert list(graph.units) == [WORD, A, B, TOP]
    total = influence[WORD] + influence[A] + influence[B] + influence[TOP]
    assert graph.values["influence"][graph.place(WORD)] == pytest.approx(influence[WORD] / total)
    assert graph.values["influence"].max() == pytest.approx(1)
    assert graph.values["rate"][graph.place(A)] == 0.25 and np.isnan(graph.values["rate"][graph.place(B)])
    assert graph.labels == {TOP.id: "yes"} and graph.scores == {"loss": 1.5}
    assert [graph.weights_between(edge.source.id, edge.target.id) for edge in kept] == [edge.weight for edge in kept]


def test_edges_that_never_act_are_not_kept():
    nothing = [Incoming([A], [TOP], torch.zeros(1, 1))]
    assert strongest(nothing, 5)[0] == []
