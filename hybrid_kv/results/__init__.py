"""Append-only rows of measurements: one schema, and no timing without proof that its result was right.

`schema` has the columns, `row` one measurement, `origin` where it comes from, `append` and `read` the lines of a CSV,
`dataset` the same rows as Parquet, `store` the table that both are asked as, `check` what is wrong with a file, `view`
what people choose and see.
"""

from hybrid_kv.results.append import append_rows, check_writable
from hybrid_kv.results.check import check_file
from hybrid_kv.results.origin import NO_HEAD, Head, Provenance, Told, head, provenance
from hybrid_kv.results.row import Receipt, Row, metric_key, timing_row
from hybrid_kv.results.schema import COLUMNS, SCHEMA, TIME_UNITS, UNITS
from hybrid_kv.results.store import read_beside, read_rows

__all__ = [
    "COLUMNS",
    "NO_HEAD",
    "SCHEMA",
    "TIME_UNITS",
    "UNITS",
    "Head",
    "Provenance",
    "Receipt",
    "Row",
    "Told",
    "append_rows",
    "check_file",
    "check_writable",
    "head",
    "metric_key",
    "provenance",
    "read_beside",
    "read_rows",
    "timing_row",
]
