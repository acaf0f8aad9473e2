"""A page about rows, and what is in it, taken out of its HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import unescape
from typing import Any

from hybrid_kv.dashboard.data import Results
from hybrid_kv.dashboard.markdown import summary
from hybrid_kv.dashboard.page import build_page
from hybrid_kv.dashboard.report import Report
from hybrid_kv.results import NO_HEAD, CommitInfo, Head


def page_of(results: Results, repository: str = "", machine: str = "", head: Head = NO_HEAD) -> str:
    """The page about these rows."""
    return build_page(Report(results, head, repository), machine)


class Checkout(Head):
    """Git knows every commit, all of them by one author."""

    def describe(self, commits: Iterable[str]) -> dict[str, CommitInfo]:
        return {commit: CommitInfo("A <b>\x1b[31m U", "2026-01-01", "cache: <i>tidy</i>") for commit in commits}


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


def comment_of(results: Results, machine: str = "", head: Head = NO_HEAD) -> str:
    """The comment for a pull request about these rows."""
    return summary(Report(results, head), machine)


def cells(html: str) -> list[list[str]]:
    """The lines of a section's tables."""
    lines = re.findall(r"<tr [^>]*>(.*?)</tr>", html)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in lines]
