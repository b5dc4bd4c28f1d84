import json

import pytest

from clearhead.config import SpectralToy
from clearhead.spectral.toy_dynamics import train_watched
from clearhead.spectral.toy_sweeps import SweepPoint, anisotropy
from clearhead.view import toy_figures
from clearhead.view.toy_page import HELP, last, write_toy_page
from tests.view.conftest import Visit

POINT = SweepPoint(3.0, "partly aligned", 0.9, 0.4, 0.7, 0.1, 8.0, 1.0)


@pytest.fixture(scope="module")
def toy_page(tmp_path_factory):
    setting = SpectralToy(pairs=2, features=12, width=6, head_width=1, steps=20, batch=8).setting()
    toys = [train_watched(setting, seed, records=8) for seed in (0, 1)]
    without = train_watched(SpectralToy(features=12, width=6, steps=5, attention_weight=0.0).setting(), 0, records=2)
    out = tmp_path_factory.mktemp("toy") / "page.html"
    about = {"model": "Toy model: 2 pairs of features", "task": "12 features"}
    return write_toy_page(out, toys, without, anisotropy(width=8, counts=(12,)), ("keys", [POINT, POINT]), about)


@pytest.fixture(scope="module")
def index(toy_page):
    text = toy_page.read_text()
    start = text.index('id="index">') + len('id="index">')
    return json.loads(text[start : text.index("</script>", start)])


def test_every_chart_is_explained_and_holds_numbers(index):
    names = [chart["name"] for chart in index["charts"]]
    assert names[:5] == ["spectrum", "dynamics", "cosines_query", "cosines_key", "arrangement"]
    assert {"arrangement_without", "sweep", "anisotropy", "sparsity_steps"} <= set(names)
    for chart in index["charts"]:
        assert chart["help"] == HELP[chart["name"]] and chart["data"]


def test_the_list_holds_every_pair_of_every_seed(index):
    pairs = index["pairs"]
    assert pairs["id"] == ["pair.0.0", "pair.0.1", "pair.1.0", "pair.1.1"]
    # one mode for two pairs: one of them has none, and no number is made up for it
    assert sum(mode is None for mode in pairs["mode"]) == 2
    assert all((mode is None) == (sigma is None) for mode, sigma in zip(pairs["mode"], pairs["sigma"], strict=True))


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (420, "dark")])
def test_the_page_opens_without_a_network_and_without_errors(browser, toy_page, width, scheme):
    visit = Visit(browser, toy_page, width=width, scheme=scheme)
    tab = visit.tab
    assert visit.texts(".summary h1") == ["Toy model: 2 pairs of features"]
    assert len(visit.texts(".verdict p")) >= 2
    assert "no head" in visit.texts(".figures")[0]
    assert visit.texts(".panel > h3")[0].startswith("Pairs of seed 0")
    assert tab.locator(".numbers tbody tr").count() == 2 + 2 + 2
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.evaluate("location.hash = 'pair.1.1'")
    tab.wait_for_selector("h1:text-is('pair 1 · seed 1')")
    visit.wait("document.querySelectorAll('.js-plotly-plot .scatterlayer .trace').length === 4")
    assert visit.troubles == []
    visit.context.close()


def test_the_last_pair_decides_when_an_event_is_reached():
    assert last([3, 9, 4]) == 9
    assert last([3, None, 4]) is None


def test_spectrum_marks_targets_and_control():
    trained, targets, control = toy_figures.spectrum([1.0, 0.5, 0.0], [0.9, 0.6], [0.2, 0.1, 0.1]).data
    assert trained.y == (1.0, 0.5, 0.0) and targets.y == (0.9, 0.6) and control.y == (0.2, 0.1, 0.1)


def test_losses_that_round_to_zero_have_no_place_on_a_logarithm():
    _, attention = toy_figures.losses([1, 2], [1.0, 0.5], [1e-3, -1e-12]).data
    assert attention.y == (1e-3, None)


def test_events_are_drawn_where_they_were_reached():
    figure = toy_figures.dynamics([1, 2], {"overlap": [0.5, 0.0]}, {"amplitude": 2, "orthogonalisation": None})
    assert [shape.x0 for shape in figure.layout.shapes] == [2]
