"""A page for each commit, for its reviewer.

It has tables only, and no script.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hybrid_kv.files import write_whole
from hybrid_kv.measure.dashboard.changes import Measured
from hybrid_kv.measure.dashboard.data import COMPARE, each, is_ours, newest_run
from hybrid_kv.measure.dashboard.draw import (
    MAX_LISTED,
    coloured,
    name_of,
    paragraph,
    row_name,
    table,
    with_small_case,
    with_small_interval,
)
from hybrid_kv.measure.dashboard.page import document
from hybrid_kv.measure.dashboard.report import MAX_MACHINES, Report, Section
from hybrid_kv.measure.dashboard.sections.times import compared, slower_text
from hybrid_kv.measure.dashboard.series import Series, Step
from hybrid_kv.measure.dashboard.verdicts import SuiteVerdict, overall
from hybrid_kv.measure.dashboard.words import (
    WORDS,
    change_text,
    day,
    levels_text,
    suite_name,
    with_unit,
)


def build_commits(report: Report) -> Iterator[tuple[str, str]]:
    """Name of its file and HTML of each commit's page, one after the other."""
    commits = list(report.commits.values())
    for before, measured, after in zip(
        [None, *commits], commits, [*commits[1:], None], strict=False
    ):
        made = (
            _verdict(measured),
            _steps(report, measured),
            _comparison(report, measured),
            _changes(report, measured),
        )
        body = (
            _header(report, measured, before, after)
            + f"<main>{''.join(s.html for s in made if s)}</main>\n"
        )
        yield measured.file, document(f"hybrid-kv {measured.commit[:7]}", body)


def write_commits(report: Report, folder: Path) -> None:
    """Write each page whole or not at all, and delete other pages of an earlier report.

    Raises:
        HybridKVError: one cannot be written.
    """
    made = set()
    for name, html in build_commits(report):
        write_whole(folder / name, html)
        made.add(name)
    for old in folder.glob("*.html"):
        if re.fullmatch(r"[0-9a-f]{12}", old.stem) and old.name not in made:
            old.unlink()


def _header(
    report: Report, measured: Measured, before: Measured | None, after: Measured | None
) -> str:
    info = report.infos.get(measured.commit)
    url = report.url(measured.commit)
    name = f"<code>{measured.commit}</code>"
    lines = [f'<a href="{url}">{name}</a>' if url else name]
    if info:
        lines.append(f"{escape(info.author)}, {info.day}")
    machines = list(dict.fromkeys(measured.rows["machine"][measured.rows["machine"] != ""]))
    more = (
        [f"and {len(machines) - MAX_MACHINES:,} more machines"]
        if len(machines) > MAX_MACHINES
        else []
    )
    places = ", ".join([*machines[:MAX_MACHINES], *more])
    first = measured.rows["time_utc"].iloc[0][:10]
    last = measured.rows["time_utc"].iloc[-1][:10]
    days = first if last == first else f"{first} to {last}"
    lines.append(f"{len(measured.rows):,} measurements of {days}")
    around = ['<a href="../index.html">all commits</a>']
    around += [f'before: <a href="{before.file}">{before.commit[:7]}</a>'] if before else []
    around += [f'after: <a href="{after.file}">{after.commit[:7]}</a>'] if after else []
    subject = escape(info.subject) if info and info.subject else f"Commit {measured.commit[:7]}"
    return f"""<header><h1>{subject}</h1>
<p>{"<br>".join([*lines, escape(places)])}</p><p>{" · ".join(around)}</p></header>
"""


def _verdict(measured: Measured) -> Section:
    suites = measured.verdicts
    word = overall(v.word for v in suites)
    if word == "none":
        return Section("Verdict", "No check ran on it", "")
    passed = sum(v.count("pass") for v in suites)
    judged = sum(len(v.rows) for v in suites)
    rows = [
        [
            escape(suite_name(v.suite)),
            coloured(v.word, WORDS[v.word]),
            f"{v.count('pass'):,} of {len(v.rows):,}",
            day(v.newest),
            name_of(v.machine or "any"),
        ]
        for v in suites
    ]
    body = table(["suite", "", "passed", "on", "machine"], rows) + _not_passed(suites)
    return Section("Verdict", f"{WORDS[word]}: {passed:,} of {judged:,} checks", body, word)


