"""What every page of the site stands in: a title, the style, and a policy by which nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from hybrid_kv.dashboard.report import Section

_FOLDER = Path(__file__).parent


def document(title: str, body: str, scripts: Sequence[str] = ()) -> str:
    """A whole page as HTML; without scripts none may run in it.

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
<style>{text("page.css")}</style>
</head>
<body>
{body}
{"".join(f"<script>{script}</script>{chr(10)}" for script in scripts)}</body>
</html>
"""


def framed(found: Sequence[Section]) -> str:
    """Sections as HTML, one below the other."""
    return "".join(
        f'<section id="{s.anchor}"><p class="kind">{escape(s.name)}</p>'
        f'<h2 class="{s.word}">{escape(s.finding)}</h2>{s.body}</section>'
        for s in found
    )


def text(name: str) -> str:
    """A file of this folder."""
    return (_FOLDER / name).read_text(encoding="utf-8")
