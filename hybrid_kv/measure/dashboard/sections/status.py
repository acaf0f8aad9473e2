"""All that is failing, the verdict of the newest runs, and the commits that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from hybrid_kv.measure.dashboard.changes import MAX_COMMITS, Measured
from hybrid_kv.measure.dashboard.data import column
from hybrid_kv.measure.dashboard.draw import (
    coloured,
    folded,
    name_of,
    paragraph,
    table,
    with_small_case,
)
from hybrid_kv.measure.dashboard.failing import Failing, counted
from hybrid_kv.measure.dashboard.report import Report, Section
from hybrid_kv.measure.dashboard.verdicts import SuiteVerdict, command_of, overall
from hybrid_kv.measure.dashboard.words import WORDS, commit_day, day, suite_name

NOTHING = (
    "Every check of the newest runs passed, and no level that has no check is worse than it was."
)
RULE = (
    "A check fails since the first of its last runs in a row that did not pass, a level since a "
    "step for the worse that was not reverted; where a check judges the level, its verdict counts. "
    "The cause lies between the last commit that passed and the first that failed: hybrid-kv "
    "bisect GOOD BAD finds it."
)
STALE_RULE = (
    "A run counts for HEAD as long as none of the files that it measures has changed since: the "
    "modules that its suite imports, directly or not, and their data. Otherwise it is stale, by so "
    "many commits that changed one of them."
)
MAX_UNFOLDED = 8  # commits


def failing_now(report: Report) -> Section | None:
    """Return all that is failing, since which commit, and its author."""
    failing = report.failing
    if not failing:
        judged = (report.results.rows["verdict"] != "").any()
        return Section("Failing now", counted(failing), paragraph(NOTHING)) if judged else None
    attributes = [f'data-machine="{escape(failure.key[4])}"' for failure in failing]
    head = ["what is failing", "", "since", "last passed", "value", "limit", "n"]
    body = table(head, [_failure(report, failure) for failure in failing], attributes)
    return Section("Failing now", counted(failing), body + paragraph(RULE), failing[0].word)


def _failure(report: Report, failure: Failing) -> list[str]:
    info = report.infos.get(failure.first.commit)
    author = f"<br><small>{escape(info.author)}</small>" if info else ""
    return [
        with_small_case(failure.key),
        coloured(failure.word, failure.text),
        _run(report, failure.first) + author,
        _run(report, failure.passed) if failure.passed else "never",
        escape(failure.value),
        name_of(str(failure.newest.parsed.get("limit", ""))),
        f"{failure.newest.n:,}",
    ]


def _run(report: Report, row: Any) -> str:
    return report.link(row.commit + "-dirty" * row.dirty) + f", <time>{commit_day(row)}</time>"


def suites(report: Report) -> Section | None:
    """Return what passed and what did not, in the newest run of each suite on each machine."""
    verdicts = report.verdicts
    if not verdicts:
        return None
    passed = sum(v.count("pass") for v in verdicts)
    judged = sum(len(v.rows) for v in verdicts)
    finding = f"{passed:,} of {judged:,} checks of the newest runs passed"
    word = overall(v.word for v in verdicts)
    body = f'<ul class="tiles">{"".join(_tile(report, v) for v in verdicts)}</ul>' + paragraph(
        STALE_RULE
    )
    return Section("Suites", finding, body, word)


def _tile(report: Report, v: SuiteVerdict) -> str:
    commit = report.link(v.newest.commit) + (" + changes" if v.newest.dirty else "")
    mark = next((text for text in column(v.rows, "unfit", str) if text), None)
    notes = [f"{v.fresh.text}: {command_of(v.suite)}"] if v.fresh and v.is_stale else []
    notes += [f"not fit for times: {mark}"] if mark else []
    return (
        f'<li class="tile" data-machine="{escape(v.machine)}">{coloured(v.word, WORDS[v.word])}'
        f'<span class="name">{escape(suite_name(v.suite))}</span>'
        f"<span>{v.count('pass'):,} of {len(v.rows):,} checks</span>"
        f"<span class=where>{commit}, <time>{day(v.newest)}</time></span>"
        f"{''.join(f'<span class=where>{escape(note)}</span>' for note in notes)}"
        f"<span class=where>{escape(v.machine) or 'any machine'}</span></li>"
    )


def commits(report: Report) -> Section | None:
    """Return the commits that were measured, with a link to a page for each."""
    newest = list(report.commits.values())[::-1]
    if not newest:
        return None
    body = _commit_table(report, newest[:MAX_UNFOLDED])
    older = newest[MAX_UNFOLDED:]
    if older:
        body += folded(f"{len(older)} older ones", _commit_table(report, older))
    body += paragraph(
        "Metrics are compared with those of the commit that was measured before. A commit is here "
        f"if it was measured without changes on top; the newest {MAX_COMMITS} of them have a page."
    )
    changed = sum(commit.count("same") < len(commit.changes) for commit in newest)
    return Section(
        "Commits", f"{changed} of the {len(newest)} newest commits changed a metric", body
    )


def _commit_table(report: Report, measured: Sequence[Measured]) -> str:
    words = ["worse", "better", "changed", "same"]
    lines = []
    for commit in measured:
        info = report.infos.get(commit.commit)
        word = overall(v.word for v in commit.verdicts)
        subject = f"<br><small>{escape(f'{info.subject} ({info.author})')}</small>" if info else ""
        lines.append(
            [
                report.link(commit.commit) + subject,
                day(commit.rows.iloc[0]),
                coloured(word, WORDS[word]) if word != "none" else "–",
                *(f"{commit.count(change):,}" if len(commit.changes) else "–" for change in words),
            ]
        )
    return table(["commit", "measured", "checks", *words], lines)
