"""Every series over time, those whose level changed first."""

from __future__ import annotations

from html import escape
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hybrid_kv.measure.dashboard.draw import coloured, name_of, paragraph, table, with_small_case
from hybrid_kv.measure.dashboard.report import Report, Section
from hybrid_kv.measure.dashboard.series import (
    ALPHA,
    MIN_CHANGE,
    MIN_SEGMENT,
    MIN_SPREADS,
    Floats,
    Series,
)
from hybrid_kv.measure.dashboard.svg import spark
from hybrid_kv.measure.dashboard.words import change_text, metric

MAX_SERIES = 2000  # of a page
MAX_POINTS = 60  # of a line in the table
STEP_RULE = (
    "A step is a change of level on one machine, in the order of the commits. Counts, bytes and "
    "static kernel metrics are exact: each change is a step. Other series are cut where the rank "
    f"sum of one side is least likely, if {MIN_SEGMENT} runs lie on either side, its p-value times "
    f"the places tried is below {ALPHA:g}, and the medians differ by {100 * MIN_CHANGE:g} % and by "
    f"{MIN_SPREADS:g} robust standard deviations. Runs of a changed tree and void ones are left "
    "out."
)


def history(report: Report) -> Section | None:
    """Return all series as lines of a table that the reader filters."""
    if not report.series:
        return None
    shown = newest_series(report.series)
    words = [series.judge(step) for series in report.series for step in series.steps]
    stepped = sum(bool(series.steps) for series in report.series)
    finding = f"{stepped:,} of {len(report.series):,} series changed their level"
    if words:
        finding += f", {words.count('worse') or 'none'} of {len(words):,} steps for the worse"
    attributes = [f'data-machine="{escape(series.key[4])}"' for series in shown]
    head = ["series", "runs", "newest", "newest step", "", "between", "machine"]
    rows = table(
        head,
        [_line(report, series) for series in shown],
        attributes,
        body_id="series",
        limit=MAX_SERIES,
    )
    left_out = (
        f" {len(shown):,} of {len(report.series):,} series are here."
        if len(shown) < len(report.series)
        else ""
    )
    search = (
        '<label class="search">filter <input id="filter" type="search" placeholder="scheduler '
        'decode K=3"></label>'
    )
    return Section("History", finding, search + rows + paragraph(STEP_RULE + left_out))


def _line(report: Report, series: Series) -> list[str]:
    rows = series.rows.iloc[series.clean]
    step = series.steps[-1] if series.steps else None
    change = coloured(series.judge(step), change_text(step)) if step else ""
    commits = (series.row_before(step).commit, series.step_row(step).commit) if step else ()
    return [
        with_small_case(series.key),
        f"{len(series.rows):,}",
        escape(metric(float(series.rows["value"].iloc[-1]), series.unit)),
        change,
        _spark(series, rows["value"].to_numpy()),
        " … ".join(report.link(commit) for commit in commits),
        name_of(series.key[4] or "any"),
    ]


def _spark(series: Series, values: Floats) -> str:
    """Return the runs that steps are looked for in; of fewer than three there is nothing to see."""
    if len(values) < 3:
        return ""
    kept = thin(values, MAX_POINTS)
    steps = np.searchsorted(kept, [step.index for step in series.steps])
    return spark(values[kept].tolist(), steps.tolist())


def newest_series(series: list[Series], limit: int = MAX_SERIES) -> list[Series]:
    """Return the `limit` series that matter most.

    Those with steps, then the longest, then the newest.
    """

    def rank(line: Series) -> tuple[bool, int, float]:
        return bool(line.steps), len(line.rows), line.rows["moment"].iloc[-1].timestamp()

    return sorted(series, key=rank, reverse=True)[:limit]


def thin(values: Floats, limit: int) -> npt.NDArray[np.int64]:
    """Return positions to keep: the ends, and the extremes of equal bins between them.

    Args:
        values: [points]; at most `limit` >= 4 of them are kept.
    """
    n = len(values)
    if n <= limit:
        return np.arange(n)
    kept = {0, n - 1}
    for start, end in pairwise(np.linspace(1, n - 1, (limit - 2) // 2 + 1).astype(np.int64)):
        inside = values[start:end]
        kept |= {int(start + inside.argmin()), int(start + inside.argmax())}
    return np.array(sorted(kept), dtype=np.int64)
