"""What a section takes and returns: the rows, their histories and links; then a finding and its HTML."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from html import escape

import pandas as pd

from hybrid_kv.dashboard.changes import Measured, newest_commits
from hybrid_kv.dashboard.data import Results
from hybrid_kv.dashboard.draw import of_machine
from hybrid_kv.dashboard.failing import Failing, find_failing
from hybrid_kv.dashboard.series import Series, histories
from hybrid_kv.dashboard.verdicts import Headline, headline, verdicts
from hybrid_kv.errors import ConfigError
from hybrid_kv.results import NO_HEAD, CommitInfo, Head

COMMITS = "commits/"  # beside the page, with a page for each
MAX_MACHINES = 6  # with a block of their own; the history has all of them


@dataclass(frozen=True)
class Section:
    """One part of the page.

    Attributes:
        name: in the navigation.
        finding: its title, what the rows say.
        body: HTML.
        word: the colour of its title: `pass`, `stale`, `void`, `fail` or empty.
    """

    name: str
    finding: str
    body: str
    word: str = ""

    @property
    def anchor(self) -> str:
        return self.name.lower().replace(" ", "-")

    @property
    def html(self) -> str:
        return (
            f'<section id="{self.anchor}"><p class="kind">{escape(self.name)}</p>'
            f'<h2 class="{self.word}">{escape(self.finding)}</h2>{self.body}</section>'
        )


@dataclass(frozen=True)
class Report:
    """What the page is made from.

    Attributes:
        head: what is checked out; verdicts say how far their rows are from it.
        repository: URL of a repository whose commits are at `URL/commit/SHA`; empty: commits have no link.
        site: URL that the report is served from, for links to it from elsewhere; may be empty.

    Raises:
        ConfigError: `repository` or `site` is not an http(s) URL.
    """

    results: Results
    head: Head = NO_HEAD
    repository: str = ""
    site: str = ""

    def __post_init__(self) -> None:
        for name, like in (("repository", "https://HOST/OWNER/NAME"), ("site", "https://OWNER.HOST/NAME")):
            url = getattr(self, name)
            if url and not re.fullmatch(r"https?://[^\s\"'<>()]+", url):
                raise ConfigError(f"{url!r} is not the URL of a {name}; write {like}")
            object.__setattr__(self, name, url.rstrip("/"))

    @cached_property
    def series(self) -> list[Series]:
        """All series with their steps."""
        return histories(self.results.rows)

    @cached_property
    def failing(self) -> list[Failing]:
        """What is failing now."""
        return find_failing(self.results.rows, self.series)

    def failing_on(self, machine: str = "") -> list[Failing]:
        """What is failing on a machine, or in what belongs to none; on any for an empty name."""
        return [one for one in self.failing if not machine or one.key[4] in (machine, "")]

    def headline(self, machine: str = "") -> Headline:
        """The one verdict of page, summary and command, of a machine or of all."""
        worse = sum(one.word == "worse" for one in self.failing_on(machine))
        return headline(verdicts(self.results.of_machine(machine)), self.head, worse)

    @cached_property
    def commits(self) -> dict[str, Measured]:
        """The commits that have a page, in the order in which they were measured."""
        return newest_commits(self.results.rows, self.series)

    @cached_property
    def infos(self) -> dict[str, CommitInfo]:
        """Author, day and subject of the commits that have a page or began to fail."""
        return self.head.describe([*self.commits, *(one.first.commit for one in self.failing)])

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
