import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import ClearheadError, CorruptFileError, NonFiniteError, UnknownNameError
from clearhead.units import AttentionTable, Graph, Loadings, Provenance, Supernode, Unit

PROVENANCE = Provenance("toy", "weights product", "a b", (5, 6), {"clearhead": "0.1.0"}, 3)
HEADS = [Unit("head", 0, h, activation=float(h)) for h in range(6)]


def dense(graph, units):
    matrix = np.zeros((len(units), len(units)))
    place = {unit: p for p, unit in enumerate(units)}
    for s, t, w in zip(graph.source, graph.target, graph.weight, strict=True):
        matrix[place[graph.units[s]], place[graph.units[t]]] += w
    return matrix


@st.composite
def graphs(draw):
    chosen = draw(st.permutations(HEADS))[: draw(st.integers(1, 6))]
    pairs = draw(st.sets(st.tuples(*[st.integers(0, len(chosen) - 1)] * 2)))
    pairs = sorted(pairs)
    weight = [draw(st.integers(-5, 5)) for _ in pairs]
    return Graph(chosen, [s for s, _ in pairs], [t for _, t in pairs], weight, PROVENANCE)


@given(graphs(), graphs())
def test_merge_adds_and_diff_subtracts(a, b):
    np.testing.assert_array_equal(dense(a.merge(b), HEADS), dense(a, HEADS) + dense(b, HEADS))
    np.testing.assert_array_equal(dense(a.diff(b), HEADS), dense(a, HEADS) - dense(b, HEADS))
    assert a.merge(b).provenance.parents == (a.provenance, b.provenance)


@given(graphs())
def test_export_round_trip(graph):
    again = Graph.from_dict(json.loads(json.dumps(graph.to_dict())))
    assert again.units == graph.units
    assert [unit.activation for unit in again.units] == [unit.activation for unit in graph.units]
    np.testing.assert_array_equal(dense(again, HEADS), dense(graph, HEADS))
    assert again.provenance == graph.provenance


@given(graphs(), st.floats(0, 1))
def test_prune_keeps_the_fewest_edges_that_carry_the_share(graph, share):
    pruned = graph.prune(share)
    sizes = sorted(np.abs(graph.weight), reverse=True)
    total = sum(sizes)
    assert np.abs(pruned.weight).sum() >= share * total - 1e-9
    fewest = next(n for n in range(len(sizes) + 1) if sum(sizes[:n]) >= share * total * (1 - 1e-12))
    assert len(pruned) == fewest
    assert set(pruned.units) == {pruned.units[p] for p in [*pruned.source, *pruned.target]}
    kept = dense(pruned, HEADS)
    np.testing.assert_array_equal(kept[kept != 0], dense(graph, HEADS)[kept != 0])


def test_lookup():
    graph = Graph(HEADS[:3], torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([2.0, -1.0]), PROVENANCE)
    assert graph.weights_between("head.0.0", "head.0.1") == 2
    assert graph.weights_between("head.0.0", HEADS[2]) == 0
    assert "head.0.2" in graph
    assert "head.0.5" not in graph
    assert graph.unit("head.0.2").activation == 2
    with pytest.raises(UnknownNameError, match="head.0.5"):
        graph.unit("head.0.5")


def test_bad_graphs_are_refused():
    with pytest.raises(ClearheadError, match="head.0.0 appears more than once"):
        Graph([HEADS[0], HEADS[0]], [], [], [], PROVENANCE)
    with pytest.raises(ClearheadError, match="edge 1 has target 3, but there are 3 units"):
        Graph(HEADS[:3], [0, 0], [1, 3], [1, 1], PROVENANCE)
    with pytest.raises(ClearheadError, match="head.0.0 → head.0.1 appears more than once"):
        Graph(HEADS[:3], [0, 0], [1, 1], [1, 1], PROVENANCE)
    with pytest.raises(ClearheadError, match="one length"):
        Graph(HEADS[:3], [0, 0], [1], [1, 1], PROVENANCE)
    with pytest.raises(NonFiniteError, match="head.0.0 → head.0.2"):
        Graph(HEADS[:3], [0, 0], [1, 2], [1, np.nan], PROVENANCE)
    with pytest.raises(ClearheadError, match="whole numbers"):
        Graph(HEADS[:3], [0.5], [1], [1], PROVENANCE)
    with pytest.raises(ClearheadError, match="prune"):
        Graph(HEADS[:3], [0], [1], [1], PROVENANCE).prune(90)


def test_bad_exports_are_refused():
    entries = Graph(HEADS[:3], [0], [1], [1], PROVENANCE).to_dict()
    with pytest.raises(CorruptFileError, match="format 3"):
        Graph.from_dict({**entries, "format": 3})
    with pytest.raises(CorruptFileError, match="lacks weight"):
        Graph.from_dict({k: v for k, v in entries.items() if k != "weight"})
    with pytest.raises(CorruptFileError, match="activations"):
        Graph.from_dict({**entries, "activation": [1.0]})
    with pytest.raises(UnknownNameError, match="did you mean 'seed'"):
        Graph.from_dict({**entries, "provenance": {**entries["provenance"], "sead": 1}})
    with pytest.raises(CorruptFileError, match="model"):
        Graph.from_dict({**entries, "provenance": {"protocol": "x"}})


