"""The page: one `index.html` with its data, its script and plotly inside; it opens from a disk or an archive."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from hybrid_kv.dashboard.data import Results
from hybrid_kv.dashboard.draw import code, table
from hybrid_kv.dashboard.report import Report, Section
from hybrid_kv.dashboard.sections import sections
from hybrid_kv.errors import ConfigError, HybridKVError
from hybrid_kv.files import write_whole
from hybrid_kv.results import NO_HEAD, Head

_FOLDER = Path(__file__).parent
ASV_PAGES = "asv/index.html"  # beside the page
ALL_ROWS = "rows.parquet"


def build_page(
    results: Results,
    repository: str = "",
    machine: str = "",
    asv: bool = False,
    head: Head = NO_HEAD,
    download: bool = False,
) -> str:
    """The whole page as HTML.

    Args:
        repository: URL of a repository whose commits are at `URL/commit/SHA`; without one they are no links.
        machine: that the filter starts with; empty: all.
        asv: asv's own pages are in the folder `asv` beside it, to be linked.
        head: what is checked out.
        download: `rows.parquet` is beside it, to be linked.

    Raises:
        ConfigError: `repository` is no http(s) URL, or no row is from `machine`.
        HybridKVError: plotly is not installed.
    """
    if repository and not re.fullmatch(r"https?://[^\s\"'<>]+", repository):
        raise ConfigError(f"{repository!r} is no URL of a repository; write https://HOST/OWNER/NAME")
    repository = repository.rstrip("/")
    if machine and machine not in results.machines:
        raise ConfigError(f"no row is from machine {machine!r}; there are {', '.join(results.machines) or 'none'}")
    plotly = _plotly()

    report = Report(results, head, repository)
    found = [made for section in sections() if (made := section(report)) is not None]
    if report.missing.notes:
        rows = [[escape(what), code(command)] for what, command in report.missing.notes]
        found.append(Section("Missing", "What has not been measured yet", table(["what", "makes its rows"], rows)))
    return _html(report, found, machine, plotly, asv, download)


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise HybridKVError("the report is drawn by plotly, which is not installed; run: pip install plotly") from None
    return str(get_plotlyjs())


def write_page(html: str, folder: Path) -> Path:
    """`index.html` in a folder, whole or not at all.

    Raises:
        HybridKVError: it cannot be written.
    """
    target = folder / "index.html"
    write_whole(target, html)
    return target


def _html(report: Report, found: list[Section], machine: str, plotly: str, asv: bool, download: bool) -> str:
    results, repository = report.results, report.repository
    newest = f"rows up to {results.rows['time'].iloc[-1]:%Y-%m-%d %H:%M} UTC" if len(results.rows) else "no rows yet"
    files = ", ".join(results.files) or "no file"
    foreign = f" Of another kind, not read: {', '.join(results.foreign)}." if results.foreign else ""
    options = "".join(
        f"<option{' selected' if name == machine else ''}>{escape(name)}</option>" for name in results.machines
    )
    nav = "".join(f'<a href="#{s.anchor}">{escape(s.name)}</a>' for s in found)
    body = "".join(
        f'<section id="{s.anchor}"><p class="kind">{escape(s.name)}</p>'
        f'<h2 class="{s.word}">{escape(s.finding)}</h2>{s.body}</section>'
        for s in found
    )
    held = (
        f" Of {results.total:,} measurements the page holds {len(results.rows):,}: {results.rule}."
        if results.rule
        else ""
    )
    columns = f'; <a href="{escape(repository)}/blob/HEAD/docs/results.md">their columns</a>' if repository else ""
    rows = f' Download: <a href="{ALL_ROWS}" download>all rows as Parquet</a>{columns}.' if download else ""
    pages = f' By commit: <a href="{ASV_PAGES}">pages of asv</a>, which need the network.' if asv else ""
    # Nothing may be fetched: the page is whole, and stays so.
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>hybrid-kv report</title>
<style>{_text("page.css")}</style>
</head>
<body>
<header><h1>hybrid-kv</h1>
<p>Is the cache still right, and still fast? {results.total:,} measurements, {newest}.</p></header>
<div class="bar"><div><nav aria-label="sections">{nav}</nav>
<label>machine <select id="machine"><option value="">all</option>{options}</select></label></div></div>
<main>{body}</main>
<footer><p>Drawn from {escape(files)}.{escape(foreign)}{held}{rows}{pages}</p></footer>
<script>{plotly}</script>
<script>{_text("page.js")}</script>
</body>
</html>
"""


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
