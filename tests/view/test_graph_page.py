"""The page of a graph in a real browser: statement and sliders, units, edges, heads, attention, groups."""

import json
from itertools import combinations

import numpy as np
import pytest

from clearhead.units import Graph, Provenance, Unit
from clearhead.view.graph_page import write_graph_page
from tests.view.conftest import Visit
from tests.view.synthetic_graph import HOSTILE, synthetic_graph

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def graph():
    return synthetic_graph(tokens=HOSTILE)


@pytest.fixture(scope="module")
def page(graph, tmp_path_factory):
    return write_graph_page(graph, tmp_path_factory.mktemp("graph") / "graph.html")


@pytest.fixture(scope="module")
def visit(browser, page):
    opened = Visit(browser, page, ready=".mark")
    yield opened
    assert opened.troubles == []
    opened.context.close()


def statement(visit):
    return visit.tab.locator("#statement").text_content()


def slide(visit, name, value):
    visit.tab.locator(f"#{name}-slider").evaluate(
        "(s, v) => { s.value = v; s.dispatchEvent(new Event('input')); }", value
    )


def heaviest_carried(graph):
    """The heaviest edge that heads carry."""
    size = np.abs(graph.weight) * np.isin(np.arange(len(graph)), graph.loadings.edge)
    edge = int(np.argmax(size))
    return edge, graph.units[graph.source[edge]].id, graph.units[graph.target[edge]].id


def test_the_statement_counts_what_is_drawn(visit, graph):
    visit.go("summary", ".mark")
    slide(visit, "edges", 100)
    whole = f"{len(graph.units)} of {len(graph.units)} units, {len(graph)} of {len(graph)} edges shown, with 100 %"
    visit.wait(f"document.getElementById('statement').textContent.startsWith('{whole}')")
    assert visit.tab.locator(".mark").count() == len(graph.units)
    slide(visit, "units", 50)
    kept = sum(
        unit.kind in ("logit", "target") or graph.values["influence"][place] <= 0.5
        for place, unit in enumerate(graph.units)
    )
    visit.wait(f"document.getElementById('statement').textContent.startsWith('{kept} of')")
    assert visit.tab.locator(".mark").count() == kept
    slide(visit, "units", 100)
    slide(visit, "edges", 50)
    order = np.argsort(-np.abs(graph.weight), kind="stable")
    before = np.concatenate([[0], np.cumsum(np.abs(graph.weight[order]))[:-1]]) / np.abs(graph.weight).sum()
    held = f" {int((before < 0.5).sum())} of {len(graph)} edges"
    visit.wait(f"document.getElementById('statement').textContent.includes('{held}')")
    errors = sum(unit.kind == "error" for unit in graph.units)
    visit.tab.locator(".kinds button[data-kind=error]").click()
    visit.wait(f"document.getElementById('statement').textContent.includes('Hidden by kind: error ({errors})')")
    visit.tab.locator("#edges-by").select_option("share")
    slide(visit, "edges", 40)
    into = np.bincount(graph.target, np.abs(graph.weight), minlength=len(graph.units))
    shares = np.sort(np.abs(graph.weight) / into[graph.target])[::-1]
    few = int((np.concatenate([[0], np.cumsum(shares)[:-1]]) < 0.4 * shares.sum()).sum())
    visit.tab.locator(".kinds button[data-kind=error]").click()
    visit.wait(f"document.getElementById('statement').textContent.includes(' {few} of {len(graph)} edges')")
    visit.tab.locator("#edges-by").select_option("weight")
    visit.tab.locator(".kinds button[data-kind=error]").click()
    visit.tab.locator("#usual").click()
    visit.wait("!document.getElementById('statement').textContent.includes('Hidden')")


