"""A page about rows, and what is in it, taken out of its HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import unescape

from hybrid_kv.measure.dashboard.data import Results
from hybrid_kv.measure.dashboard.markdown import summary
from hybrid_kv.measure.dashboard.page import build_page
from hybrid_kv.measure.dashboard.report import Report
from hybrid_kv.measure.results import NO_HEAD, CommitInfo, Head


def page_of(results: Results, repository: str = "", machine: str = "", head: Head = NO_HEAD) -> str:
    """The page about these rows."""
    return build_page(Report(results, head, repository), machine)


class Checkout(Head):
    """Git knows every commit, all of them by one author."""

    def describe(self, commits: Iterable[str]) -> dict[str, CommitInfo]:
        return {
            commit: CommitInfo("A <b>\x1b[31m U", "2026-01-01", "cache: <i>tidy</i>")
            for commit in commits
        }


def section(html: str, anchor: str) -> str:
    found = re.search(rf'<section id="{anchor}">.*?</section>', html, re.DOTALL)
    assert found, anchor
    return found[0]


def titles(html: str) -> dict[str, str]:
    title = r'<span class="kind">[^<]*</span><h2 class="\w*">(.*?)</h2>'
    found = re.findall(rf'<section id="([\w-]+)">(?:<details><summary>)?{title}', html)
    return {anchor: unescape(title) for anchor, title in found}


def views(html: str) -> dict[str, list[str]]:
    """By machine: the verdict, then the charts."""
    made: dict[str, list[str]] = {}
    for machine, block in re.findall(
        r'<div data-view="(.*?)"(?: hidden)?>(<section.*?</section>)</div>', html, re.DOTALL
    ):
        made.setdefault(unescape(machine), []).append(block)
    return made


def charts(html: str, machine: str = "") -> dict[str, str]:
    """The charts of a machine by title."""
    found = re.findall(r'<article class="card.*?</article>', views(html)[machine][1], re.DOTALL)
    return {unescape(re.search(r"<h3>(.*?)</h3>", card)[1]): card for card in found}  # type: ignore[index]


def comment_of(results: Results, machine: str = "", head: Head = NO_HEAD) -> str:
    """The comment for a pull request about these rows."""
    return summary(Report(results, head), machine)


def cells(html: str) -> list[list[str]]:
    """The lines of a section's tables."""
    lines = re.findall(r"<tr [^>]*>(.*?)</tr>", html)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in lines]
