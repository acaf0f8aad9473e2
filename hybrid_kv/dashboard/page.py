"""The page: one `index.html` with its data, its script and plotly inside; it opens from a disk or an archive."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from hybrid_kv.dashboard.draw import code, table
from hybrid_kv.dashboard.report import Report, Section
from hybrid_kv.dashboard.sections import SECTIONS
from hybrid_kv.errors import ConfigError, require

ASV_PAGES = "asv/index.html"  # beside the page
ALL_ROWS = "rows.parquet"
_FOLDER = Path(__file__).parent


def build_page(report: Report, machine: str = "", asv: bool = False) -> str:
    """The whole page as HTML; it links `rows.parquet`, which must be beside it.

    Args:
        machine: that the filter starts with; empty: all.
        asv: asv's own pages are in the folder `asv` beside it, to be linked.

    Raises:
        ConfigError: no row is from `machine`.
        HybridKVError: plotly is not installed.
    """
    machines = report.results.machines
    if machine and machine not in machines:
        raise ConfigError(f"no row is from machine {machine!r}; there are {', '.join(machines) or 'no rows'}")
    require("plotly")
    from plotly.offline import get_plotlyjs

    made = {section: section(report) for section in SECTIONS}
    found = [section for section in made.values() if section is not None]
    commands = [
        [escape(section.__name__.replace("_", " ")), code(command)]
        for section, command in SECTIONS.items()
        if command and made[section] is None
    ]
    if commands:
        found.append(Section("Missing", "What has not been measured yet", table(["section", "measured by"], commands)))
    body = _header(report, found, machine) + f"<main>{''.join(s.html for s in found)}</main>\n"
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    return document("hybrid-kv report", body + _footer(report, asv), [get_plotlyjs(), script])


def document(title: str, body: str, scripts: Sequence[str] = ()) -> str:
    """A whole page as HTML that fetches nothing; without scripts none may run in it.

    Args:
        body: HTML.
        scripts: texts of scripts, run at its end.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:"
    if scripts:
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
{"".join(f"<script>{script}</script>{chr(10)}" for script in scripts)}</body>
</html>
"""


def _header(report: Report, found: list[Section], machine: str) -> str:
    results = report.results
    newest = f"rows up to {results.rows['time'].iloc[-1]:%Y-%m-%d %H:%M} UTC" if len(results.rows) else "no rows yet"
    options = "".join(
        f"<option{' selected' if name == machine else ''}>{escape(name)}</option>" for name in results.machines
    )
    nav = "".join(f'<a href="#{s.anchor}">{escape(s.name)}</a>' for s in found)
    return f"""<header><h1>hybrid-kv</h1>
<p>Is the cache still right, and still fast? {results.total:,} measurements, {newest}.</p></header>
<div class="bar"><div><nav aria-label="sections">{nav}</nav>
<label>machine <select id="machine"><option value="">all</option>{options}</select></label></div></div>
"""


def _footer(report: Report, asv: bool) -> str:
    results, repository = report.results, escape(report.repository)
    parts = [f"Drawn from {escape(', '.join(results.files) or 'no file')}."]
    if results.foreign:
        parts.append(f"Of another kind, not read: {escape(', '.join(results.foreign))}.")
    if results.rule:
        parts.append(f"Of {results.total:,} measurements the page holds {len(results.rows):,}: {results.rule}.")
    columns = f'; <a href="{repository}/blob/HEAD/docs/results.md">their columns</a>' if repository else ""
    parts.append(f'Download: <a href="{ALL_ROWS}" download>all rows as Parquet</a>{columns}.')
    if asv:
        parts.append(f'By commit: <a href="{ASV_PAGES}">pages of asv</a>, which need the network.')
    return f"<footer><p>{' '.join(parts)}</p></footer>"
