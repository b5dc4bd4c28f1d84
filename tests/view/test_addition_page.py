import json

import pytest
import torch

from clearhead.sparsify.addition import shares_by_head
from clearhead.sparsify.addition_study import examine
from clearhead.view import addition_figures
from clearhead.view.addition_page import HELP, write_addition_page
from clearhead.view.packing import unpack
from tests.sparsify.adding_models import dense_adder, few_sums, sparse_adder
from tests.view.conftest import Visit

CURVE = {"step": [1, 2, 3], "edge_share": [0.9, 0.4, 0.03], "accuracy": [1.0, 0.8, 0.99]}


def made_study(seed: int, random: bool):
    torch.set_num_threads(1)
    model, sums = sparse_adder(bias=-1.0), few_sums(24)
    assert model.gates is not None
    shares = shares_by_head(model.hf, model.gates, sums.tokens)
    sparse = {"exact_match": 0.5, "edge_share": 0.25, "edges_by_head": shares, "cpu_seconds": 2.0}
    models = {"dense": dense_adder(), "sparse": model}
    summaries = {"dense": {"exact_match": 1.0, "cpu_seconds": 1.0}, "sparse": sparse}
    if random:
        models["random"], summaries["random"] = sparse_adder(), {"exact_match": 0.125, "cpu_seconds": 2.0}
    return examine(models, summaries, sums, seed)


@pytest.fixture(scope="module")
def studies():
    return [made_study(0, random=True), made_study(1, random=False)]


@pytest.fixture(scope="module")
def page(studies, tmp_path_factory):
    out = tmp_path_factory.mktemp("addition") / "page.html"
    about = {"model": "Addition of numbers below 100", "task": "2 layers of 2 heads"}
    return write_addition_page(out, studies, [CURVE, CURVE], about)


def embedded(page, element: str) -> str:
    text = page.read_text()
    start = text.index(f'id="{element}">') + len(f'id="{element}">')
    return text[start : text.index("</script>", start)]


def test_the_page_holds_every_head_and_map_of_every_seed(page, studies):
    index = json.loads(embedded(page, "index"))
    assert index["heads"]["id"] == [
        f"head.{seed}.{layer}.{head}" for seed in (0, 1) for layer in (0, 1) for head in (0, 1)
    ]
    assert index["visible"] == 36 * 4 and index["places"] == ["a1", "a0", "+", "b1", "b0", "=", "c2", "c1"]
    maps = unpack(embedded(page, "maps-1"))
    torch.testing.assert_close(torch.tensor(maps["edges"]), studies[1].edges, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(maps["any_head"]), studies[1].any_head, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(maps["dense"]), studies[1].dense, atol=1e-4, rtol=0)
    assert index["seeds"][0]["sparse"]["edges_per_sum"] == 36.0
    assert [len(seed["reading"]) for seed in index["seeds"]] == [9, 9]
    assert index["seeds"][0]["random"]["trained"]["exact_match"] == 0.125
    assert index["seeds"][1]["random"]["trained"] is None
    for chart in index["charts"]:
        assert chart["help"] == HELP[chart["name"]] and len(chart["data"]) == 2


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (420, "dark")])
def test_the_page_opens_without_a_network_and_without_errors(browser, page, studies, width, scheme):
    visit = Visit(browser, page, width=width, scheme=scheme)
    tab = visit.tab
    tab.wait_for_selector(".wiring svg")
    assert visit.texts(".summary h1") == ["Addition of numbers below 100"]
    drawn = tab.locator(".wiring").nth(0).locator(".edge").count()
    assert drawn == int((studies[0].any_head[0] >= 0.02).sum())
    first = studies[0].edges[0, 0, 0]
    assert tab.locator(".edge-map").nth(0).locator(".open").count() == int((first >= 5e-5).sum())
    assert len(visit.texts(".statements li")) == 5
    titles = visit.texts(".panel > h3")
    for title in ("What each digit rests on", "Without one kind of edge", "Accuracy by carries", "Seeds and controls"):
        assert any(shown.startswith(title) for shown in titles), title
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.evaluate("location.hash = 'head.1.0.1'")
    tab.wait_for_selector("h1:text-is('head 0.1 · seed 1')")
    assert tab.locator(".maps-large .edge-map").count() == 3
    tab.evaluate("location.hash = 'head.0.1.1'")
    tab.wait_for_selector("h1:text-is('head 1.1 · seed 0')")
    assert visit.texts(".notice") == ["This head opens no edge in any held-out sum."]
    tab.evaluate("location.hash = 'seed.1'")
    tab.wait_for_selector(".moves .current:text-is('seed 1')")
    assert visit.troubles == []
    visit.context.close()


def test_charts_have_a_line_for_each_seed_and_count_wrong_sums():
    curves = {0: ([1, 2], [0.5, 0.25]), 3: ([1], [1.0])}
    edges = addition_figures.edges_over_steps(curves)
    assert [line.name for line in edges.data] == ["seed 0", "seed 3"] and edges.data[0].y == (0.5, 0.25)
    wrong = addition_figures.errors_over_steps(curves)
    assert wrong.data[0].y == (0.5, 0.75) and wrong.layout.yaxis.range == (0, 0.75)
