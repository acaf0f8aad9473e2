"""The newest paired comparison of two versions: the largest changes of a time, and counts that changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

import pandas as pd

from hybrid_kv.dashboard.data import COMPARE, column, each, newest_run
from hybrid_kv.dashboard.draw import MARKS, intervals, legend, limit_line, paragraph, plot, table, wrapped
from hybrid_kv.dashboard.report import MAX_LISTED, Report, Section
from hybrid_kv.dashboard.words import day, number, with_interval, with_unit

PLACE = 30
OUTCOMES = {"slower": MARKS[5], "faster": MARKS[2], "same": MARKS[4], "inconclusive": MARKS[1]}
MAX_COMPARED = 20


def section(report: Report) -> Section | None:
    rows = report.results.of(COMPARE)
    if rows.empty:
        report.missing.note("a paired comparison of two versions", "hybrid-kv compare HEAD~1 HEAD --record")
        return None
    newest = newest_run(rows)
    slower = newest[(newest["verdict"] == "fail") & (newest["unit"] == "time ratio")]
    timed = int((newest["unit"] == "time ratio").sum())
    base = newest["baseline_commit"].iloc[0][:7] or "its baseline"
    finding = f"{len(slower) or 'None'} of {timed} benchmarks {'is' if len(slower) <= 1 else 'are'} slower than {base}"
    return Section("Comparison", finding, report.by_machine(rows, lambda own: _compared(newest_run(own), report)))


def introduction(rows: pd.DataFrame, link: Callable[[str], str]) -> str:
    """What was compared with what, and whether the machine was fit for it.

    Args:
        rows: of one comparison.
        link: a commit as HTML.
    """
    newest = next(each(rows.tail(1)))
    head = str(newest.parsed.get("head_commit") or newest.commit)
    text = f"<p>{link(head)} against {link(newest.baseline_commit)}, {day(newest)}.</p>"
    unfit = next((text for text in column(rows, "unfit", str) if text), None)
    return text + (paragraph(f"Measured on a machine that was not fit for times: {unfit}.") if unfit else "")


def _compared(rows: pd.DataFrame, report: Report) -> str:
    text = introduction(rows, report.link)
    rows = rows.assign(
        outcome=column(rows, "outcome", str).fillna("same"), calm=column(rows, "quarantined", bool).eq(True)
    )
    timed = rows[rows["unit"] == "time ratio"]
    if len(timed):
        # The largest changes, slowest first.
        far = timed.reindex(timed["value"].map(math.log).abs().sort_values().index[-MAX_COMPARED:])
        text += _ratios(far.sort_values("value", ascending=False))
        if len(timed) > len(far):
            text += paragraph(f"The {len(far)} largest changes of {len(timed)}.")
    return text + exact_figures(rows)


def exact_figures(rows: pd.DataFrame) -> str:
    """The counts of one comparison that changed, as a table; empty without any."""
    rows = rows.assign(
        outcome=column(rows, "outcome", str).fillna("same"), was=column(rows, "was", int, float).astype(float)
    )
    counted = rows[(rows["unit"] != "time ratio") & (rows["outcome"] != "same")]
    values = {(row.benchmark, row.case, row.metric): row.value for row in each(rows)}
    cells = [
        [
            escape(f"{row.benchmark}, {row.metric}") + (f"<br><small>{escape(row.case)}</small>" if row.case else ""),
            # Until November 2026 a row's params held the value at BASE.
            number(values.get((row.benchmark, row.case, f"{row.metric}_at_base"), row.was)),
            escape(with_unit(row)),
            f'<b class="{"fail" if row.verdict == "fail" else "changed"}">{escape(row.outcome)}</b>',
        ]
        for row in each(counted.head(MAX_LISTED))
    ]
    return table(["exact figure", "was", "is", ""], cells) if cells else ""


def _ratios(rows: pd.DataFrame) -> str:
    labels = [wrapped(f"{row.benchmark} {row.case}".strip(), 28) for row in each(rows)]
    looks = {name: OUTCOMES[name] for name in OUTCOMES if (rows["outcome"] == name).any()}
    traces = []
    for name, look in looks.items():
        chosen = (rows["outcome"] == name).to_numpy()
        line = rows[chosen]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": list(100 * (line["value"] - 1)),
                "y": [i for i, hit in enumerate(chosen) if hit],
                "error_x": {**intervals(line, 100.0), "color": look.colour},
                "marker": {
                    "color": look.colour,
                    "symbol": [look.symbol + ("-open" if calm else "") for calm in line["calm"]],
                    "size": 9,
                },
                "customdata": [
                    escape(f"{with_interval(r)}, n = {r.n}{', quarantined' if r.calm else ''}") for r in each(line)
                ],
                "hovertemplate": f"{name}: %{{customdata}}<extra></extra>",
            }
        )
    calm = " Hollow: quarantined, raises no alarm." if rows["calm"].any() else ""
    return legend(looks) + plot(
        traces,
        f"Change of the time with its 95 % interval.{calm}",
        f"Changes of {len(rows)} benchmarks from {100 * (rows['value'].min() - 1):+.1f} to "
        f"{100 * (rows['value'].max() - 1):+.1f} %",
        80 + 17 * sum(max(2, label.count("<br>") + 2) for label in labels),
        xaxis={"title": "change of the time", "ticksuffix": " %", "nticks": 4},
        yaxis={
            "tickvals": list(range(len(labels))),
            "ticktext": labels,
            "range": [len(labels) - 0.4, -0.6],
            "showgrid": False,
        },
        shapes=[limit_line(x=0.0)],
    )
