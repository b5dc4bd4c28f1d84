import pytest

from clearhead.atlas.read import Atlas
from clearhead.atlas.write import AtlasWriter
from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.view.packing import pack, unpack
from clearhead.view.page import write_page
from clearhead.view.payload import ARCS_PER_PATTERN, build_payload
from clearhead.view.visible import visible
from tests.view.on_disk import alter, index_of


@pytest.fixture(scope="module")
def atlas(atlas_path):
    return Atlas(atlas_path)


@pytest.fixture(scope="module")
def payload(atlas):
    return build_payload(atlas)


def details(payload):
    return [unit for part in payload.units for unit in unpack(part)]


def place_of(payload, unit_id):
    return payload.index["units"]["id"].index(unit_id)


def text_of(payload, example):
    part = unpack(payload.texts[payload.index["partOfBlock"][example["block"]]])
    for first, tokens in part[str(example["block"])]:
        if first <= example["start"] < first + len(tokens):
            begin = example["start"] - first
            return [payload.index["vocab"][place] for place in tokens[begin : begin + example["length"]]]
    raise AssertionError("the example's text is not embedded")


def test_packing_is_reversible_and_repeatable():
    value = {"a": [1, 2.5, None, "\u202e</script>"]}
    assert unpack(pack(value)) == value
    assert pack(value) == pack(value)
    assert "<" not in pack(value)


