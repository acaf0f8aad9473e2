"""The same rows as a short comment on a pull request."""

from __future__ import annotations

from hybrid_kv.dashboard.data import Results, each, histories, verdicts
from hybrid_kv.dashboard.words import WORDS, change_text, day, suite_name, title, verdict_line, with_unit

# A workflow finds its own comment again by this first line.
MARKER = "<!-- hybrid-kv report -->"
MAX_LINES = 10


def summary(results: Results, machine: str = "") -> str:
    """Verdicts, what failed and steps for the worse, as GitHub's Markdown with `MARKER` first.

    Args:
        machine: only rows of this one, and those that belong to none; empty: all.
    """
    rows = results.rows
    if machine:
        rows = rows[rows["machine"].isin([machine, ""])]
    found = verdicts(rows)
    if not found:
        return f"{MARKER}\n### hybrid-kv: no verdict\n\nNo check has run yet: `hybrid-kv guard`\n"
    lines = [MARKER, f"### hybrid-kv: {verdict_line(found)}", "", "| suite | | passed | commit | machine |"]
    lines.append("|---|---|--:|---|---|")
    for verdict in found:
        row = verdict.newest
        commit = (f"`{row.commit[:7]}`" if row.commit else "–") + (" + changes" if row.dirty else "")
        count = f"{verdict.count('pass'):,} of {len(verdict.rows):,}"
        word, place = WORDS[verdict.word], cell(verdict.machine) or "any"
        lines.append(f"| {cell(suite_name(verdict))} | {word} | {count} | {commit} | {place} |")
    bad = [row for verdict in found for row in each(verdict.rows[verdict.rows["verdict"] != "pass"])]
    if bad:
        lines += ["", "| not passed | figure | limit | n |", "|---|--:|--:|--:|"]
        for row in bad[:MAX_LINES]:
            name = ", ".join(filter(None, [f"{row.suite}: {row.benchmark}", row.metric, row.case]))
            limit = cell(str(row.parsed.get("limit", "")))
            lines.append(f"| {cell(name)} | {cell(with_unit(row))} | {limit} | {row.n:,} |")
        lines += more(len(bad))
    worse = [(s, step) for s in histories(rows) for step in s.steps if s.judge(step) == "worse"]
    worse.sort(key=lambda pair: pair[0].step_row(pair[1]).time, reverse=True)
    if worse:
        lines += ["", "| level changed for the worse | since | change |", "|---|---|--:|"]
        for series, step in worse[:MAX_LINES]:
            row = series.step_row(step)
            lines.append(f"| {cell(title(series))} | `{row.commit[:7]}` {day(row)} | {change_text(step)} |")
        lines += more(len(worse))
    return "\n".join(lines) + "\n"


def more(count: int) -> list[str]:
    """How many lines were left out."""
    return [f"\nand {count - MAX_LINES:,} more"] if count > MAX_LINES else []


def cell(text: str) -> str:
    """Text that cannot leave its cell, start a link or mention anybody."""
    for sign in "\\`*_[]<>|@#":
        text = text.replace(sign, f"\\{sign}" if sign != "@" else "@\u200b")
    return " ".join(text.split())
