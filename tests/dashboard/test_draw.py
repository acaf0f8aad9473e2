"""Colours that can be seen, also by who cannot tell them apart."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from hybrid_kv.dashboard import draw


def light(colour: str) -> list[float]:
    """Linear red, green and blue (sRGB, IEC 61966-2-1)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def contrast(one: str, other: str) -> float:
    """WCAG 2.2, from 1 to 21."""
    low, high = sorted(
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), light(x), strict=True)) for x in (one, other)
    )
    return (high + 0.05) / (low + 0.05)


def test_marks_are_seen_on_both_pages() -> None:
    for mark, page in itertools.product(draw.MARKS, (draw.LIGHT_PAGE, draw.DARK_PAGE)):
        assert contrast(mark.colour, page) >= 3, (mark, page)


def test_no_two_marks_differ_by_colour_alone() -> None:
    assert len({mark.symbol for mark in draw.MARKS}) == len({mark.dash for mark in draw.MARKS}) == len(draw.MARKS)


def test_text_can_be_read_on_both_pages() -> None:
    styles = (Path(draw.__file__).parent / "page.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", styles, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", block))
        assert colours["card"] in (draw.LIGHT_PAGE, draw.DARK_PAGE)
        for name in ("ink", "soft", "link", "pass", "fail", "void"):
            assert min(contrast(colours[name], colours[page]) for page in ("card", "page", "quiet")) >= 4.5, name
