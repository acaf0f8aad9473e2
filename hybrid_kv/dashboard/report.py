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
from hybrid_kv.results import NO_HEAD, Head

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
        repository: URL of a repository whose commits are at `URL/commit/SHA`; empty: they are no links.
        missing: sections add to it what they found no row for.
    """

    results: Results
    head: Head = NO_HEAD
    repository: str = ""
    missing: Missing = field(default_factory=Missing)

    @cached_property
    def series(self) -> list[Series]:
        """All series with their steps."""
        return histories(self.results.rows)

    def link(self, commit: str) -> str:
        """A commit as HTML, of a changed tree too; anything else that stands in its place is text."""
        short = escape(commit[:7]) or "no commit"
        found = re.fullmatch(r"([0-9a-f]{7,40})(-dirty)?", commit)
        if not found:
            return short
        linked = f'<a href="{escape(self.repository)}/commit/{found[1]}">{short}</a>' if self.repository else short
        return linked + (" + changes" if found[2] else "")

    def by_machine(self, rows: pd.DataFrame, block: Callable[[pd.DataFrame], str]) -> str:
        """A block per machine that has rows, those with the newest rows first."""
        found = [m for m in [*self.results.machines, ""] if (rows["machine"] == m).any()][:MAX_MACHINES]
        return "".join(of_machine(machine, block(rows[rows["machine"] == machine])) for machine in found)
