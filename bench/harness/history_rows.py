"""asv's results of a machine as rows of the data set `results/history.parquet`, which git keeps.

A case is the same as that of `python -m bench` but for `by: asv`, so that no line is drawn through
both: asv resets before each sample. A time is that of one call.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Collection, Iterator
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from asv.results import Results, iter_results_for_machine

from bench.harness.asv_classes import Compared, Timed
from bench.harness.cells import Cell
from hybrid_kv.measure.results import Receipt, Row, append_rows, timing_row
from hybrid_kv.measure.results.dataset import export_rows, merge_rows
from hybrid_kv.measure.timing.case import ENGINE

RESULTS = Path(__file__).resolve().parents[2] / "results"
ASV_RESULTS = RESULTS / "asv"
DATA_SET = RESULTS / "history.parquet"
CHECKED = Receipt(
    checked_before=True, checked_after=True, max_error=None
)  # or asv would have no result


def keep_rows(machine: str, commits: Collection[str]) -> int:
    """Add what asv has measured of these commits on a machine to the data set.

    Return how many rows they have.
    """
    count = 0
    with TemporaryDirectory() as folder:
        file = Path(folder) / "history.csv"
        for result in iter_results_for_machine(str(ASV_RESULTS), machine):
            if result.commit_hash not in commits:
                continue
            rows = [row for name in result.get_all_result_keys() for row in rows_of(result, name)]
            append_rows(file, rows, **origin(result, machine))
            count += len(rows)
        if count:
            keep = merge_rows if DATA_SET.exists() else export_rows
            keep([file], DATA_SET)
    return count


def origin(result: Results, machine: str) -> dict[str, object]:
    """Return the columns that say of a row when and at which commit it was measured."""
    last = max(result.started_at.values()) / 1000
    moment = datetime.fromtimestamp(last, timezone.utc)
    return {
        "run_id": hashlib.sha1(f"asv {machine} {result.commit_hash}".encode()).hexdigest()[:12],
        "commit": result.commit_hash,
        "dirty": False,
        "time_utc": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def rows_of(result: Results, name: str) -> Iterator[Row]:
    """Yield a row for each set of parameters that a benchmark has a value of.

    The benchmark's name is `SUITE.CLASS.METHOD`.
    """
    suite, class_name, method = name.split(".")
    benchmark = getattr(importlib.import_module(f"bench.asv_suite.{suite}"), class_name)
    values = result.get_result_value(name, result.get_result_params(name))
    for cell, value in zip(cells_of(benchmark), values, strict=True):
        if value is not None and math.isfinite(value):
            yield row_of(benchmark, method, cell, value)


def cells_of(benchmark: Any) -> list[Cell]:
    """Return the cells of a class in asv's order."""
    return [benchmark.grid.cell(*values) for values in product(*benchmark.params)]


def row_of(benchmark: Any, method: str, cell: Cell, value: float) -> Row:
    """Return the row of one value that asv has."""
    names = {
        "suite": cell.suite,
        "benchmark": cell.benchmark,
        "params": {**cell.params, "by": "asv"},
    }
    if issubclass(benchmark, Timed):
        metric = "gpu_time" if method.endswith("_sync") else "cpu_time"
        call = 1e9 * value / benchmark.calls
        return timing_row(
            receipt=CHECKED, metric=metric, value=call, unit="ns", better="lower", **names
        )
    if issubclass(benchmark, Compared):
        metric = f"ratio_to_{ENGINE}"
        return timing_row(
            receipt=CHECKED, metric=metric, value=value, unit="time ratio", better="higher", **names
        )
    metric = method.removeprefix("track_")
    count = cell.make()[metric]
    return Row(metric=metric, value=value, unit=count.unit, better=count.better, **names)
