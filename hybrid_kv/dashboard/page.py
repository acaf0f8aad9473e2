"""The page: one `index.html` with its data, its script and plotly inside; it opens from a disk or an archive."""

from __future__ import annotations

from html import escape

from hybrid_kv.dashboard.draw import code, table
from hybrid_kv.dashboard.frame import document, framed, text
from hybrid_kv.dashboard.report import Report, Section
from hybrid_kv.dashboard.sections import sections
from hybrid_kv.errors import ConfigError, HybridKVError

ASV_PAGES = "asv/index.html"  # beside the page
ALL_ROWS = "rows.parquet"


def build_page(report: Report, machine: str = "", asv: bool = False, download: bool = False) -> str:
    """The whole page as HTML.

    Args:
        machine: that the filter starts with; empty: all.
        asv: asv's own pages are in the folder `asv` beside it, to be linked.
        download: `rows.parquet` is beside it, to be linked.

    Raises:
        ConfigError: no row is from `machine`.
        HybridKVError: plotly is not installed.
    """
    machines = report.results.machines
    if machine and machine not in machines:
        raise ConfigError(f"no row is from machine {machine!r}; there are {', '.join(machines) or 'none'}")
    plotly = _plotly()
    found = [made for section in sections() if (made := section(report)) is not None]
    if report.missing.notes:
        rows = [[escape(what), code(command)] for what, command in report.missing.notes]
        found.append(Section("Missing", "What has not been measured yet", table(["what", "makes its rows"], rows)))
    body = _header(report, found, machine) + f"<main>{framed(found)}</main>\n" + _footer(report, asv, download)
    return document("hybrid-kv report", body, [plotly, text("page.js")])


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise HybridKVError("the report is drawn by plotly, which is not installed; run: pip install plotly") from None
    return str(get_plotlyjs())


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


def _footer(report: Report, asv: bool, download: bool) -> str:
    results, repository = report.results, escape(report.repository)
    said = [f"Drawn from {escape(', '.join(results.files) or 'no file')}."]
    if results.foreign:
        said.append(f"Of another kind, not read: {escape(', '.join(results.foreign))}.")
    if results.rule:
        said.append(f"Of {results.total:,} measurements the page holds {len(results.rows):,}: {results.rule}.")
    if download:
        columns = f'; <a href="{repository}/blob/HEAD/docs/results.md">their columns</a>' if repository else ""
        said.append(f'Download: <a href="{ALL_ROWS}" download>all rows as Parquet</a>{columns}.')
    if asv:
        said.append(f'By commit: <a href="{ASV_PAGES}">pages of asv</a>, which need the network.')
    return f"<footer><p>{' '.join(said)}</p></footer>"
