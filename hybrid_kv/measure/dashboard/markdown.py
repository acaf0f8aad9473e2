"""The rows as a short comment on a pull request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_kv.check.ci import plain
from hybrid_kv.measure.dashboard.failing import Failing
from hybrid_kv.measure.dashboard.report import COMMITS, Report
from hybrid_kv.measure.dashboard.verdicts import SuiteVerdict
from hybrid_kv.measure.dashboard.words import WORDS, change_text, commit_day, suite_name, title

# A workflow finds its own comment again by this first line.
MARKER = "<!-- hybrid-kv report -->"
MAX_LINES = 10


def summary(report: Report, machine: str = "") -> str:
    """Return verdicts and failures as GitHub's Markdown, with `MARKER` first.

    Args:
        machine: only rows of this one, and those without a machine; empty: all.
    """
    suites = report.verdicts_on(machine)
    if not suites:
        return (
            f"{MARKER}\n### hybrid-kv: no verdict\n\nNo check has run yet: `hybrid-kv guard "
            "--record`\n"
        )
    answers = report.answers(machine)
    lines = [MARKER, f"### hybrid-kv: {answers.verdict.text}", ""]
    lines += [f"Right? {answers.right.text}. Slower? {answers.slower.text}.", ""]
    if answers.command:
        lines += [f"Next: {plain(answers.command)}", ""]
    lines += _verdict_lines(report, suites)
    failing = report.failing_on(machine)
    if failing:
        lines += ["", *failing_lines(report, failing)]
    return "\n".join(lines) + "\n"


def failing_lines(report: Report, failing: Sequence[Failing]) -> list[str]:
    """Return some failures as a table: the first commit that failed, the last that passed."""
    lines = [
        "| failing | value | limit | since | author | last passed |",
        "|---|--:|--:|---|---|---|",
    ]
    for failure in failing[:MAX_LINES]:
        value = f"{change_text(failure.step)}, {failure.value}" if failure.step else failure.value
        info = report.infos.get(failure.first.commit)
        cells = [
            plain(title(failure.key)),
            plain(value),
            plain(str(failure.newest.parsed.get("limit", ""))),
        ]
        cells += [
            _run(report, failure.first),
            plain(info.author if info else ""),
            _run(report, failure.passed) if failure.passed else "never",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        *([f"\nand {len(failing) - MAX_LINES:,} more"] if len(failing) > MAX_LINES else []),
    ]


def _run(report: Report, row: Any) -> str:
    return f"{_commit(report, row)} {commit_day(row)}"


def _commit(report: Report, row: Any) -> str:
    """Return a commit, linked to its page if the report is on a site."""
    measured = report.commits.get(row.commit)
    short = plain(row.commit[:7])
    changes = " + changes" if row.dirty else ""
    if measured is None or not report.site:
        return short + changes
    return f"[{short}]({report.site}/{COMMITS}{measured.file}){changes}"


def _verdict_lines(report: Report, suites: list[SuiteVerdict]) -> list[str]:
    lines = ["| suite | | passed | commit | machine |", "|---|---|--:|---|---|"]
    for verdict in suites:
        commit = _commit(report, verdict.newest)
        count = f"{verdict.count('pass'):,} of {len(verdict.rows):,}"
        place = plain(verdict.machine or "any")
        word = WORDS[verdict.word]
        lines.append(
            f"| {plain(suite_name(verdict.suite))} | {word} | {count} | {commit} | {place} |"
        )
    return lines
