"""The page: an `index.html` with its charts and its script inside, to be opened from a disk.

First screen: the verdict on HEAD with four answers, then the charts; below what is failing;
everything else is folded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path

from hybrid_kv.errors import ConfigError
from hybrid_kv.measure.dashboard.cards import cards
from hybrid_kv.measure.dashboard.draw import code, table
from hybrid_kv.measure.dashboard.report import MAX_MACHINES, Report, Section
from hybrid_kv.measure.dashboard.sections import SECTIONS
from hybrid_kv.measure.dashboard.sections.status import failing_now

ASV_PAGES = "asv/index.html"  # next to the page
ALL_ROWS = "rows.parquet"
_FOLDER = Path(__file__).parent


def build_page(report: Report, machine: str = "", asv: bool = False) -> str:
    """Return the whole page as HTML; it links `rows.parquet` next to it.

    Args:
        machine: that the filter starts with; empty: all.
        asv: asv's own pages are in the folder `asv` next to it, to be linked.

    Raises:
        ConfigError: no row is from `machine`.
    """
    machines = report.results.machines
    if machine and machine not in machines:
        raise ConfigError(
            f"no row is from machine {machine!r}; there are {', '.join(machines) or 'no rows'}"
        )
    made = {section: section(report) for section in SECTIONS}
    failing = made.pop(failing_now)
    folded = [section for section in made.values() if section is not None] + _missing(made)
    pages = ASV_PAGES if asv else ""
    main = [
        _views(report, machine, partial(_verdict, report)),
        _views(report, machine, partial(_charts, report, asv=pages)),
        failing.html if failing else "",
        *(section.folded for section in folded),
    ]
    body = f"{_header(report, machine)}<main>{''.join(main)}</main>\n{_footer(report, pages)}"
    return document("hybrid-kv report", body, (_FOLDER / "page.js").read_text(encoding="utf-8"))


def document(title: str, body: str, script: str = "") -> str:
    """Return a whole page as HTML that fetches nothing.

    Without a script none may run in it.

    Args:
        body: HTML.
        script: its text, run at the end.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    if script:
        policy += "; script-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{(_FOLDER / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
{body}
{f"<script>{script}</script>{chr(10)}" if script else ""}</body>
</html>
"""


def _views(report: Report, machine: str, block: Callable[[str], str]) -> str:
    """Return a block about all machines, and one for each of the filter; one of them is seen."""
    names = ["", *report.results.machines[:MAX_MACHINES]]
    seen = machine if machine in names else ""
    return "".join(
        f'<div data-view="{escape(name)}"{"" if name == seen else " hidden"}>{block(name)}</div>'
        for name in names
    )


def _verdict(report: Report, machine: str) -> str:
    answers = report.answers(machine)
    cause = answers.cause
    since = "–"
    if cause is not None:
        before = report.link(cause.passed.commit) if cause.passed else "the first run"
        since = f"{before} … {report.link(cause.first.commit)}"
        info = report.infos.get(cause.first.commit)
        since += f" <small>{escape(info.subject)}</small>" if info else ""
    command = (
        f"{code(answers.command)} <button type=button data-copy>copy</button>"
        if answers.command
        else "nothing"
    )
    old = ", ".join(
        f"{suite.suite} by {suite.fresh.distance}" for suite in answers.stale if suite.fresh
    )
    stale = f"<small>stale: {escape(old)}</small>" if old else ""
    right = f'<b class="{answers.right.word}">{escape(answers.right.text)}</b>'
    slower = f'<b class="{answers.slower.word}">{escape(answers.slower.text)}</b>'
    lines = {
        "Is HEAD right?": f"{right}{stale}",
        "Is it slower?": slower,
        "Since which commit?": since,
        "What to run next?": command,
    }
    items = "".join(
        f"<div><dt>{question}</dt><dd>{answer}</dd></div>" for question, answer in lines.items()
    )
    return (
        f'<section class="verdict {answers.verdict.word}"><h2>{escape(answers.verdict.text)}</h2>'
        f'<dl class="answers">{items}</dl></section>'
    )


def _charts(report: Report, machine: str, asv: str) -> str:
    return (
        '<section class="cards" aria-label="charts">'
        f"{''.join(cards(report, machine, asv))}</section>"
    )


def _missing(made: dict[Callable[[Report], Section | None], Section | None]) -> list[Section]:
    commands = [
        [escape(section.__name__.replace("_", " ")), code(command)]
        for section, command in SECTIONS.items()
        if command and section in made and made[section] is None
    ]
    body = table(["section", "measured by"], commands)
    return [Section("Missing", "What has not been measured yet", body)] if commands else []


def _header(report: Report, machine: str) -> str:
    results = report.results
    info = report.infos.get(report.head.commit)
    newest = (
        f"up to {results.rows['time'].max():%m-%d %H:%M} UTC"
        if len(results.rows)
        else "no rows yet"
    )
    place = f"HEAD {report.link(report.head.commit)}" if report.head.commit else "no checkout"
    subject = f" {escape(info.subject)}" if info else ""
    options = "".join(
        f"<option{' selected' if name == machine else ''}>{escape(name)}</option>"
        for name in results.machines
    )
    return f"""<header><h1>hybrid-kv</h1><p>{place}{subject} · {results.total:,} rows, {newest}</p>
<label>machine <select id="machine"><option value="">all</option>{options}</select></label></header>
"""


def _footer(report: Report, asv: str) -> str:
    results = report.results
    repository = escape(report.repository)
    parts = [f"Drawn from {escape(', '.join(results.files) or 'no file')}."]
    if results.foreign:
        parts.append(f"Of another kind, not read: {escape(', '.join(results.foreign))}.")
    if results.rule:
        parts.append(
            f"Of {results.total:,} measurements the page holds {len(results.rows):,}: "
            f"{results.rule}."
        )
    columns = (
        f'; <a href="{repository}/blob/HEAD/docs/results.md">their columns</a>'
        if repository
        else ""
    )
    parts.append(f'Download: <a href="{ALL_ROWS}" download>all rows as Parquet</a>{columns}.')
    if asv:
        parts.append(f'By commit: <a href="{asv}">pages of asv</a>, which need the network.')
    return f"<footer><p>{' '.join(parts)}</p></footer>"
