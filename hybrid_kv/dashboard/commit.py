"""A page for each commit, for its reviewer: what did this commit change? Tables alone: it has no script."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hybrid_kv.dashboard.data import COMPARE, SERIES, column, each, is_ours, newest_run
from hybrid_kv.dashboard.draw import name_of, paragraph, table, with_small_case, with_small_interval
from hybrid_kv.dashboard.frame import document, framed
from hybrid_kv.dashboard.measured import Measured
from hybrid_kv.dashboard.report import MAX_LISTED, MAX_MACHINES, Report, Section
from hybrid_kv.dashboard.sections.accuracy import PAIRED
from hybrid_kv.dashboard.sections.comparison import exact_figures, introduction
from hybrid_kv.dashboard.verdicts import SuiteVerdict, overall
from hybrid_kv.dashboard.words import WORDS, change_text, day, levels_text, percent_change, suite_name, with_unit
from hybrid_kv.files import write_whole

OUTCOMES = {"slower": "worse", "faster": "better", "inconclusive": "void"}


def build_commits(report: Report) -> Iterator[tuple[str, str]]:
    """Name of its file and HTML of each commit's page, one after the other."""
    found = list(report.commits.values())
    for before, one, after in zip([None, *found], found, [*found[1:], None], strict=False):
        yield one.file, _page(report, one, before, after)


def write_commits(report: Report, folder: Path) -> None:
    """All of them, each whole or not at all; those of an earlier report that are not among them are deleted.

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


def _page(report: Report, one: Measured, before: Measured | None, after: Measured | None) -> str:
    made = (_verdict(one), _steps(report, one), _comparison(report, one), _accuracy(one), _figures(report, one))
    body = _header(report, one, before, after) + f"<main>{framed([s for s in made if s])}</main>\n"
    return document(f"hybrid-kv {one.commit[:7]}", body)


def _header(report: Report, one: Measured, before: Measured | None, after: Measured | None) -> str:
    told, url = report.told.get(one.commit), report.url(one.commit)
    name = f"<code>{one.commit}</code>"
    said = [f'<a href="{url}">{name}</a>' if url else name]
    if told:
        said.append(f"{escape(told.author)}, {told.day}")
    machines = list(dict.fromkeys(one.rows["machine"][one.rows["machine"] != ""]))
    places = ", ".join(machines[:MAX_MACHINES])
    if len(machines) > MAX_MACHINES:
        places += f" and {len(machines) - MAX_MACHINES:,} more machines"
    first, last = one.rows["time_utc"].iloc[0][:10], one.rows["time_utc"].iloc[-1][:10]
    said.append(f"{len(one.rows):,} measurements of {first}{f' to {last}' if last != first else ''}")
    around = ['<a href="../index.html">all commits</a>']
    around += [f'before: <a href="{before.file}">{before.commit[:7]}</a>'] if before else []
    around += [f'after: <a href="{after.file}">{after.commit[:7]}</a>'] if after else []
    return f"""<header><h1>{escape(told.subject) if told and told.subject else f"Commit {one.commit[:7]}"}</h1>
