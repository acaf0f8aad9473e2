"""What is red now, since when, and who made the first red commit."""

from __future__ import annotations

from html import escape
from typing import Any

from hybrid_kv.dashboard.draw import name_of, paragraph, table, with_small_case
from hybrid_kv.dashboard.red import Red, counted
from hybrid_kv.dashboard.report import MAX_LISTED, Report, Section
from hybrid_kv.dashboard.words import WORDS, change_text, day, levels_text, with_unit

PLACE = 5


def section(report: Report) -> Section | None:
    red = report.red
    if not red:
        judged = (report.results.rows["verdict"] != "").any()
        return Section("Red now", counted(red), paragraph(NOTHING)) if judged else None
    rows = [_line(report, one) for one in red[:MAX_LISTED]]
    attributes = [f'data-machine="{escape(one.key[4])}"' for one in red[:MAX_LISTED]]
    body = table(["what is red", "", "since", "last green", "figure", "limit", "n"], rows, attributes)
    if len(red) > MAX_LISTED:
        body += paragraph(f"and {len(red) - MAX_LISTED:,} more")
    return Section("Red now", counted(red), body + paragraph(RULE), red[0].word)


NOTHING = "Every check of the newest runs passed, and of what no check judges no level is worse than it was."
RULE = (
    "A check is red since the first of its last runs in a row that did not pass, a level since a step for the worse "
    "that no later level undid; where a check judges the level, its word counts. The cause lies between the last green "
    "commit and the first red one, whose author is named: hybrid-kv bisect GREEN RED finds it."
)


def _line(report: Report, one: Red) -> list[str]:
    if one.step:
        word, figure = f"{change_text(one.step)} worse", levels_text(one.newest.unit, one.step)
    else:
        word, figure = WORDS[one.word], with_unit(one.newest)
    told = report.told.get(one.first.commit)
    by = f"<br><small>{escape(told.author)}</small>" if told else ""
    return [
        with_small_case(one.key),
        f'<b class="{one.word}">{escape(word)}</b>',
        _run(report, one.first) + by,
        _run(report, one.green) if one.green else "never",
        escape(figure),
        name_of(str(one.newest.parsed.get("limit", ""))),
        f"{one.newest.n:,}",
    ]


def _run(report: Report, row: Any) -> str:
    return report.link(row.commit + "-dirty" * row.dirty) + f", <time>{day(row)}</time>"
