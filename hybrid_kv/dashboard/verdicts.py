"""The verdict of the newest runs, and how far they are from the code that is checked out.

A verdict is about the code that was measured. Joined runs may be of several commits, or of a tree with changes that no
commit has; their verdict is `pass` only where every row is of HEAD's code, else `stale`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from hybrid_kv.dashboard.data import CURVE, STATIC_SUITE, last_rows, newest_run
from hybrid_kv.dashboard.words import WORDS, day
from hybrid_kv.results import Head


@dataclass(frozen=True)
class SuiteVerdict:
    """Of the last run of a suite on a machine. A void check did not see what it must see: it has not passed."""

    suite: str
    machine: str
    rows: pd.DataFrame

    @property
    def newest(self) -> Any:
        """The row that was measured last: commit, time, versions."""
        return self.rows.iloc[-1]

    def count(self, verdict: str) -> int:
        return int((self.rows["verdict"] == verdict).sum())

    @property
    def word(self) -> str:
        """`fail` if one row failed, else `void` if one was void, else `pass`."""
        return overall(self.rows["verdict"])


def verdicts(rows: pd.DataFrame) -> list[SuiteVerdict]:
    """Per suite and machine the rows with a verdict of the newest run, of `kernels` the last row of each series.

    The operating curve judges the harness: a benchmark that fails there is quarantined, and nothing else has failed.
    """
    judged = rows[(rows["verdict"] != "") & (rows["suite"] != CURVE)]
    found = []
    for key, group in judged.groupby(["suite", "machine"], sort=True):
        suite, machine = map(str, key)
        found.append(SuiteVerdict(suite, machine, last_rows(group) if suite == STATIC_SUITE else newest_run(group)))
    return found


def overall(words: Iterable[str]) -> str:
    """`fail` before `void` before `pass`; `none` without any."""
    found = set(words)
    return next((word for word in ("fail", "void", "pass") if word in found), "none")


@dataclass(frozen=True)
class Age:
    """How far the rows of some verdicts are from HEAD.

    Attributes:
        oldest: the row that was measured first.
        farthest: commits from HEAD, of the rows whose commit the checkout has.
        unknown: rows of commits that it lacks.
        dirty: rows of a changed tree.
    """

    oldest: Any
    farthest: int
    unknown: int
    dirty: int

    @property
    def is_current(self) -> bool:
        """Every row is of HEAD's code."""
        return not (self.farthest or self.unknown or self.dirty)

    def text(self, head: Head) -> str:
        """The oldest row, the distance from HEAD, rows of other code."""
        place = f"HEAD ({head.commit[:7]})" if head.commit else "HEAD"
        if self.is_current:
            return f"Every row is of {f'the code of {place}' if head.commit else 'an installed package'}."
        parts = [f"The oldest row is of {day(self.oldest)}."]
        if self.farthest:
            parts.append(f"Rows are up to {self.farthest:,} commit{'s' * (self.farthest != 1)} from {place}.")
        if self.dirty:
            parts.append(f"Of a changed tree: {self.dirty:,} rows.")
        if not head.commit:
            parts.append("There is no checkout to compare them with.")
        elif self.unknown:
            parts.append(f"Of a commit that this checkout does not have: {self.unknown:,} rows.")
        return " ".join(parts)


def age_of(found: Sequence[SuiteVerdict], head: Head) -> Age:
    """The age of at least one verdict."""
    rows = pd.concat([v.rows for v in found])
    distances = rows["commit"].map({commit: _distance(commit, head) for commit in rows["commit"].unique()})
    return Age(
        oldest=next(rows.sort_values("time", kind="stable").itertuples()),
        farthest=max(map(int, distances.dropna()), default=0),
        unknown=int(distances.isna().sum()),
        dirty=int(rows["dirty"].sum()),
    )


def _distance(commit: str, head: Head) -> int | None:
    """Return the commits between a row and HEAD; 0 where neither has one, as an installed package and its rows."""
    return head.distance(commit) if commit or head.commit else 0


@dataclass(frozen=True)
class Headline:
    """The verdicts in two lines.

    Attributes:
        word: `fail`, `void`, `worse`, `stale`, `pass` or `none`.
        finding: the word with its figures.
        age: of which code the rows are; empty without rows.
    """

    word: str
    finding: str
    age: str = ""


def headline(found: Sequence[SuiteVerdict], head: Head, num_worse: int = 0) -> Headline:
    """The verdict over all suites; with levels that are worse, which no check judges, it is not `pass`."""
    if not found:
        return Headline("none", "No check has passed or failed yet")
    age = age_of(found, head)
    word = overall(v.word for v in found)
    if word == "pass" and not age.is_current:
        word = "stale"
    if num_worse and word in ("pass", "stale"):
        word = "worse"
    passed, judged = sum(v.count("pass") for v in found), sum(len(v.rows) for v in found)
    levels = f", {num_worse:,} level{'s are' if num_worse > 1 else ' is'} worse" if num_worse else ""
    return Headline(word, f"{WORDS[word]}: {passed:,} of {judged:,} checks of the newest runs{levels}", age.text(head))
