"""The data of a graph's page against the graph itself: order, sums, ranks, loadings, and what a limit leaves out."""

import json

import numpy as np
import pytest

from clearhead.errors import ClearheadError
from clearhead.units.annotations import Loadings
from clearhead.units.graph import Graph
from clearhead.units.provenance import Provenance
from clearhead.units.unit import Unit
from clearhead.view.graph_page import write_graph_page
from clearhead.view.graph_payload import Limits, build_graph_payload
from clearhead.view.graph_words import HELP, SCORES, score_tiles
from clearhead.view.packing import unpack
from tests.view.synthetic_graph import HOSTILE, synthetic_graph


def small(**more):
    """embedding → feature (2), error → feature (−1), feature → logit (4), error → logit (1)."""
    names = ("embedding.7@0", "error.0@0", "feature.0.3@0", "logit.5@0")
    units = [Unit.parse(name) for name in names]
    return Graph(units, [0, 1, 2, 1], [2, 2, 3, 3], [2.0, -1.0, 4.0, 1.0], Provenance("m", "p"), **more)


def test_edges_come_from_the_heaviest_and_sums_are_those_of_the_graph():
    payload = build_graph_payload(small(), Limits())
    edges = unpack(payload.parts["edges"][0])
    assert edges == {"source": [2, 0, 1, 1], "target": [3, 2, 2, 3], "weight": [4.0, 2.0, -1.0, 1.0]}
    units = payload.index["units"]
    assert units["in"] == [0, 0, 3, 5] and units["out"] == [2, 2, 4, 0]
    assert units["balance"] == [0, 0, 1, 5]
    assert units["errors"] == [0, 0, 0.3333, 0.2]
    assert payload.index["edges"] == {"held": 4, "all": 4, "carried": 1.0}
    assert payload.index["loadings"] is None and payload.parts["loadings"] == []


def test_without_influence_units_are_ranked_by_the_weight_before_them():
    payload = build_graph_payload(small(), Limits())
    # |weight| in and out: 2, 2, 7, 5 of 16
    assert payload.index["units"]["rank"] == [0.75, 0.875, 0.0, 0.4375]
    assert payload.index["ranked"] == "weight_rank"
    ranked = build_graph_payload(small(values={"influence": [0.9, np.nan, 0.4, 1.2]}), Limits())
    assert ranked.index["units"]["rank"] == [0.9, 1.0, 0.4, 1.0] and ranked.index["ranked"] == "influence"
    assert ranked.index["values"]["influence"] == [0.9, None, 0.4, 1.2]
    difference = small(values={"influence": [0.9, -0.1, 0.4, 0.0], "error_share": [0.0, 0.0, -0.5, 0.5]})
    of_both = build_graph_payload(difference, Limits()).index
    assert of_both["ranked"] == "weight_rank" and of_both["units"]["errors"] == [0, 0, 0.3333, 0.2]


def test_rows_go_up_from_the_embedding_with_what_heads_read_below_attention_and_that_below_the_mlp():
    above = ["logit.1@0", "feature.10.1@0", "lorsa.10.1@0", "head_k.10.1@0"]
    names = [*above, "feature.2.1@0", "embedding.1@0", "attn_error.2@0"]
    graph = Graph(list(map(Unit.parse, names)), [], [], [], Provenance("m", "p"))
    rows = build_graph_payload(graph, Limits()).index["rows"]
    assert rows == ["embedding", "2.attention", "2.mlp", "10.reads", "10.attention", "10.mlp", "target"]


def test_loadings_keep_their_sums_when_few_are_held():
    loadings = Loadings([0, 0, 0, 3], [1, 2, 1, 0], [0, 5, 1, 0], [1.5, -0.5, 1.0, 1.0], "order 1")
    whole = build_graph_payload(small(loadings=loadings), Limits())
    rows = unpack(whole.parts["loadings"][0])
    # edge 0 of the graph is the second heaviest
    assert rows[1] == [3.0, 2.0, [1, 0, 1.5, 1, 1, 1.0, 2, 5, -0.5], 0]
    assert rows[0] == [0, 0, [], 0] and rows[3][2] == [0, 0, 1.0]
    assert whole.index["loadings"]["heads"][0] == [1, 0, 1.5]
    few = build_graph_payload(small(loadings=loadings), Limits(loadings=1))
    assert unpack(few.parts["loadings"][0])[1] == [3.0, 2.0, [1, 0, 1.5], 2]
    assert few.index["loadings"]["limit"] == 1


def test_a_limit_of_edges_keeps_the_heaviest_and_says_what_they_carry():
    payload = build_graph_payload(small(), Limits(edges=2))
    assert unpack(payload.parts["edges"][0])["weight"] == [4.0, 2.0]
    assert payload.index["edges"] == {"held": 2, "all": 4, "carried": 0.75}
    assert payload.index["units"]["in"] == [0, 0, 3, 5]  # shares are of the whole graph


def test_attention_tables_name_each_unit_once():
    graph = synthetic_graph()
    payload = build_graph_payload(graph, Limits())
    table, source = unpack(payload.parts["attention"][0]), graph.attention[0]
    pairs = [(table["units"][q], table["units"][k], w) for q, k, w in table["pairs"]]
    assert pairs == list(source.pairs) and len(set(table["units"])) == len(table["units"])
    assert payload.index["vocab"][payload.index["elsewhere"]["feature.0.99999@2"]] == "pruned"
    line = payload.index["attention"][0]
    assert (line["layer"], line["head"], line["query"], line["key"], line["against"]) == (5, 3, 8, 5, 0)
    assert [payload.index["vocab"][place] for place in line["tokens"]] == ["" + ' "', "large", "<s>"]


def test_scores_are_named_and_explained():
    tiles = score_tiles({"something_else": 12.5, "completeness": 0.844})
    assert [(tile["label"], tile["value"]) for tile in tiles] == [
        ("Completeness", "84.4 %"),
        ("Something else", "12.5"),
    ]
    assert all(meaning for _, meaning in SCORES.values()) and all(HELP.values())


def test_hostile_words_are_visible_text_in_the_index(tmp_path):
    page = write_graph_page(synthetic_graph(tokens=HOSTILE), tmp_path / "g.html")
    text = page.read_text()
    assert "</script><script>alert" not in text and "\u202e" not in text
    start = text.index('id="index">') + len('id="index">')
    index = json.loads(text[start : text.index("</script>", start)])
    assert "</script><b>" in index["vocab"] and "⟨RLO⟩abc" in index["vocab"]


def test_a_page_too_large_for_any_graph_says_so(tmp_path):
    with pytest.raises(ClearheadError, match="5,000 heaviest edges"):
        write_graph_page(small(), tmp_path / "g.html", max_megabytes=0.1)


def test_a_graph_without_units_is_refused_and_one_without_edges_is_drawn(tmp_path):
    nothing = Graph([], [], [], [], Provenance("m", "p"))
    with pytest.raises(ClearheadError, match="no units"):
        write_graph_page(nothing, tmp_path / "g.html")
    none = np.zeros(0, dtype=np.int64)
    alone = Graph(
        [Unit("head", 0, 1)], none, none, none, Provenance("m", "p"), loadings=Loadings(none, none, none, none, "one")
    )
    payload = build_graph_payload(alone, Limits())
    assert payload.index["loadings"] is None and payload.index["edges"] == {"held": 0, "all": 0, "carried": 1.0}
