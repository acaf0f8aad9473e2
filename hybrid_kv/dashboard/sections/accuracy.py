"""Shares of right answers, run by run, and paired tests of two versions."""

from __future__ import annotations

import json
from html import escape
from typing import Any

import pandas as pd

from hybrid_kv.dashboard.data import each
from hybrid_kv.dashboard.draw import BLUE, columns, intervals, paragraph, plot, table, wrapped
from hybrid_kv.dashboard.report import MAX_LISTED, Report, Section
from hybrid_kv.dashboard.words import WORDS, day, number

PLACE = 70
PAIRED = {
    "paired_difference": "difference",
    "questions_lost": "lost",
    "questions_gained": "gained",
    "mcnemar_p": "McNemar p, one-sided",
    "detectable_loss": "smallest loss found with 80 % power",
}
MAX_LINES = 16  # of one figure
NO_SETTING = ("seed", "limit", "task", "lm_eval", "num_fewshot")


def section(report: Report) -> Section | None:
    rows = report.results.of("accuracy")
    asked = rows[rows["metric"].str.contains("match|invalid") | rows["metric"].isin(PAIRED)]
    if asked.empty:
        report.missing.note("answers to the task's questions", "hybrid-kv accuracy --record")
        return None
    right = rows[rows["metric"] == "exact_match_strict"].drop_duplicates("benchmark", keep="last")
    newest = [f"{100 * row.value:.1f} % of {row.n:,} questions of {row.benchmark}" for row in each(right)]
    finding = f"Right answers: {', '.join(newest)}" if newest else "Answers to the task's questions"
    body = report.by_machine(asked, lambda own: _shares(own) + _paired(own))
    if not rows["metric"].isin(PAIRED).any():
        body += report.missing.note("two versions on the same questions", "hybrid-kv accuracy compare A B --record")
    return Section("Accuracy", finding, body)


def _shares(rows: pd.DataFrame) -> str:
    """A figure for the right answers of each task, and one for those without a number, each on an axis of its own."""
    rows = rows[~rows["metric"].isin(PAIRED)]
    settings = [{k: v for k, v in p.items() if k not in NO_SETTING} for p in rows["parsed"]]
    rows = rows.assign(
        settings=[json.dumps(one, sort_keys=True) for one in settings], invalid=rows["metric"].str.contains("invalid")
    )
    figures = [_figure(own) for _, own in rows.groupby(["benchmark", "invalid"], sort=False)]
    note = "Full: the newest run with its 95 % interval; hollow: earlier runs."
    return columns(figures) + paragraph(note) if figures else ""


def _figure(rows: pd.DataFrame) -> str:
    """One line per model, settings and metric with a point per run: runs of other seeds show the spread."""
    groups = [line for _, line in rows.groupby(["settings", "metric"], sort=False)][-MAX_LINES:]
    rows = pd.concat(groups)
    apart = _differing([json.loads(line["settings"].iloc[-1]) for line in groups])
    labels, traces = [], []
    for index, (line, setting) in enumerate(zip(groups, apart, strict=True)):
        newest = line.tail(1)
        row = next(each(newest))
        name = row.metric.replace("exact_match_", "").replace("_", " ")
        # Spaces that no line ends at.
        count = f"{len(line)} runs of\u00a0{row.n:,}" if len(line) > 1 else f"n\u00a0=\u00a0{row.n:,}"
        labels.append(", ".join(filter(None, [setting, name, count])))
        for points, size, symbol in ((line.iloc[:-1], 7, "circle-open"), (newest, 10, "circle")):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": list(100 * points["value"]),
                    "y": [index] * len(points),
                    "error_x": {**intervals(points, 100.0), "color": BLUE, "visible": points is newest},
                    "marker": {"color": BLUE, "size": size, "symbol": symbol},
                    "customdata": [escape(f"{p.case}, {day(p)}, {p.commit[:7]}") for p in each(points)],
                    "hovertemplate": "%{x:.1f} %<br>%{customdata}<extra></extra>",
                }
            )
    shown = pd.concat([rows["value"], rows["ci_low"].dropna(), rows["ci_high"].dropna()]).astype(float)
    low, high = axis_ends(100 * shown.min(), 100 * shown.max())
    what = "answers without a number" if rows["invalid"].iloc[0] else "right answers"
    cut = "" if low <= 0 and high >= 100 else f"; the axis is cut: {number(max(low, 0))} to {number(min(high, 100))} %"
    return plot(
        traces,
        f"{rows['benchmark'].iloc[0]}, {what}{cut}",
        "; ".join(f"{label}: {100 * line['value'].iloc[-1]:.1f} %" for label, line in zip(labels, groups, strict=True)),
        80 + 40 * len(groups),
        xaxis={"title": "share of the questions", "ticksuffix": " %", "range": [low, high], "nticks": 4},
        yaxis={
            "tickvals": list(range(len(labels))),
            "ticktext": [wrapped(label, 24) for label in labels],
            "range": [len(labels) - 0.4, -0.6],
            "showgrid": False,
        },
    )


def axis_ends(low: float, high: float) -> tuple[float, float]:
    """Of an axis in % on which figures from `low` to `high` differ: a fifth wider, 2 points at least.

    Nothing lies below 0 or above 100 %, but half of a mark there does.
    """
    span = max(1.2 * (high - low), 2.0)
    start = min(max((low + high - span) / 2, 0.0), max(0.0, 100.0 - span))
    end = min(start + span, 100.0)
    room = 0.04 * (end - start)
    return start - room if start == 0 else start, end + room if end == 100 else end


def _differing(settings: list[dict[str, Any]]) -> list[str]:
    """What each of some settings says that not all of them do."""
    names = sorted({name for one in settings for name in one})
    names = [name for name in names if any(one.get(name) != settings[0].get(name) for one in settings)]
    return [", ".join(f"{name}={one[name]}" for name in names if name in one) for one in settings]


def _paired(rows: pd.DataFrame) -> str:
    lines = []
    for _, test in list(rows.groupby("run_id", sort=False))[::-1][:MAX_LISTED]:
        by_metric = {row.metric: row for row in each(test)}
        main = by_metric.get("paired_difference")
        if main is None:
            continue
        commits = (
            f"{main.baseline_commit[:7] or 'baseline'} to {str(main.parsed.get('candidate_commit') or main.commit)[:7]}"
        )
        figures = [_points(main), *(_paired_figure(by_metric.get(name)) for name in list(PAIRED)[1:])]
        verdict = f'<b class="{main.verdict or "none"}">{WORDS[main.verdict or "none"]}</b>'
        lines.append(
            [f"{escape(main.benchmark)}<br><small>{escape(commits)}</small>", *figures, f"{main.n:,}", verdict]
        )
    return table(["paired test", *PAIRED.values(), "n", ""], lines) if lines else ""


def _points(row: Any) -> str:
    text = f"{100 * row.value:+.1f} points"
    if pd.isna(row.ci_low) or pd.isna(row.ci_high):
        return text
    return f"{text} <small>({100 * row.ci_low:+.1f} to {100 * row.ci_high:+.1f})</small>"


def _paired_figure(row: Any) -> str:
    if row is None:
        return "–"
    return f"{100 * row.value:.1f} points" if row.metric == "detectable_loss" else number(row.value)
