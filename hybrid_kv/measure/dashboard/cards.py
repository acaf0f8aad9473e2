"""The charts of the first screen as HTML: series with their runs, their steps and their age."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from hybrid_kv.measure.dashboard.charts import Chart, charted
from hybrid_kv.measure.dashboard.data import COMPARE, each
from hybrid_kv.measure.dashboard.draw import coloured
from hybrid_kv.measure.dashboard.report import Report
from hybrid_kv.measure.dashboard.series import Series, Step
from hybrid_kv.measure.dashboard.svg import Level, Mark, Point, plot
from hybrid_kv.measure.dashboard.verdicts import command_of, freshness
from hybrid_kv.measure.dashboard.words import (
    change_text,
    levels_text,
    metric,
    number,
    percent_change,
    plural,
    short_change,
    title,
    with_interval,
)

OURS = "subject=engine"
BY_ASV = "by=asv, "  # rivals are measured by `python -m bench` alone
ARROWS = {"worse": "▲", "better": "▼", "changed": "◆"}


@dataclass(frozen=True)
class Axis:
    """The commits that any chart of a machine has, in order, at equal distances."""

    places: dict[str, float]

    def x(self, row: Any) -> float:
        return self.places[_place(row)]


def _place(row: Any) -> str:
    return row.commit or row.run_id


def axis_of(chosen: Sequence[Series]) -> Axis:
    """Return an axis with room for every run of these series."""
    moments = {_place(row): row.moment for series in chosen for row in each(series.rows)}
    order = sorted(moments, key=moments.__getitem__)
    return Axis({place: index / max(1, len(order) - 1) for index, place in enumerate(order)})


def cards(report: Report, machine: str, asv: str) -> list[str]:
    """Return the charts that have rows, as HTML.

    Args:
        machine: whose series are drawn; empty: of each chart the longest.
        asv: URL of asv's pages; may be empty.
    """
    series = report.series_on(machine)
    chosen = charted(series)
    seconds = [chart.second.choose(series) for chart in chosen if chart.second]
    axis = axis_of([*chosen.values(), *(line for line in seconds if line is not None)])
    return [_card(report, chart, line, series, axis, asv) for chart, line in chosen.items()]


def _card(
    report: Report, chart: Chart, series: Series, others: Sequence[Series], axis: Axis, asv: str
) -> str:
    second = chart.second.choose(others) if chart.second else None
    newest = next(each(series.rows.tail(1)))
    standing = next((failing for failing in report.failing if failing.key == series.key), None)
    word = standing.word if standing else ""
    beside = _second_text(chart, second) + _rival_text(report, chart, series)
    drawn = plot(
        f"{chart.title}: {plural(len(series.rows), 'run')}, {plural(len(series.steps), 'step')}",
        _points(report, series, axis),
        _levels(series, axis),
        [
            *(_mark(report, series, step, axis) for step in series.steps),
            *_compared_marks(report, series, axis),
        ],
        [Point(axis.x(row), float(row.value), "") for row in each(second.rows)] if second else [],
    )
    links = f' <a href="{asv}#{chart.asv}">asv</a>' if asv and chart.asv else ""
    value = metric(newest.value, series.unit or chart.line.unit)
    return (
        f'<article class="card {word}" title="{escape(title(series.key))}"><h3>'
        f"{escape(chart.title)}</h3>"
        f'<p class="now"><b>{escape(value)}</b> {_trend(report, series)}</p>{drawn}'
        f'<p class="foot"><span>{_span(series)}</span>{links}</p>'
        f"{beside}{_stale_text(report, series)}</article>"
    )


def _trend(report: Report, series: Series) -> str:
    """Return the newest step with its commit, or that there is none."""
    if len(series.clean) < 2:
        return "<small>one run so far</small>"
    if not series.steps:
        return "<small>no step</small>"
    step = series.steps[-1]
    word = series.judge(step)
    text = f"{ARROWS[word]} {short_change(step)}"
    return f"{coloured(word, text)} {report.link(series.step_row(step).commit)}"


def _span(series: Series) -> str:
    rows = series.rows
    first, last = (
        f"{moment:%m-%d}" for moment in (rows["moment"].iloc[0], rows["moment"].iloc[-1])
    )
    days = first if first == last else f"{first} … {last}"
    return f"{days} · {plural(len(rows), 'run')}"


def _stale_text(report: Report, series: Series) -> str:
    fresh = freshness(series.rows, report.head)
    if fresh.is_current:
        return ""
    command = command_of(series.key[0])
    return f'<p class="old" title="{escape(command)}">△ {escape(fresh.text)}</p>'


def _rival_text(report: Report, chart: Chart, series: Series) -> str:
    """Return how many times our time a rival takes in the same case.

    `python -m bench` measured both in turns.
    """
    if not chart.rival or OURS not in series.key[3]:
        return ""
    theirs = series.key[3].replace(OURS, f"subject={chart.rival}").replace(BY_ASV, "")
    rows = report.results.of(series.key[0], series.key[1])
    rows = rows[(rows["metric"] == "ratio_to_engine") & (rows["machine"] == series.key[4])]
    same = [row for row in each(rows) if row.case.startswith(theirs)]
    if not same:
        return ""
    newest = max(same, key=attrgetter("moment", "case"))
    return f"<p>{escape(str(newest.parsed['subject']))}: {number(newest.value)}× our time</p>"


def _second_text(chart: Chart, second: Series | None) -> str:
    if chart.second is None or second is None:
        return ""
    value = metric(float(second.rows["value"].iloc[-1]), second.unit or chart.second.unit)
    return f'<p><span class="key"></span>{value} {escape(chart.second_name)}</p>'


def _points(report: Report, series: Series, axis: Axis) -> list[Point]:
    clean = set(series.clean.tolist())
    points = []
    for index, row in enumerate(each(series.rows)):
        info = report.infos.get(row.commit)
        subject = f"\n{info.subject}" if info else ""
        label = f"{row.commit[:7]}, {row.moment:%Y-%m-%d}: {with_interval(row)}{subject}"
        points.append(
            Point(
                axis.x(row), float(row.value), label, report.target(row.commit), index not in clean
            )
        )
    return points


def _levels(series: Series, axis: Axis) -> list[Level]:
    rows = series.rows.iloc[series.clean]
    if not len(rows):
        return []
    values = rows["value"].to_numpy()
    places = [axis.x(row) for row in each(rows)]
    edges = [0, *(step.index for step in series.steps), len(rows)]
    return [
        Level(places[a], places[b - 1], float(np.median(values[a:b]))) for a, b in pairwise(edges)
    ]


def _mark(report: Report, series: Series, step: Step, axis: Axis) -> Mark:
    row = series.step_row(step)
    word = series.judge(step)
    before = series.row_before(step).commit[:7]
    label = (
        f"{change_text(step)} {word}, {levels_text(series.unit, step)}, between {before} and "
        f"{row.commit[:7]}"
    )
    return Mark(axis.x(row), short_change(step), word, label, report.target(row.commit))


def _compared_marks(report: Report, series: Series, axis: Axis) -> list[Mark]:
    """Return marks of recorded comparisons with the commit before that exclude "equal".

    `hybrid-kv compare` runs two commits in turns, so it sees less than runs of different days can.
    """
    suite, benchmark, _, case, machine = series.key
    rows = report.results.of(COMPARE, f"{suite}/{benchmark}")
    rows = rows[(rows["machine"] == machine) & ((rows["ci_low"] > 1) | (rows["ci_high"] < 1))]
    known = {series.step_row(step).commit for step in series.steps}
    marks = []
    for row in each(rows):
        if row.commit in known or row.commit not in axis.places or not _is_case_of(row.case, case):
            continue
        word = "worse" if row.value > 1 else "better"
        before = row.baseline_commit[:7]
        label = f"{percent_change(row)} {word}, side by side with {before}"
        marks.append(
            Mark(
                axis.x(row),
                f"{100 * (row.value - 1):+.2g} %",
                word,
                label,
                report.target(row.commit),
            )
        )
    return marks


def _is_case_of(compared: str, case: str) -> bool:
    """Return whether a comparison's case names nothing that the series' case does not name."""
    return set(compared.split(", ")) <= set(case.split(", "))
