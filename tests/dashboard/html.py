"""A page about rows, and what is in it, taken out of its HTML."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

from hybrid_kv.dashboard.data import Results
from hybrid_kv.dashboard.markdown import summary
from hybrid_kv.dashboard.page import build_page
from hybrid_kv.dashboard.report import Report
from hybrid_kv.files import write_whole
from hybrid_kv.results import NO_HEAD, Head


def page_of(results: Results, repository: str = "", machine: str = "", head: Head = NO_HEAD) -> str:
    """The page about these rows."""
    return build_page(Report(results, head, repository), machine)


def section(html: str, anchor: str) -> str:
    found = re.search(rf'<section id="{anchor}">.*?</section>', html, re.DOTALL)
    assert found, anchor
    return found[0]


def titles(html: str) -> dict[str, str]:
    found = re.findall(r'<section id="([\w-]+)"><p class="kind">[^<]*</p><h2 class="\w*">(.*?)</h2>', html)
    return {anchor: unescape(title) for anchor, title in found}


def data(html: str) -> dict[str, Any]:
    found = re.search(r'id="history-data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def figures(html: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script></figure>', html)]


def written(html: str, folder: Path) -> Path:
    """A page as a file."""
    write_whole(folder / "index.html", html)
    return folder / "index.html"


def comment_of(results: Results, machine: str = "", head: Head = NO_HEAD) -> str:
    """The comment for a pull request about these rows."""
    return summary(Report(results, head), machine)
