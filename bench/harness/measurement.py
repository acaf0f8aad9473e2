"""Cells to numbers with receipts: what `python -m bench` prints and `results/` keeps.

Rivals, cells that differ in the parameter `subject` alone, are timed interleaved and compared with
the engine, round by round. Every case is checked before and after it is timed; what is wrong has no
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.harness.cells import Cell, Counts
from hybrid_kv.measure.results import Receipt, Row, timing_row
from hybrid_kv.measure.timing.case import ENGINE
from hybrid_kv.measure.timing.clock import DeviceSubject, Interval, Subject, median, ratio
from hybrid_kv.measure.timing.together import time_together

ROUNDS, QUICK_ROUNDS = 25, 15
METRICS = {"cpu": "cpu_time", "gpu": "gpu_time"}


def interval_row(found: Interval, metric: str, unit: str, better: str, **more: Any) -> Row:
    """See `timing_row`; rounding leaves the value inside of its interval."""
    value = sorted((found.low, found.value, found.high))[1]
    values = {"value": value, "ci_low": found.low, "ci_high": found.high}
    return timing_row(metric=metric, unit=unit, better=better, **values, **more)


@dataclass(frozen=True)
class Measurement:
    """The time of one cell, in seconds, and how many times as long as the engine it takes."""

    cell: Cell
    time: Interval
    ratio: Interval | None
    rounds: int
    receipt: Receipt

    @property
    def verdict(self) -> str:
        """Return `fail` if the whole interval lies below what the cell promises."""
        if not self.cell.promise or self.ratio is None:
            return ""
        return "fail" if self.ratio.high < self.cell.promise else "pass"

    def rows(self) -> Iterator[Row]:
        """Yield the rows for `hybrid_kv.measure.results`."""
        cell = self.cell
        common = {
            "suite": cell.suite,
            "benchmark": cell.benchmark,
            "params": cell.params,
            "n": self.rounds,
        }
        row = partial(interval_row, receipt=self.receipt, **common)
        ns = Interval(
            *(1e9 * seconds for seconds in (self.time.value, self.time.low, self.time.high))
        )
        yield row(ns, METRICS[cell.tier], "ns", "lower")
        if self.ratio is not None and self.cell.promise != 0:
            yield row(
                self.ratio, f"ratio_to_{ENGINE}", "time ratio", "higher", verdict=self.verdict
            )


@dataclass(frozen=True)
class Counted:
    """The exact numbers of one cell."""

    cell: Cell
    counts: Counts

    def rows(self) -> Iterator[Row]:
        """Yield the rows for `hybrid_kv.measure.results`."""
        for metric, count in self.counts.items():
            where = self.cell.suite, self.cell.benchmark
            yield Row(
                *where, metric, count.value, count.unit, self.cell.params, better=count.better
            )


def runs_here(cell: Cell) -> bool:
    """Return whether this machine has what the cell's tier needs."""
    return cell.tier != "gpu" or torch.cuda.is_available()


def kind_of(cell: Cell) -> type[Subject]:
    """Return how to sample: the host's time of a CPU cell, the device's of a GPU cell."""
    return DeviceSubject if cell.tier == "gpu" else Subject


def groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Return cells that are measured together: rivals and their engine, or one cell alone."""
    found: dict[Any, list[Cell]] = {}
    for cell in cells:
        rest = tuple(item for item in cell.params.items() if item[0] != "subject")
        found.setdefault((cell.suite, cell.benchmark, cell.tier, rest), []).append(cell)
    return list(found.values())


def measure_together(
    cells: Sequence[Cell], rounds: int = ROUNDS
) -> list[Measurement] | list[Counted]:
    """Measure one of `groups`.

    Raises:
        WrongResultError: a result is wrong, before or after the timing; no cell of the group has a
            time then.
    """
    if cells[0].tier == "count":
        return [Counted(cell, cell.make()) for cell in cells]
    own = {cell.key: cell for cell in cells}
    rivals = {key for key, cell in own.items() if cell.params.get("subject", ENGINE) != ENGINE}
    timed = time_together(
        {key: cell.make() for key, cell in own.items()}, rounds, kind_of(cells[0])
    )
    engine = next((timed[key].samples for key in own.keys() - rivals), None)
    return [
        Measurement(
            cell,
            median(timed[key].samples),
            ratio(timed[key].samples, engine) if key in rivals and engine is not None else None,
            len(timed[key].samples),
            Receipt(checked_before=True, checked_after=True, max_error=timed[key].error),
        )
        for key, cell in own.items()
    ]
