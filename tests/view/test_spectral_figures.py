import numpy as np
import pytest

from clearhead.atlas.read import Atlas
from clearhead.view import spectral_figures as figures
from clearhead.view import sweep_figures
from clearhead.view.spectral_summary import summarise_heads
from tests.view.synthetic_spectral_atlas import write_synthetic_spectral_atlas


def test_contributions_keep_their_sign_without_colour():
    (bars,) = figures.contributions([4, 1], [2.5, -1.0], 0.25).data
    assert bars.x == ("mode 4", "mode 1", "others")
    assert bars.y == (2.5, -1.0, 0.25)
    assert bars.marker.pattern.shape == ("", "/", "")
    assert bars.text == ("+2.50", "−1.00", "+0.25")


def test_controls_stand_where_s_and_their_effect_put_them():
    figure = figures.sparsity_against_controls(
        0.1, ["gauge", "span"], [0.3, 0.1], [0.25, -0.05], [0.35, 0.2], reference=0.37
    )
    (points,) = figure.data
    assert points.x == pytest.approx((0.4, 0.2))
    assert points.error_x.array == pytest.approx((0.05, 0.1))
    assert points.error_x.arrayminus == pytest.approx((0.05, 0.15))
    own, dotted = figure.layout.shapes
    assert (own.x0, dotted.x0) == (0.1, 0.37)
    assert dotted.name == "products of Gaussians with this spectrum" and dotted.showlegend


@pytest.mark.parametrize("sigma", [np.ones(64), np.geomspace(10, 0.1, 64), np.eye(64)[0]])
def test_reference_is_s_of_products_of_gaussians_with_the_spectrum(sigma):
    rng = np.random.default_rng(0)
    g, h = rng.normal(size=(2, 4000, 64))
    c = sigma * g * h
    # the ratio of the means: a steep spectrum leaves few terms, and the mean of ratios is then a little larger
    drawn = np.abs(c).mean() ** 2 / (c**2).mean()
    assert figures.gaussian_sparsity(sigma.tolist()) == pytest.approx(drawn, rel=0.08)


def test_reference_of_known_spectra():
    assert (
        figures.gaussian_sparsity([2.0, 2.0, 2.0])
        == pytest.approx(figures.GAUSSIAN_PRODUCTS)
        == pytest.approx(0.405, abs=1e-3)
    )
    assert figures.gaussian_sparsity([3.0, 1.0]) == pytest.approx(0.8 * figures.GAUSSIAN_PRODUCTS)
    assert figures.gaussian_sparsity([0.0, 0.0]) == figures.gaussian_sparsity([]) == 1.0


def test_spectrum_has_no_place_for_zeros_and_marks_by_share():
    line, marks = figures.spectrum([4.0, 1.0, 0.0], {1: 0.25, 2: 0.01}).data
    assert line.y == (4.0, 1.0, None) and marks.y == (1.0, None)
    assert marks.marker.size[0] == pytest.approx(13.0)
    empty = figures.spectrum([], {})
    assert empty.data[0].x == ()


def test_head_map_of_numbers_and_of_categories():
    (cells,) = figures.head_map([[0.1, None], [0.3, 0.2]], "S").data
    assert cells.z == ((0.1, None), (0.3, 0.2)) or [list(row) for row in cells.z] == [[0.1, None], [0.3, 0.2]]
    (named,) = figures.head_map([[0, 1], [None, 1]], "verdict", ["sparse", "sink"]).data
    assert (named.zmin, named.zmax) == (-0.5, 1.5)
    assert [list(row) for row in named.customdata] == [["sparse", "sink"], ["", "sink"]]
    # each category fills its own half of the scale, so that no colour lies between two of them
    assert [edge for edge, _ in named.colorscale] == [0, 0.5, 0.5, 1]


def test_histogram_counts_every_firing():
    (bars,) = figures.n_recon_histogram({3: 2, 1: 6}).data
    assert bars.x == (1, 3) and bars.y == (6, 2)
    assert bars.customdata == (0.75, 1.0)


def test_heads_have_a_symbol_for_every_verdict():
    groups = {"a": ("#111", [("head.0.0", 0.1, 0.4)]), "b": ("#222", [("head.0.1", 0.6, 0.5)])}
    diagonal, *points = figures.heads_against_control(groups, "gauge").data
    assert diagonal.x == diagonal.y == (0, 0.6)
    assert [trace.marker.symbol for trace in points] == ["circle", "diamond"]
    assert points[0].x == (0.4,) and points[0].y == (0.1,) and points[0].customdata == ("head.0.0",)


def test_summary_agrees_with_the_atlas(tmp_path):
    atlas = Atlas(write_synthetic_spectral_atlas(tmp_path / "atlas"))
    summary = summarise_heads(atlas)
    tiles = {tile["name"]: (tile["value"], tile["small"]) for tile in summary["tiles"]}
    # kinds go round: of 24 heads 5 of each kind but the last
    assert tiles["heads"] == ("24", "15 with firings")
    assert tiles["separated"] == ("67 %", "10 of 15 judged")
    median = atlas.sql("select median(n_recon) as m from firings where not sink")[0]["m"]
    assert tiles["n_recon_kept"][0] == f"{median:g}" and "of kept" in tiles["n_recon_kept"][1]
    charts = {chart["name"]: chart for chart in summary["charts"]}
    firings = atlas.sql("select count(*) as n from firings where not sink")[0]["n"]
    assert sum(charts["n_recon_histogram"]["data"][0]["y"]) == firings
    assert charts["n_recon_histogram"]["title"] == "Modes needed, of the firings kept"
    assert sum(len(trace["x"]) for trace in charts["heads_against_control"]["data"][1:]) == 15


def test_nothing_is_said_to_be_separated_where_a_control_was_not_run(tmp_path):
    path = write_synthetic_spectral_atlas(tmp_path / "atlas", controls=("gauge", "shuffle", "untrained"))
    summary = summarise_heads(Atlas(path))
    assert "separated" not in {tile["name"] for tile in summary["tiles"]}
    chart = next(chart for chart in summary["charts"] if chart["name"] == "heads_against_control")
    assert [trace.get("name") for trace in chart["data"][1:]] == ["not compared"]


def test_a_sweep_without_span_draws_none():
    names = [trace.name for trace in sweep_figures.sparsity([0, 8], [0.4, 0.2], [0.4, 0.4], [None, None]).data]
    assert names == ["own modes", "rotated bases"]
    whole = sweep_figures.sparsity([0, 8], [0.4, 0.2], [0.4, 0.4], [0.4, None]).data
    assert [trace.name for trace in whole] == [*names, "rotated spans"]