def annotated():
    units = [
        Unit("embedding", index=1, position=0),
        Unit("lorsa", 0, 4, 1),
        Unit("lorsa", 1, 4, 2),
        Unit("logit", index=7, position=2),
    ]
    table = AttentionTable("lorsa.0.4@1", 2.0, 2.0, None, (("embedding.1@0", "bias.0", 2.0),))
    edge = AttentionTable(
        "edge.1.2.0@2", 1.0, 1.0, 0, (("lorsa.0.4@1", "bias.0", 1.0),), triples=(("lorsa.0.4@1", 3, "bias.0", 1.0),)
    )
    return Graph(
        units, [0, 1, 0, 2], [1, 2, 3, 3], [1.0, -4.0, 0.5, 2.0], replace(PROVENANCE, token_ids=()),
        values={"influence": [0.9, 0.5, np.nan, 0.1]},
        loadings=Loadings([0, 1, 1, 3], [0, 0, 1, 1], [1, 1, 2, 2], [1.0, -1.0, -3.0, 2.0], "order 1"),
        attention=[table, edge],
        supernodes=[Supernode("pair", ("lorsa.0.4@1", "lorsa.1.4@2")), Supernode("first", ("embedding.1@0",))],
        scores={"replacement": 0.5},
        tokens=["a", "b", "c"],
        labels={"logit.7@2": " d"},
    )  # fmt: skip


def test_what_is_said_of_a_graph_follows_its_units():
    graph = annotated()
    part = graph.restrict(["logit.7@2", "lorsa.1.4@2", "lorsa.0.4@1"])
    assert [unit.id for unit in part.units] == ["lorsa.0.4@1", "lorsa.1.4@2", "logit.7@2"]
    np.testing.assert_array_equal(part.weight, [-4, 2])
    np.testing.assert_array_equal(part.values["influence"], [0.5, np.nan, 0.1])
    assert [part.loadings.of(edge) for edge in range(2)] == [{(0, 1): -1, (1, 2): -3}, {(1, 2): 2}]
    assert [group.units for group in part.supernodes] == [("lorsa.0.4@1", "lorsa.1.4@2")]
    assert part.attention == graph.attention
    assert (part.scores, part.tokens, part.labels) == (graph.scores, graph.tokens, graph.labels)

    # only the edge lorsa.0.4 → lorsa.1.4 carries 4 of 7.5: the embedding, the logit and nothing else go
    pruned = graph.prune(0.5)
    assert [unit.id for unit in pruned.units] == ["lorsa.0.4@1", "lorsa.1.4@2"]
    assert pruned.loadings.of(0) == {(0, 1): -1, (1, 2): -3}


def test_attention_tables_go_with_the_last_that_they_explain():
    graph = annotated()
    without_lorsa = graph.restrict(["embedding.1@0", "lorsa.1.4@2", "logit.7@2"])
    assert [table.unit for table in without_lorsa.attention] == ["edge.1.2.0@2"]
    without_head = graph.restrict(["embedding.1@0", "lorsa.0.4@1"])
    assert [table.unit for table in without_head.attention] == ["lorsa.0.4@1"]
    bare = Graph(graph.units, [], [], [], PROVENANCE, attention=graph.attention[1:])
    assert bare.restrict(["logit.7@2"]).attention == bare.attention


def test_merging_adds_loadings_and_tables_and_averages_the_rest():
    graph = annotated()
    twice = graph.merge(graph)
    np.testing.assert_array_equal(dense(twice, graph.units), 2 * dense(graph, graph.units))
    assert twice.loadings.by_head() == {head: 2 * weight for head, weight in graph.loadings.by_head().items()}
    np.testing.assert_array_equal(twice.values["influence"], graph.values["influence"])
    assert [table.total for table in twice.attention] == [4, 2]
    assert twice.attention[1].triples == (("lorsa.0.4@1", 3, "bias.0", 2.0),)
    assert (twice.supernodes, twice.scores, twice.tokens) == (graph.supernodes, graph.scores, graph.tokens)
    assert twice.provenance.protocol == "sum of 2 graphs: weights product"
    assert len(graph.merge(graph, graph).provenance.parents) == 3
    mean = twice.merge(graph, graph, mean=True)
    np.testing.assert_allclose(mean.weight, graph.weight[[0, 2, 1, 3]] * 4 / 3)
    assert mean.provenance.protocol == "mean of 3 graphs: mixed protocols"


def test_a_graph_minus_itself_is_zero_everywhere():
    graph = annotated()
    nothing = graph.diff(graph)
    assert len(nothing) == len(graph)
    assert not nothing.weight.any()
    assert not nothing.loadings.weight.any()
    assert [table.total for table in nothing.attention] == [0, 0]
    assert nothing.scores == {"replacement": 0}
    np.testing.assert_array_equal(nothing.values["influence"], [0, 0, np.nan, 0])