<p>{"<br>".join([*said, escape(places)])}</p><p>{" · ".join(around)}</p></header>
"""


def _verdict(one: Measured) -> Section:
    found = one.verdicts
    word = overall(v.word for v in found)
    if word == "none":
        return Section("Verdict", "No check ran on it", "")
    passed, judged = sum(v.count("pass") for v in found), sum(len(v.rows) for v in found)
    rows = [
        [
            escape(suite_name(v.suite)),
            f'<b class="{v.word}">{WORDS[v.word]}</b>',
            f"{v.count('pass'):,} of {len(v.rows):,}",
            day(v.newest),
            name_of(v.machine or "any"),
        ]
        for v in found
    ]
    body = table(["suite", "", "passed", "on", "machine"], rows) + _not_passed(found)
    return Section("Verdict", f"{WORDS[word]}: {passed:,} of {judged:,} checks", body, word)


def _not_passed(found: Sequence[SuiteVerdict]) -> str:
    """Checks with another verdict than `pass`, as a table; empty without any."""
    bad = [row for v in found if v.word != "pass" for row in each(v.rows[v.rows["verdict"] != "pass"])]
    if not bad:
        return ""
    rows = [
        [
            with_small_case([getattr(row, name) for name in SERIES]),
            f'<b class="{row.verdict}">{WORDS[row.verdict]}</b>',
            escape(with_unit(row)),
            name_of(str(row.parsed.get("limit", ""))),
            f"{row.n:,}",
        ]
        for row in bad[:MAX_LISTED]
    ]
    return table(["what did not pass", "", "figure", "limit", "n"], rows) + _more(len(bad))


def _steps(report: Report, one: Measured) -> Section | None:
    if not one.steps:
        return None
    judged = [(series.judge(step), series, step) for series, step in one.steps]
    judged.sort(key=lambda line: (line[0] != "worse", line[1].key))
    rows = [
        [
            with_small_case(series.key),
            change_text(step),
            f'<b class="{word}">{word}</b>',
            escape(levels_text(series.unit, step)),
            report.link(series.row_before(step).commit, folder=""),
            name_of(series.key[4] or "any"),
        ]
        for word, series, step in judged[:MAX_LISTED]
    ]
    worse = sum(word == "worse" for word, *_ in judged)
    count = f"{len(judged):,} level{'s' * (len(judged) != 1)} changed"
    finding = f"{count} with it or since the run before it, {worse or 'none'} for the worse"
    body = table(["level", "change", "", "median", "run before", "machine"], rows) + _more(len(judged))
    return Section("Steps", finding, body, "fail" if worse else "")


def _comparison(report: Report, one: Measured) -> Section | None:
    rows = one.rows[one.rows["suite"] == COMPARE]
    if rows.empty:
        return None
    timed = rows[rows["unit"] == "time ratio"]
    slower = int((timed["verdict"] == "fail").sum())
    finding = f"{slower or 'None'} of {len(timed):,} benchmarks {'is' if slower <= 1 else 'are'} slower"
    body = report.by_machine(rows, lambda own: _compared(newest_run(own), report))
    return Section("Comparison", finding, body, "fail" if (rows["verdict"] == "fail").any() else "")


def _compared(rows: pd.DataFrame, report: Report) -> str:
    rows = rows.assign(outcome=column(rows, "outcome", str).fillna("same"))
    timed = rows[(rows["unit"] == "time ratio") & (rows["outcome"] != "same")]
    far = timed.reindex(timed["value"].map(math.log).abs().sort_values(ascending=False).index)
    lines = [
        [
            with_small_case([getattr(row, name) for name in SERIES]),
            f'<b class="{OUTCOMES.get(row.outcome, "changed")}">{escape(row.outcome)}</b>',
            percent_change(row),
            f"{row.n:,}",
        ]
        for row in each(far[:MAX_LISTED])
    ]
    text = introduction(rows, partial(report.link, folder=""))
    text += table(["time", "", "change", "n"], lines) if lines else paragraph("Every time is the same.")
    return text + _more(len(far)) + exact_figures(rows)


def _accuracy(one: Measured) -> Section | None:
    rows = newest_run(one.rows[(one.rows["suite"] == "accuracy") & ~one.rows["metric"].isin(PAIRED)])
    if rows.empty:
        return None
    strict = rows[rows["metric"] == "exact_match_strict"]
    finding = ", ".join(f"{100 * row.value:.1f} % of {row.n:,} questions of {row.benchmark}" for row in each(strict))
    lines = [
        [with_small_case([getattr(row, name) for name in SERIES]), with_small_interval(row), f"{row.n:,}"]
        for row in each(rows[:MAX_LISTED])
    ]
    body = table(["answers", "figure", "n"], lines) + _more(len(rows))
    return Section("Accuracy", f"Right answers: {finding}" if finding else "Answers to the task's questions", body)


def _figures(report: Report, one: Measured) -> Section:
    rows = one.changes[one.changes["change"] != "same"]
    if one.changes.empty:
        return Section("Figures", "No commit before it was measured in the same series", "")
    counts = ", ".join(f"{count:,} {word}" for word in ("worse", "better", "changed") if (count := one.count(word)))
    finding = f"{counts or 'None'} of {len(one.changes):,} figures, beside the commit measured before"
    with np.errstate(divide="ignore"):  # from or to zero is infinitely far
        far = np.log((rows["value"] / rows["was_value"].astype(float)).abs()).abs()
    rank = rows["change"].map({"worse": 0, "changed": 1, "better": 2})
    ranked = rows.assign(rank=rank, ours=rows["case"].map(is_ours), far=far)
    first = ranked.sort_values(["ours", "rank", "far"], ascending=[False, True, False])[:MAX_LISTED]
    lines = [_change(report, row) for row in each(first)]
    body = table(["figure", "change", "", "was", "is", "beside", "machine"], lines) if lines else ""
    note = (
        f"{one.count('same'):,} are the same: equal, or their 95 % intervals overlap, or neither a count nor with an "
        "interval. Each run had its own day and load: hybrid-kv compare measures a time that matters side by side."
    )
    return Section("Figures", finding, body + _more(len(rows)) + paragraph(note))


def _change(report: Report, row: Any) -> list[str]:
    was = row._replace(value=row.was_value, ci_low=row.was_ci_low, ci_high=row.was_ci_high)
    change = f"{100 * (row.value - row.was_value) / abs(row.was_value):+.3g} %" if row.was_value else "–"
    return [
        with_small_case([getattr(row, name) for name in SERIES]),
        change,
        f'<b class="{row.change}">{row.change}</b>',
        with_small_interval(was),
        with_small_interval(row),
        report.link(row.was_commit, folder=""),
        name_of(row.machine or "any"),
    ]


def _more(count: int) -> str:
    return paragraph(f"and {count - MAX_LISTED:,} more") if count > MAX_LISTED else ""
