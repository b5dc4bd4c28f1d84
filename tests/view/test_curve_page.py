"""The page of inclusion curves: what it says of planted curves, and that it opens in a browser."""

import json

import numpy as np
import pytest

from clearhead.view.curve_figures import Line, bootstrap_band, inclusion, per_prompt, ranking
from clearhead.view.curve_page import curve_names, head_grid, overlaps, write_curve_page
from clearhead.view.curve_words import HELP, interval_words, outcome_words, protocol_words, random_words
from tests.view.conftest import Visit
from tests.view.synthetic_curves import N, synthetic_run


@pytest.fixture(scope="module")
def run():
    return synthetic_run()


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    return write_curve_page(tmp_path_factory.mktemp("curve") / "page.html", [run, synthetic_run("sparse", 0.3, 7)])


def index_of(page):
    text = page.read_text()
    start = text.index('id="index">') + len('id="index">')
    return json.loads(text[start : text.index("</script>", start)])


def test_the_outcome_in_words_has_the_crossing_its_intervals_and_the_rest(run):
    curve = {**run.curves[0], "stable": 9, "first": 8, "intervals_templates": {"stable": None}}
    said = outcome_words("exact", curve, N, "heads")
    assert said.startswith("exact: 9 of 48 heads (19 %) keep 90 % of the behaviour (95 %: 8–10 over prompts)")
    assert "; 8 reach it first. Everything else keeps 7 %." in said
    never = outcome_words("mask", {**curve, "stable": None, "first": None, "max_f": 0.4}, N, "heads")
    assert "never reaches it; the largest F is 0.40" in never
    assert random_words(run.curves) == "Random rankings, for comparison: 40, 48."
    assert random_words(run.curves[:2]) == "" and interval_words([3.0, 3.0]) == "3" and interval_words(None) == "–"


def test_the_protocol_is_told_and_prompts_left_out_are_counted(run):
    said = " ".join(protocol_words(run.protocol))
    for part in ("overwritten with what they compute on the corrupt prompt", "on 20 prompts", "on 12 prompts by logit"):
        assert part in said
    assert "2 that the whole model gets wrong, 1 whose effect is below 0.5, 4 that the tokenizer cannot take" in said
    alone = protocol_words({**run.protocol, "ranked_on": (), "wrong": (), "dropped": (), "refused": {}})
    assert "on the evaluated prompts themselves" in alone[1] and alone[2] == "No prompt was left out."


def test_a_band_holds_the_curve_and_needs_two_prompts():
    values = np.array([[0.0, 1.0, 2.0], [0.0, 3.0, 4.0], [0.0, 2.0, 2.0]])
    band = bootstrap_band(values)
    assert band is not None
    low, high = band
    assert low[0] == high[0] == 0.0 and low[2] == high[2] == 1.0
    assert 0.5 <= low[1] < values.mean(0)[1] / values.mean(0)[2] < high[1] <= 1.0
    assert bootstrap_band(values[:1]) is None
    assert bootstrap_band(np.array([[0.0, 1.0], [0.0, -1.0]])) is None


def test_crossings_stand_on_the_curve_and_zero_has_a_place():
    line = Line("a", (0, 1, 4, 8), (0.0, 0.95, 0.8, 1.0), None, 1, 8, False)
    figure = inclusion([line], 0.9, "heads").to_dict()
    curve, first, stable = figure["data"]
    assert list(curve["x"]) == [0.5, 1, 4, 8]
    assert (list(first["x"]), list(first["y"])) == ([1], [0.95]) and (list(stable["x"]), list(stable["y"])) == (
        [8],
        [1.0],
    )
    assert figure["layout"]["xaxis"]["ticktext"][0] == "0" and figure["layout"]["xaxis"]["ticktext"][-1] == "8"


def test_prompts_are_counted_by_what_they_need():
    bars = per_prompt([3, 3, 5, None], "heads").to_dict()["data"]
    assert dict(zip(bars[0]["x"], bars[0]["y"], strict=True)) == {"0": 0, "1": 0, "2": 0, "3": 2, "4": 0, "5": 1}
    assert list(bars[1]["y"]) == [1]


def test_heads_are_placed_by_layer_and_ranked_by_score():
    grid = head_grid({"head.4.1": 2.0, "head.2.0": -3.0, "mlp.2": 5.0})
    assert grid is not None and grid == ([2, 4], [[-3.0, None], [None, 2.0]], [[3, None], [None, 2]])
    heat = ranking(*grid).to_dict()["data"][0]
    assert heat["z"][0][0] == -1.0 and heat["z"][1][1] == pytest.approx((2 / 3) ** 0.5)
    absolute = head_grid({"head.4.1": 2.0, "head.2.0": -3.0, "mlp.2": 5.0}, "absolute")
    assert absolute is not None and absolute[2] == [[2, None], [None, 3]]
    assert head_grid({"mlp.2": 5.0}) is None


def test_names_and_overlaps_leave_random_rankings_apart(run):
    assert curve_names([run])[-2:] == ["random 1", "random 2"]
    assert curve_names([run, run])[0] == "runs/dense: exact, signed"
    rows = overlaps(curve_names([run]), run.curves)
    # the two exact rankings have the same order, 10 and 20 long
    assert rows[0] == ["exact, signed", "exact, absolute", 0.5, 10, 20] and len(rows) == 3


def test_every_chart_and_column_is_explained(page):
    index = index_of(page)
    assert index["curves"]["stable"][:3] == [9, 20, 12] and len(index["curves"]["id"]) == 10
    assert index["protocols"][0]["left"][-1] == ["name of two tokens </script>", 4, "–"]
    assert index["chart"]["name"] in HELP and all(HELP.values())


@pytest.mark.browser
def test_the_page_opens_without_a_network_in_every_view(browser, page):
    visit = Visit(browser, page, width=420, scheme="dark")
    assert visit.tab.locator(".numbers").first.locator("tbody tr").count() == 10
    assert "runs/dense" in visit.texts(".panel > h3")[3] and "4" in visit.texts(".numbers td")
    visit.go("curve.0", "h1:text-is('runs/dense: exact, signed')")
    visit.tab.wait_for_selector(".heatmaplayer .hm", state="attached")
    assert visit.tab.locator(".units-of code").count() == 10
    assert visit.texts(".numbers td.words")[0] == "</script><b>"
    assert visit.tab.evaluate("document.documentElement.scrollWidth") == 420
    assert visit.troubles == []
    visit.context.close()
