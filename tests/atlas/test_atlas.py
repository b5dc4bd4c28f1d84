import errno
import json
import os
import re
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clearhead.atlas import SCHEMA_VERSION, TABLES, Atlas, AtlasWriter, add_tables
from clearhead.atlas.schema import SINCE
from clearhead.errors import ClearheadError, CorruptFileError, NonFiniteError, UnknownNameError
from clearhead.units import Graph, Provenance, Unit

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "atlas-schema.md"
UNITS = {
    "unit_id": ["lorsa.1.0", "lorsa.1.1", "head.1.0"],
    "kind": ["lorsa", "lorsa", "head"],
    "layer": [1, 1, 1],
    "index": [0, 1, 0],
    "rate": [0.25, 0.0, None],
    "histogram": [[1, 2], [], None],
    "raised": [[{"token": "</script>", "token_id": 3, "logit": 0.5}], [], None],
}
EXAMPLES = {
    "example_id": [0, 1, 2],
    "unit_id": ["lorsa.1.0"] * 3,
    "category": ["negative", "top", "top"],
    "rank": [0, 1, 0],
    "activation": [0.0, 1.0, 2.0],
    "document": ["d"] * 3,
    "block": [0, 0, 1],
    "position": [1, 2, 3],
    "start": [0, 0, 0],
    "tokens": [["a", "\\xff\u202e"]] * 3,
    "token_ids": [[1, 2]] * 3,
    "activations": [[0.0, 1.0]] * 3,
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "atlas [1]"  # brackets are glob characters to DuckDB
    with AtlasWriter(path, {"model": "toy", "seed": 3}) as atlas:
        atlas.append("units", UNITS)
        atlas.append("examples", EXAMPLES)
        atlas.append_metrics(1, "lorsa", {"fvu": 0.25, "dead": False, "error_norm": [1.0, 2.0]})
    return path


def test_what_is_written_is_read(path):
    atlas = Atlas(path)
    assert atlas.about["schema"] == SCHEMA_VERSION
    assert atlas.about["model"] == "toy"
    assert atlas.about["versions"]["clearhead"]
    assert [unit["unit_id"] for unit in atlas.units()] == ["head.1.0", "lorsa.1.0", "lorsa.1.1"]
    assert [unit["unit_id"] for unit in atlas.units("head")] == ["head.1.0"]
    unit = atlas.unit("lorsa.1.0")
    assert unit["raised"] == [{"token": "</script>", "token_id": 3, "logit": 0.5}]
    assert (unit["histogram"], unit["rate"], unit["dead"]) == ([1, 2], 0.25, None)
    examples = atlas.examples("lorsa.1.0")
    assert [(e["category"], e["rank"]) for e in examples] == [("top", 0), ("top", 1), ("negative", 0)]
    assert examples[0]["tokens"] == ["a", "\\xff\u202e"]
    assert len(atlas.examples("lorsa.1.0", "negative")) == 1
    assert atlas.examples("lorsa.1.1") == atlas.patterns("lorsa.1.1") == []
    assert atlas.layers() == {(1, "lorsa"): {"fvu": 0.25, "dead": 0, "error_norm_0": 1, "error_norm_1": 2}}
    assert atlas.sql("select count(*) as n from units where rate > ?", [0.1]) == [{"n": 1}]


def test_graph_round_trip(tmp_path):
    units = [Unit("lorsa", 1, 0, 4, activation=0.5), Unit("logit", index=7, position=4)]
    graph = Graph(units, [0], [1], [-2.0], Provenance("toy", "direct effect", "a", (1, 2), {"torch": "2"}, 0))
    with AtlasWriter(tmp_path / "a", {}) as atlas:
        atlas.append_graphs([("first", graph)])
    again = Atlas(tmp_path / "a").graph("first")
    assert again.to_dict() == graph.to_dict()
    with pytest.raises(UnknownNameError, match="did you mean 'first'"):
        Atlas(tmp_path / "a").graph("frist")


def test_numpy_and_arrow_columns_agree_with_lists(tmp_path):
    ragged = pa.ListArray.from_arrays(np.array([0, 2, 2, 2], np.int32), np.array([1, 2]))
    columns = {**UNITS, "layer": np.array([1, 1, 1]), "histogram": ragged, "kind": pa.array(UNITS["kind"])}
    with AtlasWriter(tmp_path / "a", {}) as atlas:
        atlas.append("units", columns)
    assert Atlas(tmp_path / "a").unit("lorsa.1.0")["histogram"] == [1, 2]


@pytest.mark.parametrize(
    ("table", "columns", "error", "message"),
    [
        ("unit", UNITS, UnknownNameError, "did you mean 'units'"),
        ("units", {**UNITS, "layers": [1, 1, 1]}, UnknownNameError, "did you mean 'layer'"),
        ("units", {**UNITS, "rate": [0.5]}, ClearheadError, "one length"),
        ("units", {"unit_id": ["lorsa.1.0"]}, ClearheadError, "needs the column 'kind'"),
        ("units", {**UNITS, "kind": ["lorsa", None, "head"]}, ClearheadError, "may not be empty"),
        (
            "units",
            {**UNITS, "layer": ["one"] * 3},
            ClearheadError,
            "'layer' of table 'units' holds values of type int64",
        ),
        ("units", {**UNITS, "unit_id": ["\ud800"] * 3}, ClearheadError, "unit_id"),
        ("units", {**UNITS, "rate": [0.5, float("nan"), None]}, NonFiniteError, "'rate'.*1 of 2"),
        ("units", {**UNITS, "share_output": [[0.5], [np.inf], None]}, NonFiniteError, "share_output"),
        (
            "units",
            {**UNITS, "raised": [[{"token": "a", "token_id": 1, "logit": np.nan}], [], None]},
            NonFiniteError,
            "raised",
        ),
    ],
)
def test_bad_rows_are_refused_and_nothing_is_published(path, table, columns, error, message):
    before = Atlas(path).units()
    with pytest.raises(error, match=message), AtlasWriter(path, {}) as atlas:
        atlas.append(table, columns)
    assert Atlas(path).units() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_metrics_must_be_finite(tmp_path):
    with pytest.raises(NonFiniteError, match="'kl' of layer 1"), AtlasWriter(tmp_path / "a", {}) as atlas:
        atlas.append_metrics(1, "lorsa", {"fvu": 0.5, "kl": float("nan")})
    assert not (tmp_path / "a").exists()


def test_an_atlas_is_replaced_whole(path):
    with AtlasWriter(path, {"model": "other"}):
        pass
    atlas = Atlas(path)
    assert (atlas.about["model"], atlas.units()) == ("other", [])
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_directory_that_is_not_an_atlas_is_kept(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "only_copy.txt").write_text("x")
    with pytest.raises(ClearheadError, match="is not an atlas"), AtlasWriter(tmp_path / "thesis", {}):
        pass
    assert (tmp_path / "thesis" / "only_copy.txt").read_text() == "x"


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_named_and_loses_nothing(path, monkeypatch, full):
    def refuse(*_, **__):
        raise OSError(full, os.strerror(full))

    with pytest.raises(ClearheadError, match="no space left on the disk"), AtlasWriter(path, {}) as atlas:
        monkeypatch.setattr(pq.ParquetWriter, "write_table", refuse)
        atlas.append("units", UNITS)
    assert len(Atlas(path).units()) == 3


def test_unknown_names_are_answered_with_near_ones(path):
    atlas = Atlas(path)
    with pytest.raises(UnknownNameError, match="unknown unit in this atlas 'lorsa.1.9'; did you mean 'lorsa.1"):
        atlas.unit("lorsa.1.9")
    with pytest.raises(UnknownNameError, match="lorsa.1.9"):
        atlas.examples("lorsa.1.9")
    with pytest.raises(UnknownNameError, match="did you mean 'lorsa'"):
        atlas.units("lorsas")
    with pytest.raises(ClearheadError, match="unitz"):
        atlas.sql("select * from unitz")
    with pytest.raises(ClearheadError, match=r"no directory .*did you mean .*atlas \[1\]"):
        Atlas(path.with_name("atlas [2]"))
    with pytest.raises(ClearheadError, match="is not an atlas"):
        Atlas(path.parent)


def test_newer_and_damaged_atlases_are_refused(path):
    about = json.loads((path / "atlas.json").read_text())
    (path / "atlas.json").write_text(json.dumps({**about, "schema": SCHEMA_VERSION + 1}))
    with pytest.raises(
        ClearheadError,
        match=f"schema version {SCHEMA_VERSION + 1}; this clearhead reads versions up to {SCHEMA_VERSION}",
    ):
        Atlas(path)
    (path / "atlas.json").write_text(json.dumps({"model": "toy"}))
    with pytest.raises(CorruptFileError, match="states no schema version"):
        Atlas(path)
    (path / "atlas.json").write_text("{")
    with pytest.raises(CorruptFileError, match="not valid JSON"):
        Atlas(path)


def test_damaged_tables_are_refused(path):
    whole = (path / "units.parquet").read_bytes()
    (path / "units.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptFileError, match=r"units.parquet is damaged"):
        Atlas(path)
    pq.write_table(pa.table({"unit_id": ["a"]}), path / "units.parquet")
    with pytest.raises(CorruptFileError, match=r"does not have the columns of table 'units'.*histogram"):
        Atlas(path)
    (path / "units.parquet").unlink()
    with pytest.raises(CorruptFileError, match=r"lacks .*units.parquet"):
        Atlas(path)


def test_a_damaged_data_page_is_refused_at_the_query(path):
    whole = bytearray((path / "examples.parquet").read_bytes())
    whole[8:200] = b"\x00" * 192
    (path / "examples.parquet").write_bytes(whole)
    with pytest.raises(CorruptFileError, match="could not be read"):
        Atlas(path).sql("select * from examples")


def test_other_programs_can_read_the_tables(path):
    with duckdb.connect(":memory:") as connection:
        file = str(path / "units.parquet").replace("[", "[[]")
        assert connection.read_parquet(file).aggregate("count(*)").fetchall() == [(3,)]
    assert pq.read_schema(path / "units.parquet").metadata[b"clearhead_schema"] == str(SCHEMA_VERSION).encode()


def test_an_atlas_from_before_the_spectral_tables_reads_as_if_they_were_empty(path):
    about = json.loads((path / "atlas.json").read_text())
    for table in SINCE:
        (path / f"{table}.parquet").unlink()
    with pytest.raises(CorruptFileError, match="lacks"):
        Atlas(path)
    (path / "atlas.json").write_text(json.dumps({**about, "schema": 1}))
    atlas = Atlas(path)
    assert atlas.sql("select * from spectra") == [] and len(atlas.units()) == 3


def test_reference_lists_exactly_the_columns():
    text = REFERENCE.read_text(encoding="utf-8")
    assert f"Schema version {SCHEMA_VERSION}" in text
    documented = {}
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        title = section.splitlines()[0].strip("`")
        rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.*?) \| (.+) \|$", section, flags=re.M)
        if rows:
            documented[title] = rows
    expected = {
        table: [(c.name, str(c.type).replace("item: ", ""), "yes" if c.optional else "", c.meaning) for c in columns]
        for table, columns in TABLES.items()
    }
    assert documented == expected


def test_tables_are_added_to_an_atlas_that_keeps_the_others(path):
    before = Atlas(path)
    units, examples = before.units(), before.examples("lorsa.1.0")
    row = {"unit_id": ["lorsa.1.0"], "measure": ["explained"], "value": [0.5], "cases": [3]}
    add_tables(path, {"trust": [row, {**row, "unit_id": ["lorsa.1.1"]}]})
    after = Atlas(path)
    assert (after.units(), after.examples("lorsa.1.0")) == (units, examples)
    assert [r["unit_id"] for r in after.sql("select * from trust")] == ["lorsa.1.0", "lorsa.1.1"]
    assert after.about["model"] == "toy"
    add_tables(path, {"trust": [row]})
    assert len(Atlas(path).sql("select * from trust")) == 1
    with pytest.raises(UnknownNameError, match="atlas table"):
        add_tables(path, {"thrust": [row]})
    assert len(Atlas(path).sql("select * from trust")) == 1


def test_an_older_atlas_becomes_a_new_one_when_tables_are_added(path):
    about = json.loads((path / "atlas.json").read_text())
    (path / "atlas.json").write_text(json.dumps({**about, "schema": 2}))
    for table in ("behaviours", "trust"):
        (path / f"{table}.parquet").unlink()
    add_tables(path, {"trust": [{"unit_id": ["lorsa.1.0"], "measure": ["x"], "value": [1.0], "cases": [1]}]})
    after = Atlas(path)
    assert after.about["schema"] == SCHEMA_VERSION
    assert (len(after.units()), after.sql("select * from behaviours")) == (3, [])
