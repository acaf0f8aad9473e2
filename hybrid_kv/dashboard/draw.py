"""What every figure and table of the page shares: colours, marks, intervals, and how both become HTML.

Colours have a contrast of 3 or more against the light and the dark page, so a figure is the same in both; text and
grid lines take the page's own colours through its style sheet. No two series differ by colour alone.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd

from hybrid_kv.dashboard.data import each
from hybrid_kv.dashboard.words import benchmark_name, with_interval

BLUE, ORANGE, GREEN, PINK, GREY, RED = "#2b7de0", "#d8690f", "#1f9e7a", "#c05ab8", "#7d848d", "#d9434f"
LIGHT_PAGE, DARK_PAGE = "#ffffff", "#171a1f"  # what the figures lie on; page.css has the same


@dataclass(frozen=True)
class Mark:
    """How a series looks: never by colour alone."""

    colour: str
    symbol: str
    dash: str


MARKS = (
    Mark(BLUE, "circle", "solid"),
    Mark(ORANGE, "square", "dash"),
    Mark(GREEN, "diamond", "dot"),
    Mark(PINK, "triangle-up", "dashdot"),
    Mark(GREY, "x", "longdash"),
    Mark(RED, "star", "longdashdot"),
)
_SHAPES = {
    "circle": '<circle cx="7" cy="7" r="4.5"/>',
    "square": '<rect x="3" y="3" width="8" height="8"/>',
    "diamond": '<path d="M7 1.5 12.5 7 7 12.5 1.5 7Z"/>',
    "triangle-up": '<path d="M7 2 12.5 11.5H1.5Z"/>',
    "x": '<path d="M3 3 11 11M11 3 3 11" stroke-width="3"/>',
    "star": '<path d="M7 1 8.8 5.2 13 5.6 9.8 8.5 10.8 13 7 10.6 3.2 13 4.2 8.5 1 5.6 5.2 5.2Z"/>',
}


def marks(names: Iterable[str]) -> dict[str, Mark]:
    """A mark for each name, in order; beyond six they repeat."""
    return {name: MARKS[i % len(MARKS)] for i, name in enumerate(names)}


def code(text: str) -> str:
    """Something to type."""
    return f"<code>{escape(text)}</code>"


def paragraph(text: str) -> str:
    """Plain text."""
    return f"<p>{escape(text)}</p>"


def of_machine(machine: str, html: str) -> str:
    """A block that the machine filter hides; one that belongs to no machine always stays."""
    if not machine:
        return html
    return f'<div data-machine="{escape(machine)}"><h3 class="machine">{escape(machine)}</h3>{html}</div>'


def columns(blocks: Iterable[str]) -> str:
    """Blocks side by side where there is room."""
    return f'<div class="columns">{"".join(blocks)}</div>'


def legend(looks: dict[str, Mark]) -> str:
    """One legend for several figures."""
    items = "".join(
        f'<li><svg viewBox="0 0 14 14" fill="{m.colour}" stroke="{m.colour}" aria-hidden="true">'
        f"{_SHAPES[m.symbol]}</svg>{escape(name)}</li>"
        for name, m in looks.items()
    )
    return f'<ul class="legend">{items}</ul>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], attributes: Sequence[str] = (), body_id: str = "") -> str:
    """An HTML table; its cells are HTML. The first column is text, the others are figures.

    Args:
        attributes: of each row, such as `data-machine="…"`.
        body_id: for a script that fills the table.
    """
    identity = f' id="{body_id}"' if body_id else ""
    # Escaped here, unlike cells: heads are always words.
    names = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    lines = "".join(
        f"<tr {extra}><th scope=row>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>"
        for row, extra in zip(rows, attributes or [""] * len(rows), strict=True)
    )
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody{identity}>{lines}</tbody></table></div>'


def with_small_case(key: Sequence[str]) -> str:
    """A series, by its values of `SERIES`, as HTML: its case below, without its machine."""
    return escape(benchmark_name(key)) + (f"<br><small>{escape(key[3])}</small>" if key[3] else "")


def name_of(text: str) -> str:
    """A machine, a limit: text of any length in a cell of a table."""
    return f'<span class="name-of">{escape(text)}</span>' if text else ""


def with_small_interval(row: Any) -> str:
    """A row's figure and its interval as HTML."""
    figure, _, interval = with_interval(row).partition(" (")
    return escape(figure) + (f" <small>({escape(interval)}</small>" if interval else "")


def intervals(rows: pd.DataFrame, scale: float = 1.0) -> dict[str, Any]:
    """Plotly's error bars from `ci_low` and `ci_high`; a missing end has none, rounding makes none negative."""
    value = rows["value"]
    upper = ((rows["ci_high"].astype(float).fillna(value) - value) * scale).clip(lower=0)
    lower = ((value - rows["ci_low"].astype(float).fillna(value)) * scale).clip(lower=0)
    return {"type": "data", "array": list(upper), "arrayminus": list(lower), "thickness": 1.2, "width": 3}


def plot(traces: Sequence[Any], caption: str, summary: str, height: int = 300, **layout: Any) -> str:
    """A figure of plotly traces.

    Args:
        caption: above it, HTML-free.
        summary: what a screen reader says.
        layout: plotly's, over the house's.
    """
    import plotly.graph_objects as go

    axis = {"showline": True, "linecolor": GREY, "gridcolor": "rgba(125,132,141,.25)", "zeroline": False}
    axis |= {"title_font_size": 13, "automargin": True}
    house = {
        "height": height,
        "margin": {"l": 64, "r": 16, "t": 8, "b": 46},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": GREY},
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
    }
    figure = go.Figure(data=list(traces), layout={"template": "none", **house})
    figure.update_layout(**layout)
    figure.update_xaxes(fixedrange=True, tickangle=0, **axis)
    figure.update_yaxes(fixedrange=True, **axis)
    return (
        f'<figure class="plot"><figcaption>{escape(caption)}</figcaption>'
        f'<div class="canvas" role="img" aria-label="{escape(summary)}" style="height:{height}px"></div>'
        f'<script type="application/json">{in_script(figure.to_json())}</script></figure>'
    )


def line_trace(
    line: pd.DataFrame, name: str, looks: dict[str, Mark], x: str, what: str, scale: float = 1.0
) -> dict[str, Any]:
    look = looks[name]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape(name),
        "x": list(line[x]),
        "y": list(line["value"] * scale),
        "error_y": {**intervals(line, scale), "color": look.colour},
        "line": {"color": look.colour, "dash": look.dash, "width": 2},
        "marker": {"color": look.colour, "symbol": look.symbol, "size": 8},
        "customdata": [escape(f"{with_interval(row)}, n = {row.n}") for row in each(line)],
        "hovertemplate": f"{escape(name)}<br>%{{x:,}} {what}: %{{customdata}}<extra></extra>",
    }


def limit_line(x: float) -> dict[str, Any]:
    return {
        "type": "line",
        "x0": x,
        "x1": x,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": BLUE, "width": 2},
    }


def wrapped(label: str, width: int = 20) -> str:
    """A label of an axis in lines of at most `width` letters, so that it leaves room on a phone."""
    return "<br>".join(escape(line) for line in textwrap.wrap(label, width))


def in_script(json_text: str) -> str:
    """JSON that cannot end the script element that holds it."""
    return json_text.replace("<", "\\u003c")


def powers(low: float, high: float) -> list[float]:
    """The powers of ten from the one below `low` to the one above `high`."""
    return [10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