def test_a_unit_shows_its_edges_and_a_click_opens_one(visit, graph):
    _, source, target = heaviest_carried(graph)
    place = graph.place(target)
    visit.tab.locator(f".mark[data-place='{place}']").dispatch_event("click")
    visit.tab.wait_for_selector(f".details h2 code:text-is('{target}')")
    own = graph.target == place
    assert visit.tab.locator(".details h3").first.text_content().startswith(f"In: {own.sum()} edge")
    largest = np.abs(graph.weight[own]).max() / np.abs(graph.weight[own]).sum()
    cells = visit.tab.locator(".details .weights tbody tr").first.locator("td").all_text_contents()
    assert cells[0].startswith(graph.units[graph.source[np.flatnonzero(own)[np.argmax(np.abs(graph.weight[own]))]]].id)
    assert abs(float(cells[2].rstrip(" %")) - 100 * largest) < 1
    visit.tab.locator(".details .to-edge").first.click()
    visit.tab.wait_for_selector(".edge-title")


def test_an_edge_names_the_heads_that_carry_it(visit, graph):
    edge, source, target = heaviest_carried(graph)
    visit.go(f"{source}>{target}", ".edge-title")
    visit.wait(f"document.querySelector('.ends code').textContent === '{source}'")
    carried = graph.loadings.of(edge)
    size = np.sort(np.abs(list(carried.values())))[::-1]
    needed = int(np.argmax(np.cumsum(size) >= 0.9 * size.sum())) + 1
    tile = visit.tab.locator(".details .figure").filter(has_text="Heads for 90 %").locator(".value")
    assert tile.text_content() == f"{needed} of {len(carried)}"
    (layer, head), _ = max(carried.items(), key=lambda item: abs(item[1]))
    assert visit.texts(".details .weights tbody code")[0] == f"head {layer}.{head}"
    assert visit.tab.locator(".details .grid .cell.filled").count() == len(carried)


def test_an_attention_table_lists_pairs_marginals_and_modes(visit, graph):
    visit.go("attention.0", ".axes")
    assert visit.texts(".details h3")[0].startswith("Pairs")
    assert [title.rstrip("?") for title in visit.texts(".details h3")][1:] == [
        "Pairs as a square",
        "Query side",
        "Key side",
        "By singular mode",
    ]
    assert "Minus the score of token 0" in visit.tab.locator(".details").text_content()
    visit.tab.locator(".details .more").first.click()
    assert set(visit.texts(".unit-link.absent code")) == {"feature.0.99999@2"}


def test_pins_make_a_group_that_can_be_saved_and_loaded(visit, graph, tmp_path):
    target = graph.place("logit.500@8")
    into = np.flatnonzero(graph.target == target)
    heaviest = int(into[np.argmax(np.abs(graph.weight[into]))])
    mine = [0, int(graph.source[heaviest])]
    visit.go(graph.units[0].id, "#pin")
    visit.wait(f"document.querySelector('.details h2 code').textContent === '{graph.units[0].id}'")
    visit.tab.keyboard.press("p")
    visit.tab.locator(f".mark[data-place='{mine[1]}']").dispatch_event("click", {"ctrlKey": True})
    assert visit.tab.locator(".mark.pinned").count() == 2
    visit.tab.locator("#group-name").fill("<i>mine")
    visit.tab.locator("#make-group").click()
    visit.tab.wait_for_selector(".group-title h2:text-is('<i>mine')")
    sent = graph.weight[np.isin(graph.source, mine) & (graph.target == target)].sum()
    line = visit.tab.locator(".details .weights tr").filter(has_text="logit.500@8").locator("b").last
    said = float(line.text_content().replace("\u2212", "-"))
    assert sent != 0 and said == pytest.approx(sent, rel=0.01)
    with visit.tab.expect_download() as saved:
        visit.tab.locator("#save-groups").click()
    saved.value.save_as(tmp_path / "supernodes.json")
    kept = json.loads((tmp_path / "supernodes.json").read_text())
    assert kept["supernodes"][-1] == {"name": "<i>mine", "units": [graph.units[0].id, graph.units[mine[1]].id]}
    assert len(kept["supernodes"]) == len(graph.supernodes) + 1
    visit.tab.locator("#dissolve").click()
    visit.wait("document.querySelectorAll('.group-chip').length === 2")
    visit.tab.locator("input[type=file]").set_input_files(tmp_path / "supernodes.json")
    visit.wait("document.querySelectorAll('.group-chip').length === 3")
    (tmp_path / "bad.json").write_text('{"supernodes": [{"name": 1}]}')
    visit.tab.locator("input[type=file]").set_input_files(tmp_path / "bad.json")
    visit.tab.wait_for_selector(".groups .said:text('needs')")
    assert len(visit.texts(".group-chip")) == 3


