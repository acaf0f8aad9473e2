"""What passed and what did not, in the newest run of each suite on each machine."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hybrid_kv.dashboard.data import SuiteVerdict, each, verdicts
from hybrid_kv.dashboard.draw import paragraph, table
from hybrid_kv.dashboard.report import MAX_LISTED, Report, Section
from hybrid_kv.dashboard.words import WORDS, day, suite_name, verdict_line, with_unit

PLACE = 10


def section(report: Report) -> Section:
    found = verdicts(report.results.rows)
    if not found:
        note = report.missing.note("a verdict", "hybrid-kv guard")
        return Section("Verdict", "No check has said pass or fail yet", note)
    tiles = "".join(_tile(report, v) for v in found)
    return Section("Verdict", verdict_line(found), f'<ul class="tiles">{tiles}</ul>{_not_passed(found)}')


def _tile(report: Report, v: SuiteVerdict) -> str:
    commit = report.link(v.newest.commit) + (" + changes" if v.newest.dirty else "")
    return (
        f'<li class="tile" data-word="{v.word}" data-machine="{escape(v.machine)}" data-passed="{v.count("pass")}" '
        f'data-judged="{len(v.rows)}"><b class="{v.word}">{WORDS[v.word]}</b>'
        f'<span class="name">{escape(suite_name(v))}</span>'
        f"<span>{v.count('pass'):,} of {len(v.rows):,} checks</span>"
        f"<span class=where>{commit}, {day(v.newest)}</span>"
        f"<span class=where>{escape(v.machine) or 'any machine'}</span></li>"
    )


def _not_passed(found: Sequence[SuiteVerdict]) -> str:
    bad = [(v, row) for v in found for row in each(v.rows[v.rows["verdict"] != "pass"])]
    if not bad:
        return ""
    rows = [
        [
            f"{escape(v.suite)}: {escape(row.benchmark)}"
            f"<br><small>{escape(', '.join(filter(None, [row.metric, row.case])))}</small>",
            f'<b class="{row.verdict}">{WORDS[row.verdict]}</b>',
            with_unit(row),
            escape(str(row.parsed.get("limit", ""))),
            f"{row.n:,}",
        ]
        for v, row in bad[:MAX_LISTED]
    ]
    attributes = [f'data-machine="{escape(v.machine)}"' for v, _ in bad[:MAX_LISTED]]
    listed = table(["what did not pass", "", "figure", "limit", "n"], rows, attributes)
    if len(bad) > MAX_LISTED:
        listed += paragraph(f"and {len(bad) - MAX_LISTED:,} more")
    return listed
