"""The page of a fidelity report: what it says of planted numbers, and that it opens in a browser."""

import json

import pytest

from clearhead.view import fidelity_figures as figures
from clearhead.view.fidelity_page import write_fidelity_page
from clearhead.view.fidelity_words import HELP, sentences
from tests.view.conftest import Visit
from tests.view.synthetic_fidelity import synthetic_report


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_fidelity_page(tmp_path_factory.mktemp("fidelity") / "page.html", synthetic_report())


def index_of(page):
    text = page.read_text()
    start = text.index('id="index">') + len('id="index">')
    return json.loads(text[start : text.index("</script>", start)])


def test_the_report_in_words_has_ratio_correlation_overlap_and_fit():
    report = synthetic_report()
    said = sentences(report, {row["run"]: row for row in report["runs"]})
    assert said[0] == (
        "Lorsa against SAE, 6 layers at equal budgets: FVU ratio 1.20 (95 % 1.10 to 1.30), lower at 0 of 6; rank "
        "correlation 0.90 (95 % 0.50 to 1.00)."
    )
    assert said[1].startswith("Errors of Lorsa and SAE have a cosine of 0.30 (shuffled tokens: −0.01)")
    assert "80% of the Lorsa's squared error lies in the span" in said[2]
    assert said[3].endswith("+ 0.100 from 10,000 to 40,000 parameters (through as many points as it has parameters).")
    assert len(said) == 4


def test_tables_hold_layers_partners_and_fits_of_three_sizes(page):
    index = index_of(page)
    assert [layer["layer"] for layer in index["layers"]] == list(range(6))
    assert index["layers"][0]["fvu"] == 0.3  # massive tokens left out
    assert index["layers"][0]["compared"]["reference"] == [0.25, False]
    assert index["layers"][0]["compared"]["transcoder"] is None
    assert [fit[-1] for fit in index["fits"]] == [
        "as many points as parameters: error not known",
        "the values do not fall with size",
    ]
    assert [chart["name"] for chart in index["charts"]] == ["by_layer", "overlap", "parameters", "k"]
    assert all(chart["help"] == HELP[chart["name"]] for chart in index["charts"])


def test_a_fit_is_drawn_only_between_measured_sizes():
    entries = [entry for entry in synthetic_report()["fits"] if entry["over"] == "parameters"]
    curve = figures.scaling(entries, "parameters", "k").data[1]
    assert (min(curve.x), max(curve.x)) == pytest.approx((1e4, 4e4))
    assert curve.y[0] == pytest.approx(2.0 * 1e4**-0.3 + 0.1)


def test_one_layer_is_drawn_as_bars_and_few_layers_side_by_side():
    report = synthetic_report(range(1))
    point = figures.LayerPoint(0, 0.3, "a", False)
    bars = figures.by_layer({"lorsa": ("Lorsa", [point])}).data
    assert [bar.type for bar in bars] == ["bar"] and bars[0].y == ("Lorsa *",)
    assert figures.overlap([0], {"cosine": [0.3]}).data[0].orientation == "h"
    assert report["layers"][0]["layer"] == 0
    assert [figures.amount(value) for value in (950, 1_329_408, 2e9)] == ["950", "1.33M", "2B"]


@pytest.mark.browser
def test_the_page_opens_without_a_network_in_every_view(browser, page):
    visit = Visit(browser, page, width=420, scheme="dark")
    assert visit.tab.locator(".verdict p").count() == 4
    assert visit.tab.locator("table.numbers").count() == 6
    visit.tab.evaluate("location.hash = 'run.0'")
    visit.tab.wait_for_selector("h1:text-is('0-lorsa')")
    assert visit.tab.locator(".token-pill").first.inner_text().startswith("</script>")
    assert visit.tab.evaluate("document.documentElement.scrollWidth") == 420
    visit.tab.evaluate("location.hash = 'run.2'")
    visit.tab.wait_for_selector(".hint:has-text('was not opened')")
    assert visit.troubles == []
