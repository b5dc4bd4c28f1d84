import json

import pytest

from clearhead.atlas.read import Atlas
from clearhead.atlas.write import AtlasWriter
from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.view.packing import unpack
from clearhead.view.page import write_page
from clearhead.view.spectral_figures import gaussian_sparsity
from clearhead.view.spectral_payload import build_spectral_payload
from clearhead.view.visible import visible
from tests.view.on_disk import alter, index_of
from tests.view.synthetic_spectral_atlas import CONTROLS, KINDS, write_synthetic_spectral_atlas

FIRINGS = 20


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_synthetic_spectral_atlas(tmp_path_factory.mktemp("spectral") / "atlas", firings=FIRINGS)


@pytest.fixture(scope="module")
def atlas(path):
    return Atlas(path)


@pytest.fixture(scope="module")
def payload(atlas):
    return build_spectral_payload(atlas)


def details(payload):
    heads = [head for part in payload.heads for head in unpack(part)]
    return dict(zip(payload.index["heads"]["id"], heads, strict=True))


def texts(payload):
    vocab = payload.index["vocab"]
    return [[vocab[place] for place in tokens] for part in payload.prompts for _, tokens in unpack(part)]


def test_every_firing_is_embedded_with_its_text(atlas, payload):
    embedded = details(payload)
    written = texts(payload)
    n = 0
    for place, head in embedded.items():
        _, layer, number = place.split(".")
        rows = atlas.sql(
            "select f.*, p.tokens from firings f join prompts p using (prompt) where layer = ? and head = ? "
            "order by sink, attention desc",
            [int(layer), int(number)],
        )
        firings = head["firings"]
        n += len(rows)
        assert [bool(sink) for sink in firings["sink"]] == [row["sink"] for row in rows]
        for name in ("query", "key", "n_recon", "modes", "prompt"):
            assert firings[name] == [row[name] for row in rows]
        for name in ("attention", "score", "relative", "sparsity", "cancellation"):
            assert firings[name] == pytest.approx([row[name] for row in rows], rel=1e-3)
        for at, row in enumerate(rows):
            assert written[row["prompt"]] == [visible(token) for token in row["tokens"]]
            total = sum(firings["contributions"][at]) + firings["rest"][at]
            assert total == pytest.approx(row["relative"], rel=0.02, abs=0.02)
            assert firings["contributions"][at] == pytest.approx(row["contributions"], rel=5e-3)
    assert n == atlas.sql("select count(*) as n from firings")[0]["n"] > 300


def test_controls_stand_beside_s_in_the_list_and_in_the_head(atlas, payload):
    heads = payload.index["heads"]
    assert payload.index["controls"] == list(CONTROLS)
    for row in atlas.sql("select * from controls"):
        at = heads["id"].index(f"head.{row['layer']}.{row['head']}")
        assert heads[f"under_{row['control']}"][at] == pytest.approx(row["sparsity"], rel=1e-3)
        assert heads[f"effect_{row['control']}"][at] == pytest.approx(row["effect"], rel=1e-3)
    own = details(payload)["head.0.0"]["controls"]
    assert [control["control"] for control in own] == list(CONTROLS)
    assert own[0]["q"] == 0.002 and own[4]["q"] is None


def test_reference_is_that_of_the_head_s_own_spectrum(atlas, payload):
    (row,) = atlas.sql("select sigma from spectra where layer = 1 and head = 2")
    assert details(payload)["head.1.2"]["reference"] == pytest.approx(gaussian_sparsity(row["sigma"]), rel=1e-3)


def test_heads_without_firings_have_empty_numbers(payload):
    heads = payload.index["heads"]
    silent = heads["id"].index(f"head.0.{KINDS.index('silent')}")
    sink = heads["id"].index(f"head.0.{KINDS.index('sink')}")
    for at in (silent, sink):
        assert [heads[name][at] for name in ("sparsity", "n_recon", "cancellation", "under_gauge")] == [None] * 4
    assert heads["n_firings"][sink] == 0 and heads["n_sink"][sink] == FIRINGS
    assert details(payload)[heads["id"][silent]]["firings"]["query"] == []


def test_modes_say_along_which_side_the_query_holds_them(atlas, payload):
    for mode in details(payload)["head.0.0"]["modes"]:
        rows = atlas.sql(
            "select query_side[list_position(modes, $1)] as side from firings "
            "where layer = 0 and head = 0 and not sink and list_contains(modes, $1)",
            [mode["mode"]],
        )
        assert (mode["n"], mode["along"]) == (len(rows), sum(row["side"] > 0 for row in rows))
        assert len(mode["query"]) == 6
    assert [len(mode["key"]) for mode in details(payload)["head.0.0"]["modes"]] == [6, 6, 6, 0]


def test_a_basis_by_offset_has_no_side_where_layers_rotate(tmp_path):
    turned = write_synthetic_spectral_atlas(tmp_path / "turned", basis="offset")
    own = details(build_spectral_payload(Atlas(turned)))["head.0.0"]
    assert own["by_offset"] and {(mode["n"], mode["along"]) for mode in own["modes"]} == {(None, None)}
    still = write_synthetic_spectral_atlas(tmp_path / "still", basis="offset", rotated=False)
    own = details(build_spectral_payload(Atlas(still)))["head.0.0"]
    assert not own["by_offset"] and all(mode["n"] >= mode["along"] >= 0 for mode in own["modes"])


