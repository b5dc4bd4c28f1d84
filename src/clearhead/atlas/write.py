"""Write an atlas: all of its tables or none of them.

Tables are written into a directory beside the target, which takes the target's name only when every table is
complete and on the disk. A killed run or a full disk leaves an earlier atlas as it was. Rows are checked against
`schema.TABLES` on the way: unknown or missing columns, wrong types, NaN and infinity are refused.
"""

import contextlib
import datetime
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clearhead.atlas.read import Atlas
from clearhead.atlas.schema import SCHEMA_VERSION, SINCE, TABLES, arrow_schema
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from clearhead.hub import NO_ROOM
from clearhead.runs import environment, write_json
from clearhead.units.graph import Graph

ROWS_PER_GROUP = 16_384
"""Rows per parquet row group: small enough that one unit's rows are found without reading the whole file."""


class AtlasWriter:
    """Context manager that collects rows and publishes the directory on a clean exit.

    `about` becomes `atlas.json`, with schema version, time and versions added. Tables nobody appended to are
    written empty. Raises `ClearheadError` when `path` exists and is not an atlas, and when the disk is full.

        with AtlasWriter("runs/x/atlas", about={"model": "smollm2", ...}) as atlas:
            atlas.append("units", {"unit_id": ["head.5.3"], "kind": ["head"]})
    """

    def __init__(self, path: str | Path, about: Mapping[str, Any]):
        self.path = Path(path)
        self.about = dict(about)
        self._aside = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        self._writers: dict[str, pq.ParquetWriter] = {}

    def __enter__(self) -> Self:
        if self.path.exists() and not (self.path / "atlas.json").exists():
            raise ClearheadError(
                f"{self.path} exists and is not an atlas; nothing was written. Name a directory that does not exist "
                f"yet, or an atlas to replace"
            )
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)
        for table in TABLES:
            self._writers[table] = pq.ParquetWriter(
                self._aside / f"{table}.parquet", arrow_schema(table), compression="zstd"
            )
        return self

    def append(self, table: str, columns: Mapping[str, Any]) -> None:
        """Add rows given as columns of equal length: lists, numpy arrays or pyarrow arrays.

        Optional columns may be left out. Raises `UnknownNameError` for a table or column that does not exist,
        `ClearheadError` for missing columns, empty cells where a value is required or values of the wrong type,
        `NonFiniteError` for NaN and infinity.
        """
        if table not in TABLES:
            raise UnknownNameError("atlas table", table, TABLES)
        known = [column.name for column in TABLES[table]]
        for name in columns:
            if name not in known:
                raise UnknownNameError(f"column of table {table!r}", name, known)
        lengths = {len(values) for values in columns.values()}
        if len(lengths) != 1:
            raise ClearheadError(f"the columns of table {table!r} must have one length; got {sorted(lengths)}")
        n = lengths.pop()
        arrays = []
        for column in TABLES[table]:
            if column.name in columns:
                arrays.append(_array(table, column.name, columns[column.name], column.type))
            elif column.optional:
                arrays.append(pa.nulls(n, column.type))
            else:
                raise ClearheadError(f"table {table!r} needs the column {column.name!r}: {column.meaning}")
            if not column.optional and arrays[-1].null_count:
                raise ClearheadError(f"column {column.name!r} of table {table!r} may not be empty in any row")
        with _full_disk_explained(self.path):
            self._writers[table].write_table(
                pa.Table.from_arrays(arrays, schema=arrow_schema(table)), row_group_size=ROWS_PER_GROUP
            )

    def copy(self, table: str, file: Path) -> None:
        """Add all rows of another atlas' file of this table."""
        with _full_disk_explained(self.path):
            for batch in pq.ParquetFile(file).iter_batches(ROWS_PER_GROUP):
                rows = pa.Table.from_batches([batch]).cast(arrow_schema(table))
                self._writers[table].write_table(rows, row_group_size=ROWS_PER_GROUP)

    def append_graphs(self, graphs: Iterable[tuple[str, Graph]]) -> None:
        """Add graphs under their names; raises `ClearheadError` for one with more than units and edges to keep."""
        rows: dict[str, list[Any]] = {column.name: [] for column in TABLES["graphs"]}
        for name, graph in graphs:
            if graph.annotated:
                raise ClearheadError(
                    f"graph {name!r} has {', '.join(graph.annotated)}, for which an atlas has no columns; keep it as a "
                    f"folder of its own (save_graph)"
                )
            entries = {**graph.to_dict(), "graph_id": name}
            entries["provenance"] = json.dumps(entries["provenance"], ensure_ascii=False)
            for column in rows:
                rows[column].append(entries[column])
        self.append("graphs", rows)

    def append_metrics(self, layer: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Add one layer's metrics to `layers`; entry i of a list becomes `NAME_i`."""
        flat: dict[str, float] = {}
        for name, value in metrics.items():
            if isinstance(value, list | tuple):
                flat |= {f"{name}_{i}": float(part) for i, part in enumerate(value)}
            else:
                flat[name] = float(value)
        bad = [name for name, value in flat.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteError(f"metric {bad[0]!r} of layer {layer} is {flat[bad[0]]}")
        n = len(flat)
        if n:
            self.append(
                "layers",
                {"layer": [layer] * n, "kind": [kind] * n, "metric": list(flat), "value": list(flat.values())},
            )

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        try:
            with _full_disk_explained(self.path):
                for writer in self._writers.values():
                    writer.close()
                if failure is None:
                    self._publish()
        finally:
            shutil.rmtree(self._aside, ignore_errors=True)

    def _publish(self) -> None:
        env = environment()
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        own = {"schema": SCHEMA_VERSION, "created": created, "versions": env.pop("versions"), "environment": env}
        write_json(self._aside / "atlas.json", {**own, **self.about, **own})
        for table in TABLES:
            with (self._aside / f"{table}.parquet").open("rb") as file:
                os.fsync(file.fileno())
        if self.path.exists():
            # a directory cannot be renamed over a full one: the old atlas steps aside and goes once the new one stands
            old = self.path.with_name(f".{self.path.name}.{os.getpid()}.old")
            self.path.rename(old)
            try:
                self._aside.rename(self.path)
            except OSError:
                old.rename(self.path)
                raise
            shutil.rmtree(old)
        else:
            self._aside.rename(self.path)


def add_tables(path: str | Path, tables: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Give an existing atlas these tables, each as parts of columns; what they held before goes, the others stay.

    All or nothing, as for `AtlasWriter`; an older atlas becomes one of this version. Raises as `Atlas` and
    `AtlasWriter.append` do.
    """
    old = Atlas(path)
    with AtlasWriter(path, old.about) as atlas:
        for table in TABLES:
            if table not in tables and SINCE.get(table, 1) <= old.about["schema"]:
                atlas.copy(table, old.path / f"{table}.parquet")
        for table, parts in tables.items():
            for columns in parts:
                atlas.append(table, columns)


def _array(table: str, name: str, values: Any, kind: pa.DataType) -> pa.Array:
    """The values as an arrow array of the column's type, refused when not finite."""
    try:
        array = values.cast(kind) if isinstance(values, pa.Array) else pa.array(values, type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, UnicodeEncodeError) as error:
        raise ClearheadError(f"column {name!r} of table {table!r} holds values of type {kind}; {error}") from error
    _refuse_non_finite(table, name, array)
    return array


def _refuse_non_finite(table: str, name: str, array: pa.Array) -> None:
    if pa.types.is_list(array.type):
        _refuse_non_finite(table, name, array.flatten())
    elif pa.types.is_struct(array.type):
        for part in array.flatten():
            _refuse_non_finite(table, name, part)
    elif pa.types.is_floating(array.type):
        finite = np.isfinite(array.drop_null().to_numpy(zero_copy_only=False))
        if not finite.all():
            raise NonFiniteError(
                f"column {name!r} of table {table!r} holds NaN or infinity ({(~finite).sum()} of {len(finite)} values)"
            )


@contextlib.contextmanager
def _full_disk_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise ClearheadError(
                f"no space left on the disk that holds {path.parent}; the atlas was not written and what was there "
                f"before is unchanged. Free some space, then repeat the command."
            ) from error
        raise
