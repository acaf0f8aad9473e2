"""The commits that were measured, with a link to a page for each."""

from __future__ import annotations

from html import escape

from hybrid_kv.dashboard.draw import paragraph, table
from hybrid_kv.dashboard.measured import MAX_COMMITS, Measured
from hybrid_kv.dashboard.report import Report, Section
from hybrid_kv.dashboard.verdicts import overall
from hybrid_kv.dashboard.words import WORDS, day

PLACE = 22
MAX_UNFOLDED = 8
HEAD = ["commit", "measured", "checks", "worse", "better", "changed", "same"]


def section(report: Report) -> Section | None:
    newest = list(report.commits.values())[::-1]
    if not newest:
        return None
    rows = [_line(report, one) for one in newest]
    body = table(HEAD, rows[:MAX_UNFOLDED])
    if len(rows) > MAX_UNFOLDED:
        older = table(HEAD, rows[MAX_UNFOLDED:])
        body += f"<details><summary>{len(rows) - MAX_UNFOLDED} older ones</summary>{older}</details>"
    body += paragraph(
        "Figures are held against those of the commit that was measured before. A commit is here if it was measured "
        f"without changes on top; the newest {MAX_COMMITS} of them have a page."
    )
    changed = sum(bool(len(one.changes)) and one.count("same") < len(one.changes) for one in newest)
    return Section("Commits", f"{changed} of the {len(newest)} newest commits changed a figure", body)


def _line(report: Report, one: Measured) -> list[str]:
    told = report.told.get(one.commit)
    about = f"<br><small>{escape(f'{told.subject} ({told.author})')}</small>" if told else ""
    word = overall(v.word for v in one.verdicts)
    return [
        report.link(one.commit) + about,
        day(one.rows.iloc[0]),
        f'<b class="{word}">{WORDS[word]}</b>' if word != "none" else "–",
        *(f"{one.count(change):,}" if len(one.changes) else "–" for change in ("worse", "better", "changed", "same")),
    ]
