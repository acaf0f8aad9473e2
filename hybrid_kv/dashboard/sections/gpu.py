"""What `python -m bench.gpu` measured: our kernels beside plain torch and other projects' kernels, case by case."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import pandas as pd

from hybrid_kv.dashboard.data import NO_IDENTITY, column, each, fullest_run
from hybrid_kv.dashboard.draw import table, with_small_interval
from hybrid_kv.dashboard.report import Report, Section
from hybrid_kv.dashboard.words import with_unit

PLACE = 60
SUITE = "gpu"
OURS = ("slots", "replay", "replay_step", "replay_flush", "triton")
HEAD = ["subject", "time", "bandwidth", "of a copy's", "times ours"]


def section(report: Report) -> Section | None:
    rows = report.results.of(SUITE)
    if rows.empty:
        return None
    return Section("GPU", _finding(fullest_run(rows)), report.by_machine(rows, _tables))


def _finding(rows: pd.DataFrame) -> str:
    shares = rows[(rows["metric"] == "share_of_copy") & column(rows, "subject", str).isin(OURS)]["value"]
    if shares.empty:
        return "Kernels on a GPU"
    span = dict.fromkeys(f"{100 * share:.0f}" for share in (shares.min(), shares.max()))
    return f"Our kernels move their bytes at {' to '.join(span)} % of the bandwidth of a copy"


def _tables(rows: pd.DataFrame) -> str:
    """A folded table per benchmark, of the fullest run."""
    found = []
    for benchmark, own in fullest_run(rows).groupby("benchmark", sort=False):
        found.append(f"<details><summary>{escape(str(benchmark))}</summary>{table(HEAD, list(_lines(own)))}</details>")
    return "".join(found)


def _lines(rows: pd.DataFrame) -> Iterator[list[str]]:
    """A line per case and subject, in the order in which they were measured."""
    figures: dict[tuple[str, str], dict[str, Any]] = {}
    for row in each(rows):
        apart = {*NO_IDENTITY, "subject", "launch"}
        case = ", ".join(f"{name}={value}" for name, value in sorted(row.parsed.items()) if name not in apart)
        eager = " (eager)" if row.parsed.get("launch") == "eager" else ""
        metric = "ratio" if row.metric.startswith("ratio_to_") else row.metric
        figures.setdefault((case, f"{row.parsed.get('subject', '')}{eager}"), {})[metric] = row
    for (case, subject), of in figures.items():
        share = of.get("share_of_copy")
        yield [
            f"{escape(subject)}<br><small>{escape(case)}</small>",
            with_small_interval(of["gpu_time"]) if "gpu_time" in of else "",
            escape(with_unit(of["bandwidth"])) if "bandwidth" in of else "",
            f"{100 * share.value:.0f} %" if share is not None else "",
            with_small_interval(of["ratio"]) if "ratio" in of else "",
        ]