def test_loadings_of_one_graph_alone_or_of_another_kind_are_not_added():
    graph = annotated()
    bare = Graph(graph.units, graph.source, graph.target, graph.weight, PROVENANCE)
    assert graph.merge(bare).loadings is None
    other = Loadings([0], [0], [0], [1.0], "sensitivity")
    assert graph.merge(Graph(graph.units, [0], [1], [1.0], PROVENANCE, loadings=other)).loadings is None


def test_merging_from_the_end_lets_last_tokens_meet():
    long = annotated()
    units = [Unit("lorsa", 0, 4, 0), Unit("logit", index=7, position=1)]
    table = AttentionTable("edge.1.2.0@1", 1.0, 1.0, 0, (("lorsa.0.4@0", "bias.0", 1.0),))
    short = Graph(
        units, [0], [1], [3.0], replace(PROVENANCE, token_ids=()), attention=[table],
        supernodes=[Supernode("first", ("lorsa.0.4@0",))], tokens=["b", "x"], labels={"logit.7@1": "other"},
    )  # fmt: skip
    both = long.merge(short, from_end=True)
    assert [unit.id for unit in both.units] == [unit.id for unit in long.units]
    assert both.weights_between("lorsa.0.4@1", "logit.7@2") == 3
    assert both.tokens == ("⋯", "b", "⋯")
    assert both.labels == {"logit.7@2": " d"}
    assert both.supernodes[1] == Supernode("first", ("embedding.1@0", "lorsa.0.4@1"))
    # the key of the short prompt's edge is at 0 of 2, hence at 1 of 3: another edge than that to key 0 of 3
    assert [(table.unit, table.against) for table in both.attention[1:]] == [("edge.1.2.0@2", 0), ("edge.1.2.1@2", 1)]
    assert both.attention[2].pairs == (("lorsa.0.4@1", "bias.0", 1.0),)
    by_name = long.merge(short)
    assert "lorsa.0.4@0" in by_name
    with pytest.raises(ClearheadError, match="neither tokens nor token ids"):
        long.merge(Graph(HEADS[:1], [], [], [], Provenance("m", "p")), from_end=True)


def test_a_cycle_is_named_and_an_order_found():
    graph = annotated()
    order = graph.check_acyclic().tolist()
    assert sorted(order) == [0, 1, 2, 3]
    assert all(order.index(s) < order.index(t) for s, t in zip(graph.source, graph.target, strict=True))
    ring = Graph(HEADS[:5], [0, 1, 2, 3, 3], [1, 2, 3, 1, 4], np.ones(5), PROVENANCE)
    with pytest.raises(ClearheadError, match=r"cycle, head.0.(1 → head.0.2 → head.0.3 → head.0.1|2|3)"):
        ring.check_acyclic()
    with pytest.raises(ClearheadError, match=r"cycle, head.0.0 → head.0.0"):
        Graph(HEADS[:1], [0], [0], [1.0], PROVENANCE).check_acyclic()
    n = 20_000
    path = Graph(
        [Unit("feature", 0, i) for i in range(n)], np.arange(n - 1), np.arange(1, n), np.ones(n - 1), PROVENANCE
    )
    assert path.check_acyclic().tolist() == list(range(n))


def test_bad_annotations_are_refused():
    def graph(**said):
        return Graph(HEADS[:3], [0], [1], [1.0], Provenance("m", "p"), **said)

    with pytest.raises(ClearheadError, match="there are 3 units"):
        graph(values={"influence": [1.0]})
    with pytest.raises(NonFiniteError, match="influence of head.0.1 is infinite"):
        graph(values={"influence": [1.0, np.inf, 0]})
    with pytest.raises(NonFiniteError, match="replacement"):
        graph(scores={"replacement": np.nan})
    with pytest.raises(ClearheadError, match="a loading names edge 1"):
        graph(loadings=Loadings([1], [0], [0], [1.0], "order 1"))
    with pytest.raises(NonFiniteError, match=r"edge 0 on head\.0\.5"):
        Loadings([0], [0], [5], [np.nan], "order 1")
    with pytest.raises(ClearheadError, match="add them first"):
        Loadings([0, 0], [0, 0], [0, 0], [1.0, 2.0], "order 1")
    with pytest.raises(UnknownNameError, match="head.0.4"):
        graph(supernodes=[Supernode("x", ("head.0.4",))])
    with pytest.raises(ClearheadError, match="supernode x appears more than once"):
        graph(supernodes=[Supernode("x", ("head.0.0",)), Supernode("x", ("head.0.1",))])
    with pytest.raises(ClearheadError, match="beyond the prompt of 1 tokens"):
        Graph([Unit("head", 0, 0, 1)], [], [], [], Provenance("m", "p"), tokens=["a"])
    with pytest.raises(NonFiniteError, match="not finite"):
        AttentionTable("lorsa.0.0@1", np.nan, 0.0)
