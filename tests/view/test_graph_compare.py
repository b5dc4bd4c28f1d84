"""Two graphs laid over each other: whose units and edges, with which weights, ranked by what matters in either."""

import json

import numpy as np
import pytest

from clearhead.units.graph import Graph
from clearhead.units.provenance import Provenance
from clearhead.units.unit import Unit
from clearhead.view.graph_compare import BOTH, FIRST, SECOND, compare
from clearhead.view.graph_page import write_comparison_page
from tests.view.conftest import Visit
from tests.view.synthetic_graph import synthetic_graph


def graph(names, edges, tokens=(), **more):
    units = [Unit.parse(name) for name in names]
    place = {name: at for at, name in enumerate(names)}
    source, target, weight = zip(*[(place[a], place[b], w) for a, b, w in edges], strict=True)
    return Graph(units, source, target, weight, Provenance("m", "p"), tokens=tokens, **more)


def test_weights_and_sides_are_those_of_the_two_graphs():
    a = graph(("mlp.0@1", "mlp.1@1", "logit.5@1"), [("mlp.0@1", "logit.5@1", 2.0), ("mlp.1@1", "logit.5@1", 1.0)])
    b = graph(("mlp.0@1", "mlp.2@1", "logit.5@1"), [("mlp.0@1", "logit.5@1", 0.5), ("mlp.2@1", "logit.5@1", -3.0)])
    found = compare(a, b, ("a", "b"))
    sides = dict(zip((unit.id for unit in found.graph.units), found.side, strict=True))
    assert sides == {"mlp.0@1": BOTH, "mlp.1@1": FIRST, "mlp.2@1": SECOND, "logit.5@1": BOTH}
    edges = {
        found.graph.units[source].id: weights.tolist()
        for source, weights in zip(found.graph.source, found.weights.T, strict=True)
    }
    assert edges == {"mlp.0@1": [2.0, 0.5], "mlp.1@1": [1.0, 0.0], "mlp.2@1": [0.0, -3.0]}
    assert np.array_equal(found.graph.weight, found.weights[0] - found.weights[1])


def test_prompts_of_different_length_meet_at_their_end_and_the_smaller_rank_counts():
    a = graph(("mlp.0@1", "logit.5@1"), [("mlp.0@1", "logit.5@1", 2.0)], ("x", "y"), values={"influence": [0.9, 0.0]})
    b = graph(("mlp.0@2", "logit.5@2"), [("mlp.0@2", "logit.5@2", 2.0)], tuple("xyz"), values={"influence": [0.2, 0.0]})
    found = compare(a, b, ("a", "b"))
    assert [unit.id for unit in found.graph.units] == ["mlp.0@2", "logit.5@2"] and found.side == (BOTH, BOTH)
    assert found.ranks.tolist() == [0.2, 0.0] and found.graph.weight.tolist() == [0.0]


@pytest.mark.browser
def test_the_page_says_which_graph_has_what(browser, tmp_path):
    first, second = (synthetic_graph(seed=seed) for seed in (0, 1))
    names = ("dense </script>", "sparse")
    page = write_comparison_page(first, second, tmp_path / "both.html", names)
    text = page.read_text()
    start = text.index('id="index">') + len('id="index">')
    index = json.loads(text[start : text.index("</script>", start)])
    assert index["sides"]["names"] == list(names) and index["tiles"][0]["small"] == "against 61.2 %"
    shared = len(set(first.units) & set(second.units))
    assert index["sides"]["of"].count(BOTH) == shared
    visit = Visit(browser, page, ready=".mark")
    assert f"{shared} units in both, {len(first.units) - shared} only in the first" in "".join(visit.texts(".sides"))
    only = index["units"]["id"][index["sides"]["of"].index(FIRST)]
    visit.go(only, f".details h2 code:text-is('{only}')")
    assert "only in dense </script>" in visit.texts(".details .sentence span")
    visit.tab.locator(".to-edge").first.click()
    visit.tab.wait_for_selector(".edge-title")
    assert visit.texts(".details .figure .label")[1].startswith("In dense </script>")
    assert visit.troubles == []
    visit.context.close()
