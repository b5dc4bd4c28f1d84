"""Results on disk: parquet tables written whole, read through DuckDB. Pages read nothing else."""

from clearhead.atlas.read import Atlas
from clearhead.atlas.schema import SCHEMA_VERSION, TABLES
from clearhead.atlas.write import AtlasWriter, add_tables

__all__ = ["SCHEMA_VERSION", "TABLES", "Atlas", "AtlasWriter", "add_tables"]