def test_heads_without_some_controls_have_none_of_their_numbers(tmp_path):
    path = write_synthetic_spectral_atlas(tmp_path / "atlas", controls=("gauge", "shuffle"))
    made = build_spectral_payload(Atlas(path))
    assert made.index["controls"] == ["gauge", "shuffle"]
    assert "under_span" not in made.index["heads"]
    own = details(made)["head.0.0"]
    assert [control["control"] for control in own["controls"]] == ["gauge", "shuffle"]
    assert "not tested against span" in own["reasons"][1]


def test_verdicts_are_counted_strongest_first(payload):
    names = [verdict["name"] for verdict in payload.index["verdicts"]]
    assert names == ["sparse, separated", "sparse but cancelling", "not separated", "sink", "no firings"]
    assert sum(verdict["count"] for verdict in payload.index["verdicts"]) == 24


def test_thinned_firings_are_spread_over_the_order_of_attention(atlas, payload):
    thinned = build_spectral_payload(atlas, 4)
    assert thinned.index["heads"] == payload.index["heads"]
    limits = thinned.index["limits"]
    assert limits["firings"] == 4 and limits["most"] == FIRINGS
    assert limits["held"] == atlas.sql("select count(*) as n from firings")[0]["n"]
    whole, kept = (details(one)["head.0.0"]["firings"] for one in (payload, thinned))
    measured = [value for value, sink in zip(whole["attention"], whole["sink"], strict=True) if not sink]
    places = [measured.index(v) for v, sink in zip(kept["attention"], kept["sink"], strict=True) if not sink]
    n = len(measured)
    assert places == [-(-n * step // 4) for step in range(4)]
    assert sum(kept["sink"]) == min(sum(whole["sink"]), 4)


def test_a_small_limit_leaves_firings_out_and_says_so(tmp_path):
    atlas = write_synthetic_spectral_atlas(tmp_path / "atlas", layers=1, firings=60, prompts=2)
    whole = write_page(atlas, tmp_path / "whole.html").stat().st_size
    small = write_page(atlas, tmp_path / "small.html", max_megabytes=(whole - 5_000) / 1e6)
    assert small.stat().st_size < whole - 5_000
    assert index_of(small)["limits"]["firings"] == 32
    assert index_of(tmp_path / "whole.html")["limits"]["firings"] is None


def test_a_limit_that_cannot_be_met_is_refused(tmp_path):
    atlas = write_synthetic_spectral_atlas(tmp_path / "atlas", layers=1, firings=2, prompts=1)
    with pytest.raises(ClearheadError, match=r"MB with 8 firings per head, more than max_megabytes=0\.1; raise it"):
        write_page(atlas, tmp_path / "page.html", max_megabytes=0.1)
    assert not (tmp_path / "page.html").exists()


def test_heads_alone_make_a_page(tmp_path, atlas):
    rows = atlas.sql("select * from spectra where layer = 0 order by head")
    with AtlasWriter(tmp_path / "atlas", about={}) as writer:
        writer.append("spectra", {name: [row[name] for row in rows] for name in rows[0]})
    index = index_of(write_page(tmp_path / "atlas", tmp_path / "page.html"))
    assert index["controls"] == [] and index["layers"] == [0]
    assert index["heads"]["query_tokens"] == [[]] * 6
    assert [chart["name"] for chart in index["summary"]["charts"]] == []


def test_a_single_text_without_controls_and_shared_modes_makes_a_page(tmp_path):
    path = write_synthetic_spectral_atlas(tmp_path / "atlas", prompts=1, controls=(), shared=False)
    index = index_of(write_page(path, tmp_path / "page.html"))
    assert index["controls"] == []
    assert [chart["name"] for chart in index["summary"]["charts"]] == ["n_recon_histogram"]


def test_an_unknown_verdict_keeps_its_name_as_text(tmp_path, path):
    altered = alter(path, tmp_path, "spectra", 0, verdict="</script>\u202efine")
    index = build_spectral_payload(Atlas(altered)).index
    unknown = index["verdicts"][-1]
    assert unknown["name"] == "</script>⟨RLO⟩fine" and unknown["count"] == 1 and unknown["mark"]
    assert index["heads"]["verdict"][0] == len(index["verdicts"]) - 1


@pytest.mark.parametrize(("column", "value"), [("prompt", 99), ("query", 60), ("key", -1), ("head", 77)])
def test_firings_of_nothing_are_refused(tmp_path, path, column, value):
    altered = alter(path, tmp_path, "firings", 3, **{column: value})
    with pytest.raises(CorruptFileError, match="has no such head or token; the tables come from different runs"):
        write_page(altered, tmp_path / "page.html")


def test_a_head_that_stands_twice_is_refused(tmp_path, path):
    altered = alter(path, tmp_path, "spectra", 1, head=0)
    with pytest.raises(CorruptFileError, match=r"head 0\.0 stands twice in `spectra`"):
        write_page(altered, tmp_path / "page.html")


def test_page_is_the_same_each_time_and_no_element_is_made_of_a_token(path, tmp_path):
    page = write_page(path, tmp_path / "page.html")
    assert write_page(path, tmp_path / "again.html").read_bytes() == page.read_bytes()
    html = page.read_text(encoding="utf-8")
    assert html.count("<script") == html.count("</script>")
    assert "alert(1)</script>" not in html and "<img" not in html
    json.dumps(index_of(page), allow_nan=False)
