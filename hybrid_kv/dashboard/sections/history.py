"""Every series over time, with the steps of its level."""

from __future__ import annotations

import json
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from hybrid_kv.dashboard.data import is_ours
from hybrid_kv.dashboard.draw import COLOURS, DASHES, SYMBOLS, coloured, folded, in_script, paragraph, table
from hybrid_kv.dashboard.report import COMMITS, Report, Section
from hybrid_kv.dashboard.series import ALPHA, MIN_CHANGE, MIN_SEGMENT, MIN_SPREADS, Floats, Series
from hybrid_kv.dashboard.words import axis_name, benchmark_name, change_text, day, levels_text, title
from hybrid_kv.results import TIME_UNITS

MAX_SERIES = 2000
MAX_POINTS, MAX_POINTS_PER_SERIES = 40_000, 400  # of a page
MAX_UNFOLDED = 5  # steps; more would push the chart out of sight
STEP_RULE = (
    "A step is a change of level on one machine. Counts, bytes and static kernel metrics are exact: each change is a "
    f"step. Other series are cut where the rank sum of one side is least likely, if {MIN_SEGMENT} runs lie on either "
    f"side, its p-value times the places tried is below {ALPHA:g}, and the medians differ by {100 * MIN_CHANGE:g} % "
    f"and by {MIN_SPREADS:g} robust standard deviations. Runs of a changed tree (hollow) and void ones are left out."
)


def history(report: Report) -> Section:
    """A chart whose series the reader chooses, and the steps of all series."""
    shown = newest_series(report.series)
    data = f'<script type="application/json" id="history-data">{in_script(_json(report, shown))}</script>'
    if not shown:
        return Section("History", "There is no row yet", data)
    stepped = [(i, s, step) for i, s in enumerate(shown) for step in s.steps]
    stepped.sort(key=lambda one: one[1].step_row(one[2]).time, reverse=True)
    worse = sum(s.judge(step) == "worse" for _, s, step in stepped)
    changed = len({i for i, *_ in stepped})
    finding = f"{changed:,} of {len(report.series):,} series changed their level; {worse or 'no'} changes are worse"
    rows = [
        [
            f'<button type="button" data-series="{i}">{escape(title(s.key))}</button>',
            change_text(step),
            coloured(s.judge(step)),
            escape(levels_text(s.unit, step)),
            day(s.step_row(step)),
            f"{report.link(s.row_before(step).commit)} … {report.link(s.step_row(step).commit)}",
        ]
        for i, s, step in stepped
    ]
    attributes = [f'data-machine="{escape(s.key[4])}"' for _, s, _ in stepped]
    steps = table(["steps", "change", "", "median", "since", "between"], rows, attributes) if rows else ""
    if len(rows) > MAX_UNFOLDED:
        steps = folded(f"{len(rows):,} steps, newest first", steps)
    left_out = f" {len(shown):,} of {len(report.series):,} series are here." if len(shown) < len(report.series) else ""
    body = f"""{steps}
<div class="pick"><label>benchmark <select id="benchmark"></select></label>
<label>case <select id="case"></select></label></div>
<figure><div class="canvas" id="history-chart" role="img" aria-label="metric of each run over time"></div></figure>
{table(["newest runs, UTC", "commit", "value", "95 % interval", "n", "machine"], [], body_id="history-runs")}
{paragraph(STEP_RULE + left_out)}{data}"""
    return Section("History", finding, body)


def newest_series(series: list[Series], limit: int = MAX_SERIES) -> list[Series]:
    """The `limit` series that matter most, in the given order: those with steps, then the longest, then the newest."""
    order = sorted(series, key=lambda s: (bool(s.steps), len(s.rows), s.rows["time"].iloc[-1]), reverse=True)
    kept = {s.key for s in order[:limit]}
    return [s for s in series if s.key in kept]


def thin(values: Floats, limit: int) -> npt.NDArray[np.int64]:
    """Positions to keep: the first and the last, and the lowest and the highest of each of equal bins between them.

    Args:
        values: [points]; at most `limit` >= 4 of them are kept.
    """
    n = len(values)
    if n <= limit:
        return np.arange(n)
    kept = {0, n - 1}
    for start, end in pairwise(np.linspace(1, n - 1, (limit - 2) // 2 + 1).astype(np.int64)):
        part = values[start:end]
        kept |= {int(start + part.argmin()), int(start + part.argmax())}
    return np.array(sorted(kept), dtype=np.int64)


def _shown_first(series: Series) -> tuple[bool, bool, bool, int, float]:
    """Rank of the series that the chart begins with: speed and accuracy, then what grew worse, then the longest."""
    timed = series.unit in TIME_UNITS or series.key[2].startswith("exact_match")
    worse = any(series.judge(step) == "worse" for step in series.steps)
    return timed, worse, is_ours(series.key[3]), len(series.rows), series.rows["time"].iloc[-1].timestamp()


def _json(report: Report, shown: list[Series]) -> str:
    limit = max(12, min(MAX_POINTS_PER_SERIES, MAX_POINTS // max(1, len(shown))))
    commits: dict[str, int] = {}
    looks = zip(COLOURS, SYMBOLS, DASHES, strict=True)
    document = {
        "series": [_document(s, limit, commits) for s in shown],
        "start": shown.index(max(shown, key=_shown_first)) if shown else 0,
        "commits": list(commits),
        "machines": list(dict.fromkeys(s.key[4] for s in shown)),
        "marks": [{"colour": colour, "symbol": symbol, "dash": dash} for colour, symbol, dash in looks],
        "repository": report.repository,
        "pages": {commit: COMMITS + one.file for commit, one in report.commits.items()},
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _document(series: Series, limit: int, commits: dict[str, int]) -> dict[str, Any]:
    rows = series.rows.iloc[thin(series.rows["value"].to_numpy(), limit)]
    clean = _seconds(series.rows["time"])[series.clean]
    edges = [0, *(step.index for step in series.steps), len(clean)]
    values = series.rows["value"].to_numpy()[series.clean]
    levels = [
        {"from": int(clean[a]), "to": int(clean[b - 1]), "value": _short(float(np.median(values[a:b])))}
        for a, b in pairwise(edges)
        if series.steps
    ]
    return {
        "name": benchmark_name(series.key),
        "case": series.key[3],
        "machine": series.key[4],
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
    """Six digits are more than any interval here deserves; a missing value is None."""
    return None if np.isnan(value) else float(f"{value:.6g}")
