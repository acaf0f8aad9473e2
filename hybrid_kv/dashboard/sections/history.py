"""Every series over time, with the steps of its level."""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from hybrid_kv.dashboard.data import Series, is_ours, newest_series, points_per_series, thin
from hybrid_kv.dashboard.draw import MARKS, in_script, paragraph, table
from hybrid_kv.dashboard.report import COMMITS, Report, Section
from hybrid_kv.dashboard.steps import ALPHA, MIN_CHANGE, MIN_SEGMENT, MIN_SPREADS
from hybrid_kv.dashboard.words import axis_name, benchmark_name, change_text, day, levels_text, title
from hybrid_kv.results import TIME_UNITS

PLACE = 20
MAX_STEPS_LISTED = 20
MAX_STEPS_UNFOLDED = 5  # More would push the chart out of sight.


def section(report: Report) -> Section:
    series = report.series
    data = f'<script type="application/json" id="history-data">{in_script(_history_json(report))}</script>'
    if not series:
        report.missing.note("any history", "hybrid-kv guard --record")
        return Section("History", "There is no row yet", data)
    stepped = [(s, step) for s in series for step in s.steps]
    stepped.sort(key=lambda pair: pair[0].step_row(pair[1]).time, reverse=True)
    worse = sum(s.judge(step) == "worse" for s, step in stepped)
    runs = max(len(s.rows) for s in series)
    finding = f"No level changed in {len(series):,} series of at most {runs:,} {'run' if runs == 1 else 'runs'}"
    if stepped:
        changed = len({s.key for s, _ in stepped})
        times = {0: "none", 1: "once"}.get(worse, f"{worse:,} times")
        finding = f"{changed:,} of {len(series):,} series changed their level, {times} for the worse"
    shown = newest_series(series)
    index = {s.key: i for i, s in enumerate(shown)}
    listed = [(s, step) for s, step in stepped if s.key in index][:MAX_STEPS_LISTED]
    rows = [
        [
            f'<button type="button" data-series="{index[s.key]}">{escape(title(s.key))}</button>',
            change_text(step),
            f'<b class="{s.judge(step)}">{s.judge(step)}</b>',
            escape(levels_text(s.unit, step)),
            day(s.step_row(step)),
            f"{report.link(s.row_before(step).commit)} … {report.link(s.step_row(step).commit)}",
        ]
        for s, step in listed
    ]
    attributes = [f'data-machine="{escape(s.key[4])}"' for s, _ in listed]
    steps = table(["steps", "change", "", "median", "since", "between"], rows, attributes) if rows else ""
    if len(stepped) > len(listed):
        steps += paragraph(f"and {len(stepped) - len(listed):,} older ones")
    if len(listed) > MAX_STEPS_UNFOLDED:
        steps = f"<details><summary>{len(stepped):,} steps, newest first</summary>{steps}</details>"
    body = f"""{steps}
<div class="pick"><label>benchmark <select id="benchmark"></select></label>
<label>case <select id="case"></select></label></div>
<figure><div class="canvas" id="history-chart" role="img" aria-label="figure of each run over time"></div></figure>
{table(["newest runs, UTC", "commit", "figure", "95 % interval", "n", "machine"], [], body_id="history-runs")}
{paragraph(f"{STEP_RULE} {_kept(series, shown)}")}{data}"""
    return Section("History", finding, body)


STEP_RULE = (
    "A step is a change of level on one machine. Counts, bytes and static kernel metrics are exact: each change is a "
    f"step. Other figures are cut where the rank sum of one side is least likely, if {MIN_SEGMENT} runs lie on either "
    f"side, its p-value times the places tried is below {ALPHA:g}, and the medians differ by {100 * MIN_CHANGE:g} % "
    f"and by {MIN_SPREADS:g} robust standard deviations. Runs of a changed tree (hollow) and void ones are left out."
)


def _kept(series: list[Series], shown: list[Series]) -> str:
    limit = points_per_series(shown)
    text = ""
    if max(len(s.rows) for s in shown) > limit:
        text = (
            f"A series with more than {limit} runs keeps the first, the last, the lowest and highest of equal spans. "
        )
    if len(shown) < len(series):
        text += f"Of {len(series):,} series the {len(shown):,} with steps or most runs are here."
    return text


def _tells(series: Series) -> tuple[bool, bool, bool, int, float]:
    """How much a series says at first sight: speed and accuracy before counts, then what grew worse, then the longest.

    Among equals the engine's own before its rivals', and the newest.
    """
    told = series.unit in TIME_UNITS or series.key[2].startswith("exact_match")
    worse = any(series.judge(step) == "worse" for step in series.steps)
    return told, worse, is_ours(series.key[3]), len(series.rows), series.rows["time"].iloc[-1].timestamp()


def _history_json(report: Report) -> str:
    series = report.series
    shown = newest_series(series)
    limit = points_per_series(shown)
    commits: dict[str, int] = {}
    documents = [_series_document(s, limit, commits) for s in shown]
    document = {
        "series": documents,
        "start": shown.index(max(shown, key=_tells)) if shown else 0,
        "commits": list(commits),
        "machines": list(dict.fromkeys(s.key[4] for s in shown)),
        "marks": [asdict(mark) for mark in MARKS],
        "repository": report.repository,
        "pages": {commit: COMMITS + one.file for commit, one in report.commits.items()},
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _series_document(series: Series, limit: int, commits: dict[str, int]) -> dict[str, Any]:
    rows = series.rows.iloc[thin(series.rows["value"].to_numpy(), limit)]
    seconds = _seconds(series.rows["time"])
    clean = seconds[series.clean]
    edges = [0, *(step.index for step in series.steps), len(clean)]
    values = series.rows["value"].to_numpy()[series.clean]
    levels = [
        {"from": int(clean[a]), "to": int(clean[b - 1]), "value": _short(float(np.median(values[a:b])))}
        for a, b in pairwise(edges)
        if series.steps
    ]
    case, machine = series.key[3:]
    return {
        "name": benchmark_name(series.key),
        "case": case,
        "machine": machine,
        "unit": series.unit,
        "axis": axis_name(series.unit),
        "time": _seconds(rows["time"]).tolist(),
        "value": [_short(v) for v in rows["value"]],
        "low": [_short(v) for v in rows["ci_low"].astype(float)],
        "high": [_short(v) for v in rows["ci_high"].astype(float)],
        "n": rows["n"].tolist(),
        "commit": [commits.setdefault(c, len(commits)) for c in rows["commit"]],
        "dirty": rows["dirty"].astype(int).tolist(),
        "levels": levels,
        "steps": [
            {"time": int(clean[step.index]), "text": change_text(step), "word": series.judge(step)}
            for step in series.steps
        ],
    }


def _seconds(times: pd.Series[Any]) -> npt.NDArray[np.int64]:
    epoch = pd.Timestamp(0, tz="UTC")
    return np.asarray((times - epoch) // pd.Timedelta(seconds=1), dtype=np.int64)


def _short(value: float) -> float | None:
    """Six digits: more than any interval here deserves. None: missing."""
    return None if np.isnan(value) else float(f"{value:.6g}")
