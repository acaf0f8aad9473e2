"""Append-only rows of measurements: one schema, and no timing without proof of its result.

`schema` has the columns, `row` one measurement, `origin` its commit and machine, `append` and
`read` the lines of a CSV, `dataset` the same rows as Parquet, `store` one table of both, `check`
the faults of a file, `view` selection and printing.

`schema` has the columns, `row` one measurement, `origin` where it comes from, `append` and `read`
the lines of a CSV, `dataset` the same rows as Parquet, `store` one table of both, `check` what is
wrong with a file, `view` what is selected and printed.
"""

from hybrid_kv.measure.results.append import append_rows, check_writable
from hybrid_kv.measure.results.check import check_file
from hybrid_kv.measure.results.origin import NO_HEAD, CommitInfo, Head, Provenance, head, provenance
from hybrid_kv.measure.results.row import Receipt, Row, metric_key, timing_row
from hybrid_kv.measure.results.schema import COLUMNS, TIME_UNITS, UNITS
from hybrid_kv.measure.results.store import read_beside, read_rows

__all__ = [
    "COLUMNS",
    "NO_HEAD",
    "TIME_UNITS",
    "UNITS",
    "CommitInfo",
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
    "read_beside",
    "read_rows",
    "timing_row",
]
