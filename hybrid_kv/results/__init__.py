"""Append-only rows of measurements: one CSV, one schema, and no timing without proof that its result was right.

`schema` has the columns, `row` one measurement, `origin` where it comes from, `append` and `read` the files, `view`
what people choose and see of them.
"""

from hybrid_kv.results.append import append_rows, check_writable
from hybrid_kv.results.origin import NO_HEAD, Head, Provenance, head, provenance
from hybrid_kv.results.read import check_file, read_rows
from hybrid_kv.results.row import Receipt, Row, metric_key, timing_row
from hybrid_kv.results.schema import COLUMNS, SCHEMA, TIME_UNITS, UNITS

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
    "append_rows",
    "check_file",
    "check_writable",
    "head",
    "metric_key",
    "provenance",
    "read_rows",
    "timing_row",
]
