"""How long block ids take from the host to the device: one append, and a whole step."""

from __future__ import annotations

from html import escape
from typing import Any

import pandas as pd

from hybrid_kv.dashboard.data import column, each, fullest_run
from hybrid_kv.dashboard.draw import (
    columns,
    intervals,
    legend,
    limit_line,
    line_trace,
    marks,
    paragraph,
    plot,
    powers,
    wrapped,
)
from hybrid_kv.dashboard.report import Report, Section
from hybrid_kv.dashboard.words import about, duration, in_nanoseconds, with_interval

PLACE = 40
ENGINE = "engine"


def section(report: Report) -> Section | None:
    rows = report.results.of("kernel_blocks")
    if rows.empty:
        report.missing.note("how long it takes to bring block ids to the device", "make bench")
        return None
    append = rows[rows["benchmark"] == "expand"]
    finding = "Block ids on their way to the device"
    body = report.by_machine(rows, lambda own: _appends(own) + _steps(own))
    if len(append):
        finding = _append_finding(fullest_run(append)) or finding
        if report.results.of("gpu", "expansion").empty:
            body += report.missing.note("expansion by a Triton kernel, which takes a GPU", "make gpu-bench")
    return Section("Block ids", finding, body)


_PARAMS = {"subject": str, "scenario": str, "model": str, "num_blocks": int, "blocks_per_kv_block": int}


def block_id_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The fullest run with its params as columns."""
    rows = fullest_run(rows)
    return rows.assign(**{name: column(rows, name, kind) for name, kind in _PARAMS.items()})


def _cells(rows: pd.DataFrame, *names: str) -> pd.DataFrame:
    rows = block_id_rows(rows).dropna(subset=["subject", *names])
    return rows[rows["value"] > 0]  # Axes are logarithmic.


def _append_finding(rows: pd.DataFrame) -> str:
    rows = _cells(rows[rows["metric"] == "ratio_to_engine"], "num_blocks")
    if rows.empty:
        return ""
    low, high = rows["value"].min(), rows["value"].max()
    if low < 1:
        return f"The engine is beaten in {int((rows['value'] < 1).sum())} of {len(rows)} comparisons of one append"
    return f"One append of block ids takes {about(low)} to {about(high)} times as long without staging"


def _appends(rows: pd.DataFrame) -> str:
    timed = rows["metric"].isin(["cpu_time", "gpu_time"]) & (rows["benchmark"] == "expand")
    rows = _cells(in_nanoseconds(rows[timed]), "num_blocks", "blocks_per_kv_block")
    if rows.empty:
        return ""
    looks = marks([ENGINE, *sorted(set(rows["subject"]) - {ENGINE})])
    ticks = powers(rows["value"].min(), rows["value"].max())
    sizes = sorted(rows["num_blocks"].unique())[::2]
    figures = []
    for per_block, cell in rows.groupby("blocks_per_kv_block"):
        traces = []
        for subject, line in cell.sort_values("num_blocks").groupby("subject"):
            traces.append(line_trace(line, str(subject), looks, "num_blocks", "blocks"))
        figures.append(
            plot(
                traces,
                f"{per_block} kernel blocks per block",
                f"CPU time of one append by number of blocks, for {', '.join(looks)}; {per_block} kernel blocks each",
                260,
                xaxis={"type": "log", "title": "blocks appended", "tickvals": sizes, "ticktext": list(map(str, sizes))},
                yaxis={
                    "type": "log",
                    "title": "CPU time",
                    "tickvals": ticks,
                    "ticktext": [duration(t) for t in ticks],
                    "range": [f"{len(str(int(ticks[0]))) - 1}", f"{len(str(int(ticks[-1]))) - 1}"],
                },
            )
        )
    n = _span(rows["n"])
    note = f"Medians of {n} interleaved rounds with 95 % intervals; both axes are logarithmic."
    return legend(looks) + columns(figures) + paragraph(note)


def _span(values: pd.Series[Any]) -> str:
    low, high = values.min(), values.max()
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _steps(rows: pd.DataFrame) -> str:
    compared = (rows["metric"] == "ratio_to_engine") & (rows["benchmark"] == "step")
    rows = _cells(rows[compared], "scenario", "blocks_per_kv_block")
    rows = rows[rows["subject"] != "device"]
    if rows.empty:
        return ""
    looks = marks(sorted(set(rows["subject"])))
    scenarios = list(dict.fromkeys(rows["scenario"]))[::-1]
    ticks = powers(min(1.0, rows["value"].min()), rows["value"].max())
    ticks = ticks[:: 1 + len(ticks) // 5]  # four at most are told apart on a phone
    figures = []
    for per_block, cell in rows.groupby("blocks_per_kv_block"):
        traces = []
        for index, (subject, line) in enumerate(cell.groupby("subject")):
            look = looks[str(subject)]
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": escape(str(subject)),
                    "x": list(line["value"]),
                    "y": [scenarios.index(name) + 0.22 * (1 - index) for name in line["scenario"]],
                    "error_x": {**intervals(line), "color": look.colour},
                    "marker": {"color": look.colour, "symbol": look.symbol, "size": 9},
                    "customdata": [escape(f"{with_interval(row)}, n = {row.n}") for row in each(line)],
                    "hovertemplate": f"{escape(str(subject))}<br>%{{customdata}}<extra></extra>",
                }
            )
        figures.append(
            plot(
                traces,
                f"A whole step, {per_block} kernel blocks per block",
                f"Ratios to the engine of {', '.join(looks)} in {len(scenarios)} scenarios",
                70 + 52 * len(scenarios),
                xaxis={
                    "type": "log",
                    "title": "times the engine's CPU time",
                    "tickvals": ticks,
                    "ticktext": [f"{t:,.0f}×" if t >= 1 else f"{t:g}×" for t in ticks],
                },
                yaxis={
                    "tickvals": list(range(len(scenarios))),
                    "ticktext": [wrapped(name) for name in scenarios],
                    "range": [-0.6, len(scenarios) - 0.4],
                    "showgrid": False,
                },
                shapes=[limit_line(x=1.0)],
            )
        )
    return legend(looks) + columns(figures)
