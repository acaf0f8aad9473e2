"""Odd cells in a CSV: drawn, or refused in one line; never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.figures import BLOCKS
from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.dashboard.data import load
from hybrid_kv.measure.dashboard.report import Report
from hybrid_kv.measure.dashboard.sections import SECTIONS
from hybrid_kv.measure.results import COLUMNS
from tests.measure.dashboard.html import comment_of
from tests.measure.dashboard.kinds import everything, swarms
from tests.measure.dashboard.rows import write

ROWS = [*everything(), *swarms()]
SUITES = sorted({one["suite"] for one in ROWS})
CELLS = [
    "",
    " ",
    "0",
    "-0",
    "-1",
    "1e308",
    "-1e308",
    "1e-320",
    "nan",
    "inf",
    "1e999",
    "9" * 18,
    "9" * 19,
    "9" * 400,
]
CELLS += [
    "True",
    "true",
    "pass",
    "passed",
    "void",
    "fail",
    "ns",
    "s",
    "GB/s",
    "time ratio",
    "parsecs",
    "share",
    "B",
]
CELLS += [
    "2000-01-01T00:00:00Z",
    "2199-12-31T23:59:59Z",
    "0001-01-01T00:00:00Z",
    "2026-02-30T00:00:00Z",
    "now",
]
CELLS += ["{}", "[]", "[" * 9999, '{"a":' * 30 + "1" + "}" * 30, '{"K":NaN}']
CELLS += ["a,b", 'a"b', "a\r", "\x1b[31m", "é", "\0"]
CELLS += [
    "gpu",
    "guard",
    "kernels",
    "compare",
    "accuracy",
    "answers",
    "expand",
    "step",
    "any benchmark",
    "bytes",
]
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    3,
    2**63 - 1,
    2**63,
    1.5,
    -0.0,
    1e308,
    "",
    "x",
    "K=3",
    "<b>",
    "\ud800",
    [],
    [1],
    {},
]
VALUES += [{"a": 1}, "slots", "recompute", "engine", "device"]


@st.composite
def odd_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The rows of a suite, some of their cells and params odd."""
    suite = draw(st.sampled_from(SUITES))
    rows = [dict(one) for one in ROWS if one["suite"] == suite][:30]
    for _ in range(draw(st.integers(1, 6))):
        one = draw(st.sampled_from(rows))
        if draw(st.booleans()):
            one[draw(st.sampled_from(COLUMNS))] = draw(st.sampled_from(CELLS))
            continue
        try:
            params = json.loads(one["params"])
        except (ValueError, RecursionError):
            continue
        if isinstance(params, dict):
            name = draw(st.sampled_from([*params, "new"]))
            one["params"] = json.dumps({**params, name: draw(st.sampled_from(VALUES))})
    return rows


@given(odd_rows())
@settings(max_examples=settings().max_examples // 2)  # Each draws all sections.
def test_odd_cells_are_drawn_or_refused(rows: list[dict[str, Any]]) -> None:
    with TemporaryDirectory() as folder:
        try:
            found = load(write(Path(folder), rows))
        except HybridKVError as error:
            assert "made.csv" in str(error) and "\n" not in str(error) and len(str(error)) < 500
            return
        report = Report(found)
        for section in SECTIONS:
            if made := section(report):
                (made.finding + made.body).encode()
        comment_of(found).encode()
        for block in BLOCKS.values():
            block(found)
