"""What a section takes and gives: the rows, their histories, links, what is missing; then a finding and its HTML."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from html import escape

import pandas as pd

from hybrid_kv.dashboard.data import Results, Series, histories
from hybrid_kv.dashboard.draw import code, of_machine
from hybrid_kv.dashboard.measured import Measured, newest_commits
from hybrid_kv.dashboard.red import Red, find_red
from hybrid_kv.errors import ConfigError
from hybrid_kv.results import NO_HEAD, Head, Told

COMMITS = "commits/"  # beside the page, with a page for each
MAX_MACHINES = 6  # with figures of their own; the history has all of them
MAX_LISTED = 50  # lines of a table


@dataclass(frozen=True)
class Section:
    """One part of the page.

    Attributes:
        name: in the navigation.
        finding: its title, what the rows say.
        body: HTML.
        word: the colour of its title: `pass`, `stale`, `void`, `fail`; empty: none.
    """

    name: str
    finding: str
    body: str
    word: str = ""

    @property
    def anchor(self) -> str:
        return self.name.lower().replace(" ", "-")


@dataclass
class Missing:
    """What no row was found for, and what makes the rows."""

    notes: list[tuple[str, str]] = field(default_factory=list)

    def note(self, what: str, command: str) -> str:
        """Remember it for the list at the end; the same as HTML for the place where it is missed."""
        self.notes.append((what, command))
        return f'<p class="missing">Not measured yet: {escape(what)}. It takes {code(command)}.</p>'


@dataclass(frozen=True)
class Report:
    """What the page is made from.

    Attributes:
        head: what is checked out; verdicts say how far their rows are from it.
        repository: URL of a repository whose commits are at `URL/commit/SHA`; empty: there is none to link to.
        site: URL that the report is served from, for links to it from elsewhere; empty: there is none.
        missing: sections add to it what they found no row for.

    Raises:
        ConfigError: `repository` or `site` is no http(s) URL.
    """

    results: Results
    head: Head = NO_HEAD
    repository: str = ""
    site: str = ""
    missing: Missing = field(default_factory=Missing)

    def __post_init__(self) -> None:
        for name, like in (("repository", "https://HOST/OWNER/NAME"), ("site", "https://OWNER.HOST/NAME")):
            url = getattr(self, name)
            if url and not re.fullmatch(r"https?://[^\s\"'<>()]+", url):
                raise ConfigError(f"{url!r} is no URL of a {name}; write {like}")
            object.__setattr__(self, name, url.rstrip("/"))

    @cached_property
    def series(self) -> list[Series]:
        """All series with their steps."""
        return histories(self.results.rows)

    @cached_property
    def red(self) -> list[Red]:
        """What is red now."""
        return find_red(self.results.rows, self.series)

    @cached_property
    def commits(self) -> dict[str, Measured]:
        """The commits that have a page, in the order in which they were measured."""
        return newest_commits(self.results.rows, self.series)

    @cached_property
    def told(self) -> dict[str, Told]:
        """What git says of the commits that have a page or turned something red."""
        return self.head.tell([*self.commits, *(red.first.commit for red in self.red)])

    def link(self, commit: str, folder: str = COMMITS) -> str:
        """A commit as HTML, of a changed tree too: its page, or the repository's; anything else in its place is text.

        Args:
            folder: from the page that the link is on to those of commits.
        """
        short = escape(commit[:7]) or "no commit"
        found = re.fullmatch(r"([0-9a-f]{7,40})(-dirty)?", commit)
        if not found:
            return short
        own = self.commits.get(found[1])
        target = folder + own.file if own else self.url(found[1])
        linked = f'<a href="{target}">{short}</a>' if target else short
        return linked + (" + changes" if found[2] else "")

    def url(self, commit: str) -> str:
        """Where the repository has it; empty without one. It may stand in HTML."""
        return f"{escape(self.repository)}/commit/{escape(commit)}" if self.repository else ""

    def by_machine(self, rows: pd.DataFrame, block: Callable[[pd.DataFrame], str]) -> str:
        """A block per machine that has rows, those with the newest rows first."""
        found = [m for m in [*self.results.machines, ""] if (rows["machine"] == m).any()][:MAX_MACHINES]
        return "".join(of_machine(machine, block(rows[rows["machine"] == machine])) for machine in found)
