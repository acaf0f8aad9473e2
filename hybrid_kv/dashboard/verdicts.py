"""What the newest runs say together, and how far they are from the code that is checked out.

A verdict is about the code that was measured. Joined runs may be of several commits, or of a tree with changes that no
commit has; their verdict is `pass` only where every row is of HEAD's code, else `stale`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from hybrid_kv.dashboard.data import CURVE, STATIC_SUITE, last_words, newest_run
from hybrid_kv.dashboard.words import WORDS, day
from hybrid_kv.results import Head


@dataclass(frozen=True)
class SuiteVerdict:
    """What the last run of a suite on a machine said. A void check did not see what it must see: it has not passed."""

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
        return next((word for word in ("fail", "void") if self.count(word)), "pass")


def verdicts(rows: pd.DataFrame) -> list[SuiteVerdict]:
    """Per suite and machine the rows with a verdict of the newest run, of `kernels` the last row of each series.

    The operating curve judges the harness: who fails there is quarantined, and nothing else has failed.
    """
    judged = rows[(rows["verdict"] != "") & (rows["suite"] != CURVE)]
    found = []
    for key, group in judged.groupby(["suite", "machine"], sort=True):
        suite, machine = map(str, key)
        found.append(SuiteVerdict(suite, machine, last_words(group) if suite == STATIC_SUITE else newest_run(group)))
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
        nearest, farthest: commits from HEAD, of the rows whose commit the checkout has; 0 without any.
        unknown: rows of commits that it has not.
        dirty: rows of a changed tree.
    """

    oldest: Any
    nearest: int
    farthest: int
    unknown: int
    dirty: int

    @property
    def is_current(self) -> bool:
        """Every row is of HEAD's code."""
        return not (self.farthest or self.unknown or self.dirty)


def age_of(found: Sequence[SuiteVerdict], head: Head) -> Age:
    """The age of at least one verdict."""
    rows = pd.concat([v.rows for v in found])
    distances = rows["commit"].map({commit: head.distance(commit) for commit in rows["commit"].unique()})
    known = distances.dropna().astype(int)
    return Age(
        oldest=next(rows.sort_values("time", kind="stable").itertuples()),
        nearest=int(known.min()) if len(known) else 0,
        farthest=int(known.max()) if len(known) else 0,
        unknown=int(distances.isna().sum()),
        dirty=int(rows["dirty"].sum()),
    )


@dataclass(frozen=True)
class Headline:
    """The verdicts in two lines.

    Attributes:
        word: `fail`, `void`, `stale`, `pass` or `none`.
        finding: the word with its figures.
        age: of which code the rows are; empty without rows.
    """

    word: str
    finding: str
    age: str = ""


def headline(found: Sequence[SuiteVerdict], head: Head) -> Headline:
    """What all verdicts say together."""
    if not found:
        return Headline("none", "No check has said pass or fail yet")
    age = age_of(found, head)
    word = overall(v.word for v in found)
    if word == "pass" and not age.is_current:
        word = "stale"
    passed, judged = sum(v.count("pass") for v in found), sum(len(v.rows) for v in found)
    return Headline(word, f"{WORDS[word]}: {passed:,} of {judged:,} checks of the newest runs", age_text(age, head))


def age_text(age: Age, head: Head) -> str:
    """The oldest row, the distance from HEAD, rows of a changed tree."""
    place = f"HEAD ({head.commit[:7]})" if head.commit else "HEAD"
    if age.is_current:
        return f"Every row is of the code of {place}."
    text = f"The oldest row is of {day(age.oldest)}."
    if age.farthest:
        text += f" Rows are {distance_text(age.nearest, age.farthest)} from {place}."
    if age.dirty:
        text += f" {_rows(age.dirty)} of a changed tree."
    if not head.commit:
        text += " There is no checkout to compare them with."
    elif age.unknown:
        text += f" {_rows(age.unknown)} of a commit that this checkout does not have."
    return text


def distance_text(nearest: int, farthest: int) -> str:
    """1 commit, 10 to 18 commits."""
    span = f"{farthest:,}" if nearest == farthest else f"{nearest:,} to {farthest:,}"
    return f"{span} commit{'s' * (farthest != 1)}"


def _rows(count: int) -> str:
    return f"{count:,} row{'s are' if count != 1 else ' is'}"
