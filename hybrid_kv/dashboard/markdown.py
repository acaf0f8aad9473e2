"""The same rows as a short comment on a pull request."""

from __future__ import annotations

from typing import Any

from hybrid_kv.dashboard.data import Results, Series, each, histories
from hybrid_kv.dashboard.steps import Step
from hybrid_kv.dashboard.verdicts import SuiteVerdict, headline, verdicts
from hybrid_kv.dashboard.words import WORDS, change_text, day, suite_name, title, with_unit
from hybrid_kv.results import NO_HEAD, Head
from hybrid_kv.results.markdown import plain

# A workflow finds its own comment again by this first line.
MARKER = "<!-- hybrid-kv report -->"
MAX_LINES = 10


def summary(results: Results, machine: str = "", head: Head = NO_HEAD) -> str:
    """Verdicts, what failed and steps for the worse, as GitHub's Markdown with `MARKER` first.

    Args:
        machine: only rows of this one, and those that belong to none; empty: all.
        head: what is checked out.
    """
    rows = results.of_machine(machine)
    found = verdicts(rows)
    if not found:
        return f"{MARKER}\n### hybrid-kv: no verdict\n\nNo check has run yet: `hybrid-kv guard --record`\n"
    whole = headline(found, head)
    # GitHub draws a warning in amber.
    age = [f"> [!WARNING]\n> {whole.age}"] if whole.word == "stale" else [whole.age]
    lines = [MARKER, f"### hybrid-kv: {whole.finding}", "", *age, "", *_verdict_lines(found, head)]
    bad = [row for verdict in found for row in each(verdict.rows[verdict.rows["verdict"] != "pass"])]
    if bad:
        lines += ["", "| not passed | figure | limit | n |", "|---|--:|--:|--:|", *map(_failed_line, bad[:MAX_LINES])]
        lines += more(len(bad))
    worse = [(s, step) for s in histories(rows) for step in s.steps if s.judge(step) == "worse"]
    worse.sort(key=lambda pair: pair[0].step_row(pair[1]).time, reverse=True)
    if worse:
        lines += ["", "| level changed for the worse | since | change |", "|---|---|--:|"]
        lines += [_step_line(*pair) for pair in worse[:MAX_LINES]]
        lines += more(len(worse))
    return "\n".join(lines) + "\n"


def _verdict_lines(found: list[SuiteVerdict], head: Head) -> list[str]:
    lines = ["| suite | | passed | commit | machine |", "|---|---|--:|---|---|"]
    for verdict in found:
        row = verdict.newest
        commit = plain(row.commit[:7]) + (" + changes" if row.dirty else "")
        count = f"{verdict.count('pass'):,} of {len(verdict.rows):,}"
        place = plain(verdict.machine or "any")
        word = WORDS[headline([verdict], head).word]
        lines.append(f"| {plain(suite_name(verdict.suite))} | {word} | {count} | {commit} | {place} |")
    return lines


def _failed_line(row: Any) -> str:
    name = ", ".join(filter(None, [f"{row.suite}: {row.benchmark}", row.metric, row.case]))
    return f"| {plain(name)} | {plain(with_unit(row))} | {plain(str(row.parsed.get('limit', '')))} | {row.n:,} |"


def _step_line(series: Series, step: Step) -> str:
    row = series.step_row(step)
    return f"| {plain(title(series))} | {plain(row.commit[:7])} {day(row)} | {change_text(step)} |"


def more(count: int) -> list[str]:
    """How many lines were left out."""
    return [f"\nand {count - MAX_LINES:,} more"] if count > MAX_LINES else []