def test_every_example_of_the_atlas_is_embedded_with_its_text(atlas, payload):
    embedded = dict(zip(payload.index["units"]["id"], details(payload), strict=True))
    rows = atlas.sql("select * from examples order by unit_id, category, rank")
    assert len(rows) == sum(len(c) for unit in embedded.values() for c in unit["examples"].values()) > 1000
    for row in rows[:: len(rows) // 150]:
        example = embedded[row["unit_id"]]["examples"][row["category"]][row["rank"]]
        assert text_of(payload, example) == [visible(token) for token in row["tokens"]]
        dense = [0.0] * example["length"]
        for offset, value in zip(example["active"], example["values"], strict=True):
            dense[offset] = value
        assert dense == pytest.approx(row["activations"], rel=1e-3, abs=1e-6)
        assert example["activation"] == pytest.approx(row["activation"], rel=1e-3)


def test_patterns_keep_their_sources_and_their_sum(atlas, payload):
    rows = {row["example_id"]: row for row in atlas.sql("select * from patterns")}
    top = atlas.sql("select * from examples where unit_id = 'lorsa.12.3' and category = 'top' order by rank")
    for row, example in zip(top, details(payload)[place_of(payload, "lorsa.12.3")]["examples"]["top"], strict=True):
        (pattern,) = example["patterns"]
        held = rows[row["example_id"]]
        assert pattern["keys"] == held["keys"]
        assert pattern["weights"] == pytest.approx(held["weights"], rel=1e-3)
        assert sum(pattern["weights"]) + pattern["rest"] == pytest.approx(held["row_sum"], rel=1e-2, abs=1e-3)


def test_a_long_pattern_keeps_its_largest_sources_and_counts_the_others(tmp_path, atlas_path):
    weights = [0.01 * (-1) ** key * (key + 1) for key in range(50)]
    altered = alter(
        atlas_path, tmp_path, "patterns", 0, keys=list(range(50)), weights=weights, row_sum=sum(weights), rest=0.0
    )
    example_id = Atlas(altered).sql("select example_id from patterns limit 1")[0]["example_id"]
    row = Atlas(altered).sql("select * from examples where example_id = ?", [example_id])[0]
    payload = build_payload(Atlas(altered))
    unit = details(payload)[place_of(payload, row["unit_id"])]
    pattern = unit["examples"][row["category"]][row["rank"]]["patterns"][0]
    assert pattern["keys"] == list(range(50 - ARCS_PER_PATTERN, 50))
    assert pattern["rest"] == pytest.approx(sum(weights[: 50 - ARCS_PER_PATTERN]), rel=1e-3)
    assert payload.index["limits"]["trimmed"] == 50 - ARCS_PER_PATTERN


def test_preview_says_what_a_unit_fires_on(atlas, payload):
    vocab, units, place = payload.index["vocab"], payload.index["units"], place_of(payload, "lorsa.12.5")
    rows = atlas.sql("select * from examples where unit_id = 'lorsa.12.5' and category = 'top'")
    fired = {visible(row["tokens"][row["position"] - row["start"]]) for row in rows}
    assert {vocab[place] for place in units["fires"][place]} == fired
    raised = atlas.sql("select raised from units where unit_id = 'lorsa.12.5'")[0]["raised"]
    assert [vocab[place] for place in units["raises"][place]] == [visible(effect["token"]) for effect in raised]


def test_missing_numbers_stay_missing(payload):
    units = payload.index["units"]
    dead = units["dead"].index(True)
    assert units["max_activation"][dead] is None
    assert units["host"][dead] is None
    assert not units["spans"][dead]
    assert details(payload)[dead]["examples"] == {"top": [], "quantile": [], "negative": []}


def test_a_small_limit_leaves_examples_out_and_says_so(atlas, atlas_path, tmp_path):
    whole = write_page(atlas_path, tmp_path / "whole.html").stat().st_size
    small = write_page(atlas_path, tmp_path / "small.html", max_megabytes=(whole - 40_000) / 1e6)
    assert small.stat().st_size < whole - 40_000
    limits = index_of(small)["limits"]
    assert limits["examples"] < 16 and limits["held"] == {"top": 16, "quantile": 8, "negative": 8}
    assert index_of(tmp_path / "whole.html")["limits"]["examples"] is None


def test_a_limit_that_cannot_be_met_is_refused(atlas_path, tmp_path):
    with pytest.raises(ClearheadError, match=r"max_megabytes=0\.1; raise it"):
        write_page(atlas_path, tmp_path / "page.html", max_megabytes=0.1)
    assert not (tmp_path / "page.html").exists()


def test_page_has_no_element_made_of_a_token(page_path):
    html = page_path.read_text(encoding="utf-8")
    assert html.count("<script") == html.count("</script>")
    assert html.count('<script type="module">') == 1
    assert "alert(1)</script>" not in html and "<img" not in html
    assert 'content="default-src &#39;none&#39;; script-src &#39;sha256-' in html
    assert "'unsafe-inline'" not in html.split("style-src")[0]


def test_page_is_the_same_each_time(atlas_path, page_path, tmp_path):
    assert write_page(atlas_path, tmp_path / "again.html").read_bytes() == page_path.read_bytes()


def test_empty_atlas_is_refused(tmp_path):
    with AtlasWriter(tmp_path / "atlas", about={"model": "none"}):
        pass
    with pytest.raises(ClearheadError, match="holds no units; run `clearhead analyze`"):
        write_page(tmp_path / "atlas", tmp_path / "page.html")


def test_texts_that_contradict_each_other_are_refused(tmp_path, atlas_path):
    altered = alter(atlas_path, tmp_path, "examples", 3, tokens=["other"] * 64)
    with pytest.raises(CorruptFileError, match="two examples show different tokens at position"):
        write_page(altered, tmp_path / "page.html")


def test_unknown_category_is_refused(tmp_path, atlas_path):
    altered = alter(atlas_path, tmp_path, "examples", 3, category="best")
    with pytest.raises(CorruptFileError, match="unknown category 'best'"):
        write_page(altered, tmp_path / "page.html")


def test_a_unit_with_nothing_but_its_name_has_a_page(tmp_path):
    with AtlasWriter(tmp_path / "atlas", about={}) as writer:
        writer.append("units", {"unit_id": ["edge.1"], "kind": ["edge"]})
    index = index_of(write_page(tmp_path / "atlas", tmp_path / "page.html"))
    assert index["units"]["id"] == ["edge.1"]
    assert index["units"]["rate"] == [None]
    assert index["summaries"] == []
