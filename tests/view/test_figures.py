import pytest

from clearhead.atlas.read import Atlas
from clearhead.view import figures
from clearhead.view.explanations import EXPLANATIONS, HEADLINES, METRIC_NAMES
from clearhead.view.payload import CATEGORIES
from clearhead.view.summary import chart_templates, summarise


def test_histogram_bars_cover_the_bins():
    figure = figures.activation_histogram([3, 0, 1], [0.0, 0.5, 1.5, 2.0])
    (bars,) = figure.data
    assert bars.x == (0.25, 1.0, 1.75)
    assert bars.width == (0.5, 1.0, 0.5)
    assert bars.y == (3, 0, 1)


def test_rate_distribution_counts_every_unit_once():
    rates = [0.0, 0.0, 1e-4, 3e-3, 0.2, 1.0]
    alive, dead = figures.rate_distribution(rates).data
    assert sum(alive.y) == 4
    assert dead.y == (2,)


def test_rate_distribution_of_dead_units_alone():
    alive, dead = figures.rate_distribution([0.0, 0.0]).data
    assert sum(alive.y) == 0 and dead.y == (2,)


def test_losses_are_written_on_their_bars():
    (bars,) = figures.cross_entropy(clean=2.5, replaced=2.51, mean=2.7, zero=2.75).data
    assert bars.text == ("2.500", "2.510", "2.700", "2.750")


def test_equal_losses_still_make_a_chart():
    low, high = figures.cross_entropy(clean=2.5, replaced=2.5, mean=2.5, zero=2.5).layout.yaxis.range
    assert low < 2.5 < high


def test_summary_counts_agree_with_the_atlas(atlas_path):
    atlas = Atlas(atlas_path)
    (summary,) = summarise(atlas)
    charts = {chart["name"]: chart for chart in summary["charts"]}
    n_dead = atlas.sql("select count(*) as n from units where dead")[0]["n"]
    n = atlas.sql("select count(*) as n from units where kind = 'lorsa'")[0]["n"]
    assert n_dead > 0
    assert sum(charts["dead"]["data"][1]["y"]) == n_dead
    assert sum(sum(trace["y"]) for trace in charts["hosts"]["data"]) == n - n_dead
    assert len(charts["map"]["data"][0]["x"]) == n - n_dead
    assert len(charts["error_by_position"]["data"][0]["x"]) == 256
    written = {metric["metric"]: metric for metric in summary["metrics"]}
    assert written["fvu"]["value"] == "20.8 %"
    assert written["l0"]["value"] == "61.7"
    assert written["dead_heads"]["value"] == "16"
    assert written["spanning_output"]["interval"] == "21.1–27.7 %"
    assert "spanning_output_low" not in written


def test_charts_without_numbers_are_left_out(atlas_path):
    templates = chart_templates()
    assert set(templates) == {"histogram", "shares"}
    assert [trace["name"] for trace in templates["shares"]["data"]] == ["output", "weights", "routing"]


@pytest.mark.parametrize("name", [*HEADLINES, *CATEGORIES, "z_pattern", "shares", "histogram", "group", "logits"])
def test_what_a_page_shows_large_is_explained(name):
    assert len(EXPLANATIONS[name]) > 20


def test_headlines_have_names():
    assert set(HEADLINES) <= set(METRIC_NAMES)
