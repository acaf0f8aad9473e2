"""What swarms played, day by day, what of the traffic's features they have covered, and which rules were broken."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import pandas as pd

from hybrid_kv.dashboard.data import SWARM, column, each, newest_run
from hybrid_kv.dashboard.draw import Mark, columns, legend, marks, paragraph, plot, table
from hybrid_kv.dashboard.report import MAX_LISTED, Report, Section
from hybrid_kv.dashboard.words import about, day, number

PLACE = 25
COVERED = {"patterns": "request patterns", "settings": "pairs and triples of settings"}


def section(report: Report) -> Section | None:
    rows = report.results.of(SWARM)
    if rows.empty:
        return None

    def block(own: pd.DataFrame) -> str:
        return _figures(own) + _broken(own, report)

    return Section("Swarms", _finding(rows), report.by_machine(rows, block))


def _finding(rows: pd.DataFrame) -> str:
    requests = _last(rows, "requests")["value"].sum()
    text = f"Swarms played {number(requests)} exact requests"
    newest = _last(newest_run(rows), "rules_broken")
    if len(newest):
        count = int(newest["value"].iloc[-1])
        text += f"; the newest broke {count:,} rule{'s' * (count != 1)}" if count else "; the newest broke no rule"
    return text


def _last(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """What each run said last: a run counts from its beginning."""
    return rows[rows["metric"] == metric].drop_duplicates("run_id", keep="last")


def played_by_day(rows: pd.DataFrame, metric: str) -> pd.Series[Any]:
    """How many were played on each day, from the counts of runs that grow; in order of days."""
    counts = rows[rows["metric"] == metric].sort_values("time", kind="stable")
    new = counts["value"] - counts.groupby("run_id")["value"].shift(fill_value=0.0)
    return new.groupby(counts["time_utc"].str[:10]).sum()


def _figures(rows: pd.DataFrame) -> str:
    looks = marks(["seeds", *COVERED.values()])
    seeds = played_by_day(rows, "seeds")
    played = {
        "type": "bar",
        "x": list(seeds.index),
        "y": list(seeds),
        "marker": {"color": looks["seeds"].colour},
        "hovertemplate": "%{x}: %{y:,} seeds<extra></extra>",
    }
    per_day = plot(
        [played],
        "Seeds played per day",
        f"Seeds played on each of {len(seeds)} days",
        260,
        xaxis={"type": "category"},
        yaxis={"title": "seeds", "rangemode": "tozero"},
    )
    traces = [_covered(rows[rows["metric"] == metric], name, looks[name]) for metric, name in COVERED.items()]
    covered = plot(
        traces,
        "Covered since each swarm began",
        "Share of patterns and settings that a swarm has covered, over time",
        260,
        xaxis={"title": "UTC"},
        yaxis={"title": "covered, %", "range": [0, 105]},
    )
    return legend({name: looks[name] for name in COVERED.values()}) + columns([per_day, covered]) + _rate(rows)


def _covered(rows: pd.DataFrame, name: str, look: Mark) -> dict[str, Any]:
    rows = rows[rows["n"] > 0]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape(name),
        "x": list(rows["time_utc"]),
        "y": list(100 * rows["value"] / rows["n"]),
        "marker": {"color": look.colour, "symbol": look.symbol, "size": 8},
        "customdata": [escape(f"{number(row.value)} of {row.n:,}") for row in each(rows)],
        "hovertemplate": f"{escape(name)}<br>%{{x}}: %{{customdata}}<extra></extra>",
    }


def _rate(rows: pd.DataFrame) -> str:
    rates = _last(rows, "requests_per_cpu_second")
    if rates.empty:
        return ""
    rate = float(rates["value"].iloc[-1])
    return paragraph(f"{number(rate)} requests per CPU second in the newest: {about(86400 * rate)} a day on each core.")


def _broken(rows: pd.DataFrame, report: Report) -> str:
    """Rules by the run in which they were broken, the newest first."""
    failures = rows[rows["metric"] == "failures"]
    failures = failures.assign(rule=column(failures, "rule", str)).dropna(subset=["rule"])
    failures = failures.drop_duplicates(["run_id", "rule"], keep="last").iloc[::-1]
    if failures.empty:
        return ""

    def lines() -> Iterator[list[str]]:
        for row in each(failures.head(MAX_LISTED)):
            yield [escape(str(row.rule)), number(row.value), report.link(row.commit), f"<time>{day(row)}</time>"]

    listed = table(["rule that was broken first", "scenarios", "commit", "day"], list(lines()))
    if len(failures) > MAX_LISTED:
        listed += paragraph(f"and {len(failures) - MAX_LISTED:,} more")
    return listed