def test_arrow_keys_walk_and_unknown_names_are_told(visit, graph):
    visit.go("logit.500@8", ".details h2 code:text-is('logit.500@8')")
    visit.tab.locator(".net-scroll").focus()
    visit.tab.keyboard.press("ArrowDown")
    into = np.flatnonzero(graph.target == graph.place("logit.500@8"))
    source = graph.units[graph.source[into[np.argmax(np.abs(graph.weight[into]))]]].id
    visit.wait(f"decodeURIComponent(location.hash) === '#{source}'")
    visit.go("feature.9.9@9", ".notice")
    visit.go("summary", ".details .words")
    assert visit.tab.locator(".notice").count() == 0


def test_a_phone_in_the_dark_shows_tokens_as_text(browser, page):
    visit = Visit(browser, page, width=420, scheme="dark", at="logit.500@8", ready=".details h2")
    assert visit.texts(".prompt-token")[:3] == ["</script><script>alert(1)</script>", "⟨RLO⟩abc", "⟨ZWSP⟩"]
    assert "</script><b>" in visit.texts(".details .token-pill")
    assert visit.tab.evaluate("document.documentElement.scrollWidth") == 420
    assert visit.tab.evaluate(
        "document.getElementById('view').scrollWidth <= document.getElementById('view').clientWidth"
    )
    assert visit.troubles == []
    visit.context.close()


def test_a_graph_of_no_prompt_names_its_few_units_and_orders_edges_by_influence(browser, tmp_path):
    names = ["input", "head_k.0.1", "head_k.0.2", "head_k.0.3", "head.0.1", "target.0"]
    influence = dict(zip(names, [0.9, 0.75, 1.0, 1.0, 0.7, 0.4], strict=True))
    graph = Graph(
        list(map(Unit.parse, names)),
        [0, 0, 1, 4],
        [2, 1, 4, 5],
        [900.0, 5.0, 1.0, 2.0],  # the heaviest edge leads to what matters little
        Provenance("m", "p"),
        values={"influence": [influence[name] for name in names]},
        labels={
            "head.0.1": "pattern 1: token before 79%",
            "head_k.0.1": "keys of 1",
            "head_k.0.2": "keys: of a pattern unseen",
        },
        scores={"loss": 0.25, "loss_replaced": 1.5},
    )
    visit = Visit(browser, write_graph_page(graph, tmp_path / "graph.html"), ready=".mark", width=420)
    tab = visit.tab
    assert tab.locator("#edges-by").input_value() == "influence"
    told = tab.locator(".beside-mark").all_text_contents()
    assert {"pattern 1", "token before 79%", "keys of 1", "input", "target.0"} <= set(told)
    assert "4 of 6 units, 2 of 4 edges shown" in statement(visit)
    tab.locator("#edges-by").select_option("weight")
    slide(visit, "units", 100)
    slide(visit, "edges", 50)
    assert "1 of 4 edges shown, with 99 % of |weight|" in statement(visit)
    boxes = [name.bounding_box() for name in tab.locator(".beside-mark").all()]
    assert len(boxes) == 8  # two names have two lines, which stand close below each other
    for one, other in combinations(sorted(filter(None, boxes), key=lambda box: box["x"]), 2):
        assert abs(one["y"] - other["y"]) > 8 or one["x"] + one["width"] <= other["x"]
    assert tab.locator(".figure .value").all_text_contents() == ["0.250", "1.500"]
    assert tab.locator(".figure .label").all_text_contents()[0].startswith("Loss of the model")
    assert visit.troubles == []
    visit.context.close()
