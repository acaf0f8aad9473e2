"""Rows that fit the schema, and files of them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from hybrid_kv.measure.results import COLUMNS, Receipt, Row, append_rows, timing_row

ROW = Row(suite="guard", benchmark="b", metric="held_blocks", value=3, params={"b": 1, "a": [2, 3]})
PROOF = Receipt(checked_before=True, checked_after=True, max_error=0.0)
GOOD = [
    ROW,
    timing_row(
        suite="s",
        benchmark="b",
        metric="t",
        value=2.0,
        unit="us",
        ci_low=1.0,
        ci_high=3.0,
        receipt=PROOF,
    ),
]
RECEIPT = '{"receipt":{"checked_after":true,"checked_before":true,"max_error":0.0}}'


def damaged(path: Path, line: int, **changes: str) -> Path:
    """A good file in which fields of a line are others."""
    append_rows(path, GOOD)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[line - 2] |= changes
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(text.getvalue())
    return path