def _not_passed(suites: Sequence[SuiteVerdict]) -> str:
    """Return checks with another verdict than `pass`, as a table; empty without any."""
    rows = [
        [
            row_name(row),
            coloured(row.verdict, WORDS[row.verdict]),
            escape(with_unit(row)),
            name_of(str(row.parsed.get("limit", ""))),
            f"{row.n:,}",
        ]
        for v in suites
        for row in each(v.rows[v.rows["verdict"] != "pass"])
    ]
    return table(["what did not pass", "", "value", "limit", "n"], rows) if rows else ""


def _steps(report: Report, measured: Measured) -> Section | None:
    if not measured.steps:
        return None
    judged = [(series.judge(step), series, step) for series, step in measured.steps]
    judged.sort(key=_worse_first)
    rows = [
        [
            with_small_case(series.key),
            change_text(step),
            coloured(word),
            escape(levels_text(series.unit, step)),
            report.link(series.row_before(step).commit, folder=""),
            name_of(series.key[4] or "any"),
        ]
        for word, series, step in judged
    ]
    worse = sum(word == "worse" for word, *_ in judged)
    count = f"{len(judged):,} level{'s' * (len(judged) != 1)} changed"
    finding = f"{count} with it or since the run before it, {worse or 'none'} for the worse"
    body = table(["level", "change", "", "median", "run before", "machine"], rows)
    return Section("Steps", finding, body, "fail" if worse else "")


def _worse_first(line: tuple[str, Series, Step]) -> tuple[bool, tuple[str, ...]]:
    word, series, _ = line
    return word != "worse", series.key


def _comparison(report: Report, measured: Measured) -> Section | None:
    rows = measured.rows[measured.rows["suite"] == COMPARE]
    if rows.empty:
        return None

    def block(machine_rows: pd.DataFrame) -> str:
        return compared(newest_run(machine_rows), partial(report.link, folder=""))

    body = report.by_machine(rows, block)
    return Section(
        "Comparison", slower_text(rows), body, "fail" if (rows["verdict"] == "fail").any() else ""
    )


def _changes(report: Report, measured: Measured) -> Section:
    rows = measured.changes[measured.changes["change"] != "same"]
    if measured.changes.empty:
        return Section("Metrics", "No commit before it was measured in the same series", "")
    counts = {word: measured.count(word) for word in ("worse", "better", "changed")}
    words = ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)
    total = f"{len(measured.changes):,} metrics"
    finding = f"{words or 'None'} of {total}, beside the commit measured before"
    with np.errstate(divide="ignore"):  # from or to zero is infinitely far
        far = np.log((rows["value"] / rows["was_value"].astype(float)).abs()).abs()
    rank = rows["change"].map({"worse": 0, "changed": 1, "better": 2})
    ranked = rows.assign(rank=rank, ours=rows["case"].map(is_ours), far=far)
    ranked = ranked.sort_values(["ours", "rank", "far"], ascending=[False, True, False])
    lines = [_change(report, row) for row in each(ranked.head(MAX_LISTED))]
    body = (
        table(["metric", "change", "", "was", "is", "beside", "machine"], lines, count=len(rows))
        if lines
        else ""
    )
    note = (
        f"{measured.count('same'):,} are the same: equal, or their 95 % intervals overlap, or "
        "neither a count nor with an interval. Each run had its own day and load: hybrid-kv "
        "compare measures a time that matters side by side."
    )
    return Section("Metrics", finding, body + paragraph(note))


def _change(report: Report, row: Any) -> list[str]:
    was = row._replace(value=row.was_value, ci_low=row.was_ci_low, ci_high=row.was_ci_high)
    change = (
        f"{100 * (row.value - row.was_value) / abs(row.was_value):+.3g} %" if row.was_value else "–"
    )
    return [
        row_name(row),
        change,
        coloured(row.change),
        with_small_interval(was),
        with_small_interval(row),
        report.link(row.was_commit, folder=""),
        name_of(row.machine or "any"),
    ]
