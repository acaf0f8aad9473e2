"""Texts of rows in GitHub's Markdown: code spans, which hold no link, mention or HTML."""

from __future__ import annotations

MAX_LETTERS = 120


def plain(text: str) -> str:
    """Text as a code span that fits a cell: nothing in it is a link, a mention, HTML, or the end of the cell."""
    text = " ".join(text.split())
    if len(text) > MAX_LETTERS:
        text = text[: MAX_LETTERS - 1] + "…"
    # A bar ends a cell, also in a code span; a backslash before it is read in two ways. Neither has an escape.
    text = text.replace("`", "ˋ").replace("|", "¦")
    return f"`{''.join(letter if letter.isprintable() else '�' for letter in text)}`" if text else "–"
