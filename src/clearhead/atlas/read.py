"""Read an atlas: DuckDB over its parquet files.

    atlas = Atlas("runs/x/atlas")
    atlas.sql("select unit_id, rate from units where kind = ? order by rate desc limit 5", ["lorsa"])

Rows come back as dictionaries of plain Python values. Nothing is written, and a directory that is missing, damaged
or made by a newer clearhead is refused with the reason before any query runs.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from clearhead.atlas.schema import SCHEMA_VERSION, SINCE, TABLES, arrow_schema
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError, nearest
from clearhead.runs import read_json
from clearhead.units.graph import Graph

Row = dict[str, Any]


class Atlas:
    """The tables of one atlas directory.

    `about` holds `atlas.json`: schema version, time, model, text, seed, versions. Raises `ClearheadError` when there
    is no atlas at `path` or a newer clearhead wrote it, `CorruptFileError` when a file is missing or damaged.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not (self.path / "atlas.json").is_file():
            raise ClearheadError(_missing(self.path))
        self.about: dict[str, Any] = read_json(self.path / "atlas.json")
        _check_version(self.path, self.about)
        self._connection = duckdb.connect(":memory:")
        for table in TABLES:
            file = self.path / f"{table}.parquet"
            if self.about["schema"] < SINCE.get(table, 1):
                self._connection.from_arrow(arrow_schema(table).empty_table()).create_view(table)
                continue
            _check_columns(file, table)
            self._connection.read_parquet(_literal(file)).create_view(table)

    def __repr__(self) -> str:
        return f"Atlas({str(self.path)!r})"

    def sql(self, query: str, params: Sequence[Any] = ()) -> list[Row]:
        """Rows of a DuckDB query over the tables; `?` in the query stands for the parameters in turn.

        Raises `ClearheadError` with DuckDB's own words when the query is wrong, `CorruptFileError` when a data page
        cannot be read.
        """
        try:
            # a cursor of its own lets several threads of a server read at once
            cursor = self._connection.cursor().execute(query, list(params))
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        except (duckdb.ProgrammingError, duckdb.DataError, duckdb.NotSupportedError) as error:
            raise ClearheadError(f"the query {query!r} failed: {error}") from error
        except duckdb.Error as error:
            raise CorruptFileError(f"{self.path} could not be read ({error}); run the analysis again") from error

    def units(self, kind: str | None = None) -> list[Row]:
        """All units, or those of one kind, by layer and index; raises `UnknownNameError` for a kind not here."""
        order = " order by kind, layer, index"
        if kind is None:
            return self.sql("select * from units" + order)
        rows = self.sql("select * from units where kind = ?" + order, [kind])
        if not rows:
            kinds = [row["kind"] for row in self.sql("select distinct kind from units")]
            raise UnknownNameError("kind of unit in this atlas", kind, kinds)
        return rows

    def unit(self, unit_id: str) -> Row:
        """One unit; raises `UnknownNameError` naming the nearest id when it is not in the atlas."""
        rows = self.sql("select * from units where unit_id = ?", [unit_id])
        if not rows:
            self._refuse_unit(unit_id)
        return rows[0]

    def examples(self, unit_id: str, category: str | None = None) -> list[Row]:
        """Examples of a unit, strongest first within each category; an empty list for a dead unit."""
        self.unit(unit_id)
        return self.sql(
            "select * from examples where unit_id = $1 and ($2 is null or category = $2) "
            "order by category = 'negative', category = 'quantile', rank",
            [unit_id, category],
        )

    def patterns(self, unit_id: str) -> list[Row]:
        """Z patterns of a unit's examples, by example."""
        self.unit(unit_id)
        return self.sql("select * from patterns where unit_id = ? order by example_id", [unit_id])

    def layers(self) -> dict[tuple[int, str], dict[str, float]]:
        """Metrics by (layer, kind of unit)."""
        metrics: dict[tuple[int, str], dict[str, float]] = {}
        for row in self.sql("select * from layers order by layer, kind"):
            metrics.setdefault((row["layer"], row["kind"]), {})[row["metric"]] = row["value"]
        return metrics

    def graph(self, graph_id: str) -> Graph:
        """One graph; raises `UnknownNameError` when it is not in the atlas."""
        rows = self.sql("select * from graphs where graph_id = ?", [graph_id])
        if not rows:
            known = [row["graph_id"] for row in self.sql("select graph_id from graphs")]
            raise UnknownNameError("graph in this atlas", graph_id, known)
        entries = {name: value for name, value in rows[0].items() if name != "graph_id"}
        return Graph.from_dict({**entries, "provenance": json.loads(rows[0]["provenance"]), "format": 1})

    def _refuse_unit(self, unit_id: str) -> None:
        known = [row["unit_id"] for row in self.sql("select unit_id from units order by kind, layer, index")]
        raise UnknownNameError("unit in this atlas", unit_id, known)


def _missing(path: Path) -> str:
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, siblings)
        return f"there is no directory {path}" + (f"; did you mean {path.parent / near}?" if near else "")
    return f"{path} is not an atlas: it holds no atlas.json. `clearhead analyze` writes one"


def _check_version(path: Path, about: Any) -> None:
    version = about.get("schema") if isinstance(about, dict) else None
    if not isinstance(version, int):
        raise CorruptFileError(f"{path / 'atlas.json'} states no schema version; run the analysis again")
    if version > SCHEMA_VERSION:
        raise ClearheadError(
            f"{path} has schema version {version}; this clearhead reads versions up to {SCHEMA_VERSION}. Update with "
            f"`pip install -U clearhead`"
        )


def _check_columns(file: Path, table: str) -> None:
    if not file.is_file():
        raise CorruptFileError(f"the atlas lacks {file}; restore it or run the analysis again")
    try:
        found = pq.read_schema(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise CorruptFileError(f"{file} is damaged ({error}); restore it or run the analysis again") from error
    expected = arrow_schema(table)
    if not found.equals(expected):
        wrong = sorted(set(map(str, expected)) ^ set(map(str, found)))
        raise CorruptFileError(f"{file} does not have the columns of table {table!r}; these differ: {', '.join(wrong)}")


def _literal(file: Path) -> str:
    """The path with glob characters quoted, for DuckDB reads patterns where it is given a file name."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in str(file))
