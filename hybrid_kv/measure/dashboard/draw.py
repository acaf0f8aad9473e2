"""HTML of tables, and the looks of series in the chart.

Colours have a contrast of 3 or more against the light and the dark page; text and grid lines take
the page's own colours through its style sheet. No two series differ by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from hybrid_kv.measure.dashboard.data import SERIES
from hybrid_kv.measure.dashboard.words import benchmark_name, with_interval

COLOURS = ("#2b7de0", "#d8690f", "#1f9e7a", "#c05ab8", "#7d848d", "#d9434f")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MAX_LISTED = 50  # lines of a table


def code(text: str) -> str:
    """Return something to type."""
    return f"<code>{escape(text)}</code>"


def paragraph(text: str) -> str:
    """Return plain text as a paragraph."""
    return f"<p>{escape(text)}</p>"


def folded(summary: str, html: str) -> str:
    """Return a block that a click opens."""
    return f"<details><summary>{escape(summary)}</summary>{html}</details>"


def of_machine(machine: str, html: str) -> str:
    """Return a block that the machine filter hides; without a machine it always stays."""
    if not machine:
        return html
    return (
        f'<div data-machine="{escape(machine)}"><h3 class="machine">{escape(machine)}</h3>'
        f"{html}</div>"
    )


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    attributes: Sequence[str] = (),
    body_id: str = "",
    limit: int = MAX_LISTED,
    count: int = 0,
) -> str:
    """Return an HTML table of at most `limit` lines; its cells are HTML.

    The first column is text, the others are figures.

    Args:
        attributes: of each row, such as `data-machine="…"`.
        body_id: for a script that fills the table.
        count: of all lines, if `rows` has only the first.
    """
    left_out = max(count, len(rows)) - limit
    names = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    lines = "".join(
        f"<tr {extra}><th "
        f"scope=row>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>"
        for row, extra in zip(rows[:limit], attributes or [""] * len(rows), strict=False)
    )
    identity = f' id="{body_id}"' if body_id else ""
    html = (
        f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody{identity}>'
        f"{lines}</tbody></table></div>"
    )
    return html + (paragraph(f"and {left_out:,} more") if left_out > 0 else "")


def coloured(word: str, text: str = "") -> str:
    """Return a verdict or a change in its colour."""
    return f'<b class="{escape(word)}">{escape(text or word)}</b>'


def with_small_case(key: Sequence[str]) -> str:
    """Return a series as HTML, by its values of `SERIES`: its case below, without its machine."""
    return escape(benchmark_name(key)) + (f"<br><small>{escape(key[3])}</small>" if key[3] else "")


def row_name(row: Any) -> str:
    """Return the series of a row as HTML."""
    return with_small_case([getattr(row, name) for name in SERIES])


def name_of(text: str) -> str:
    """Return a machine or a limit as HTML: text of any length in a cell of a table."""
    return f'<span class="name-of">{escape(text)}</span>' if text else ""


def with_small_interval(row: Any) -> str:
    """Return a row's value and its interval as HTML."""
    value, _, interval = with_interval(row).partition(" (")
    return escape(value) + (f" <small>({escape(interval)}</small>" if interval else "")


def in_script(json_text: str) -> str:
    """Return JSON that cannot end the script element that holds it."""
    return json_text.replace("<", "\\u003c")
