"""How often the harness itself errs: false alarms on equal code, planted slowdowns that it found."""

from __future__ import annotations

from html import escape

import pandas as pd

from hybrid_kv.dashboard.data import CURVE, Results, column, each
from hybrid_kv.dashboard.draw import intervals, legend, marks, plot, table, wrapped
from hybrid_kv.dashboard.report import Report, Section

PLACE = 100
WHOLE = "any benchmark"  # the row that is about a whole comparison


def section(report: Report) -> Section | None:
    rows = curve_rows(report.results)
    if rows.empty:
        report.missing.note(
            "false alarms and detection of the harness itself", "hybrid-kv compare --self-test --record"
        )
        return None
    return Section("Operating curve", _curve_finding(rows), report.by_machine(rows, _curve))


def curve_rows(results: Results) -> pd.DataFrame:
    """The last rates of the newest self-test, with column `plant`: the planted slowdown in percent, 0 for none."""
    rows = results.of(CURVE)
    rows = rows[rows["metric"].isin(["false_alarm_rate", "detection_rate"])]
    rows = rows.assign(plant=column(rows, "plant_percent", int, float), experiment=column(rows, "experiment", str))
    rows = rows.dropna(subset=["plant", "experiment"])
    if len(rows):
        rows = rows[rows["experiment"] == rows["experiment"].iloc[-1]]
    return rows.drop_duplicates(["benchmark", "metric", "plant", "machine"], keep="last")


def _curve_finding(rows: pd.DataFrame) -> str:
    parts = []
    for row in each(rows[rows["benchmark"] == WHOLE].tail(1)):
        parts.append(f"{round(row.value * row.n)} of {row.n} comparisons of equal code raised an alarm")
    found = rows[(rows["metric"] == "detection_rate") & (rows["plant"] == 5)]
    if len(found):
        parts.append(f"a planted 5 % is found in {100 * found['value'].min():.0f} % of the trials or more")
    calm = _quarantined(rows)
    if calm:
        parts.append(f"{len(calm)} quarantined")
    return "; ".join(parts) or "How often the harness errs"


def _quarantined(rows: pd.DataFrame) -> set[str]:
    failed = (rows["metric"] == "false_alarm_rate") & (rows["verdict"] == "fail")
    return set(rows[failed]["benchmark"])


def _curve(rows: pd.DataFrame) -> str:
    calm = _quarantined(rows)
    planted = rows[rows["metric"] == "detection_rate"]["benchmark"]
    drawn = list(dict.fromkeys([*rows[rows["benchmark"] == WHOLE]["benchmark"], *sorted(calm), *planted]))
    others = rows[~rows["benchmark"].isin(drawn)]
    kinds = {"false alarms": 0} | {f"{percent} % found": percent for percent in sorted(set(rows["plant"]) - {0})}
    looks = marks(kinds)
    traces = []
    for index, (name, percent) in enumerate(kinds.items()):
        line = rows[(rows["plant"] == percent) & rows["benchmark"].isin(drawn)]
        look = looks[name]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": list(100 * line["value"]),
                "y": [drawn.index(b) + 0.2 * (index - (len(kinds) - 1) / 2) for b in line["benchmark"]],
                "error_x": {**intervals(line, 100.0), "color": look.colour},
                "marker": {"color": look.colour, "symbol": look.symbol, "size": 9},
                "customdata": [f"{round(r.value * r.n)} of {r.n}" for r in each(line)],
                "hovertemplate": f"{escape(name)}: %{{customdata}}<extra></extra>",
            }
        )
    labels = [label + (" (quarantined)" if label in calm else "") for label in drawn]
    figure = legend(looks) + plot(
        traces,
        "Share of the trials with an alarm, exact 95 % intervals: 0 is right for equal code, 100 % for a slowdown",
        "; ".join(labels),
        80 + 64 * len(drawn),
        xaxis={"title": "share of the trials", "ticksuffix": " %", "range": [-5, 105]},
        yaxis={
            "tickvals": list(range(len(drawn))),
            "ticktext": [wrapped(label.replace("[", " ["), 30) for label in labels],
            "range": [len(drawn) - 0.4, -0.6],
            "showgrid": False,
        },
    )
    cells = [
        [escape(row.benchmark), f"{round(row.value * row.n)} of {row.n:,}", f"{100 * row.ci_high:.1f} %"]
        for row in each(others)
    ]
    rest = table(["other benchmarks", "false alarms", "at most, 95 %"], cells)
    summary = f"{len(cells)} other benchmarks, false alarms only"
    return figure + (f"<details><summary>{summary}</summary>{rest}</details>" if cells else "")
