"""Pages and atlases on disk: the index of a written page, and copies of an atlas with something in them changed."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq


def index_of(page):
    (found,) = re.findall(r'<script type="application/json" id="index">(.*?)</script>', page.read_text(), flags=re.S)
    return json.loads(found)


def alter(atlas_path, tmp_path, table, row, **values):
    """A copy of the atlas with some values of one row of one table replaced."""
    copy = tmp_path / "altered"
    copy.mkdir()
    for file in atlas_path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    rows = pq.read_table(copy / f"{table}.parquet")
    listed = rows.to_pylist()
    listed[row] |= values
    pq.write_table(pa.Table.from_pylist(listed, schema=rows.schema), copy / f"{table}.parquet")
    return copy
