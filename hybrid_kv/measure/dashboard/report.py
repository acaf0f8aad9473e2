"""The input and the output of a section: rows, histories and links; a finding and HTML."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from html import escape

import pandas as pd

from hybrid_kv.errors import ConfigError
from hybrid_kv.measure.dashboard.answers import HeadAnswers, answers_of
from hybrid_kv.measure.dashboard.changes import Measured, newest_commits
from hybrid_kv.measure.dashboard.charts import charted
from hybrid_kv.measure.dashboard.data import Results
from hybrid_kv.measure.dashboard.draw import of_machine
from hybrid_kv.measure.dashboard.failing import Failing, find_failing
from hybrid_kv.measure.dashboard.series import Series, histories
from hybrid_kv.measure.dashboard.verdicts import SuiteVerdict, verdicts
from hybrid_kv.measure.results import NO_HEAD, CommitInfo, Head

COMMITS = "commits/"  # next to the page, with a page for each
MAX_MACHINES = 6  # with a block of their own; the history has all of them


@dataclass(frozen=True)
class Section:
    """One part of the page.

    Attributes:
        name: above its title.
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
        return f'<section id="{self.anchor}">{self._title}{self.body}</section>'

    @property
    def folded(self) -> str:
        """The section as its title, which opens the rest."""
        return (
            f'<section id="{self.anchor}"><details><summary>{self._title}</summary>'
            f"{self.body}</details></section>"
        )

    @property
    def _title(self) -> str:
        return (
            f'<span class="kind">{escape(self.name)}</span><h2 class="{self.word}">'
            f"{escape(self.finding)}</h2>"
        )


@dataclass(frozen=True)
class Report:
    """The rows of a page, and all that follows from them.

    Attributes:
        head: what is checked out; verdicts say how far their rows are from it.
        repository: URL of a repository whose commits are at `URL/commit/SHA`; empty: commits have
            no link.
        site: URL that the report is served from, for links to it from elsewhere; may be empty.

    Raises:
        ConfigError: `repository` or `site` is not an http(s) URL.
    """

    results: Results
    head: Head = NO_HEAD
    repository: str = ""
    site: str = ""

    def __post_init__(self) -> None:
        for name, like in (
            ("repository", "https://HOST/OWNER/NAME"),
            ("site", "https://OWNER.HOST/NAME"),
        ):
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
        """All that is failing now."""
        return find_failing(self.results.rows, self.series)

    def failing_on(self, machine: str = "") -> list[Failing]:
        """Return failures on a machine, or in what belongs to none; on any for an empty name."""
        return [
            failing for failing in self.failing if not machine or failing.key[4] in (machine, "")
        ]

    @cached_property
    def verdicts(self) -> list[SuiteVerdict]:
        """Verdicts of the newest run of each suite on each machine, by distance from HEAD."""
        return verdicts(self.results.rows, self.head)

    def verdicts_on(self, machine: str = "") -> list[SuiteVerdict]:
        """Return those of a machine and of what belongs to none; all for an empty name."""
        return [
            verdict for verdict in self.verdicts if not machine or verdict.machine in (machine, "")
        ]

    def series_on(self, machine: str = "") -> list[Series]:
        """Return series of a machine and of what belongs to none; all for an empty name."""
        return [series for series in self.series if not machine or series.key[4] in (machine, "")]

    def answers(self, machine: str = "") -> HeadAnswers:
        """Return the answers about HEAD for page, summary and command, on a machine or on all."""
        series = list(charted(self.series_on(machine)).values())
        return answers_of(self.verdicts_on(machine), self.failing_on(machine), series, self.head)

    @cached_property
    def commits(self) -> dict[str, Measured]:
        """The commits that have a page, in the order in which they were measured."""
        return newest_commits(self.results.rows, self.series)

    @cached_property
    def infos(self) -> dict[str, CommitInfo]:
        """Author, day and subject of the commits that have a page or began to fail."""
        return self.head.describe(
            [self.head.commit, *self.commits, *(failing.first.commit for failing in self.failing)]
        )

    def link(self, commit: str, folder: str = COMMITS) -> str:
        """Return a commit as HTML, linked to its page or the repository's; else as text.

        Args:
            folder: from the page that the link is on to those of commits.
        """
        short = escape(commit[:7]) or "no commit"
        clean = commit.removesuffix("-dirty")
        target = self.target(clean, folder)
        linked = f'<a href="{target}">{short}</a>' if target else short
        return linked + (" + changes" if clean != commit else "")

    def target(self, commit: str, folder: str = COMMITS) -> str:
        """Return the address of a commit's page, or of the repository's; empty without either.

        It may stand in HTML.
        """
        if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
            return ""
        measured = self.commits.get(commit)
        return folder + measured.file if measured else self.url(commit)

    def url(self, commit: str) -> str:
        """Return the address of a commit in the repository; empty without one.

        It may stand in HTML.
        """
        return f"{escape(self.repository)}/commit/{escape(commit)}" if self.repository else ""

    def by_machine(self, rows: pd.DataFrame, block: Callable[[pd.DataFrame], str]) -> str:
        """Return a block per machine that has rows, those with the newest rows first."""
        machines = [m for m in [*self.results.machines, ""] if (rows["machine"] == m).any()][
            :MAX_MACHINES
        ]
        return "".join(
            of_machine(machine, block(rows[rows["machine"] == machine])) for machine in machines
        )
