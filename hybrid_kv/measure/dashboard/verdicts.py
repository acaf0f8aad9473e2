"""The verdict of the newest run of each suite, and whether what it measured is still HEAD's code.

A run counts for HEAD as long as no file that it measures has changed since
(`hybrid_kv.measure.results.measured`). Otherwise its `pass` is `stale`, by so many commits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from hybrid_kv.measure.dashboard.data import (
    ACCURACY,
    COMPARE,
    CURVE,
    SERIES,
    STATIC_SUITE,
    last_rows,
    newest_run,
)
from hybrid_kv.measure.dashboard.words import plural
from hybrid_kv.measure.results import Head

# How a suite is measured; any other is a file of `bench`.
COMMANDS = {
    "guard": "hybrid-kv guard --record",
    ACCURACY: "hybrid-kv accuracy --record",
    STATIC_SUITE: "hybrid-kv kernels --update",
    COMPARE: "hybrid-kv compare HEAD~1 HEAD --record",
    "swarm": "hybrid-kv fuzz --record",
    "gpu": "make gpu-bench",
    "generate": "python -m bench.generate --out results/microbench.csv",
    "families": "make bench-peers",
}


def command_of(suite: str) -> str:
    """Return the command that makes new rows of a suite."""
    return COMMANDS.get(suite, f"python -m bench --suite {suite} --out results/microbench.csv")


@dataclass(frozen=True)
class Freshness:
    """The distance of the code that a run measured from HEAD's.

    Attributes:
        commits: that changed since then what the run measures; None: the checkout lacks the run's
            commit.
        dirty: the run was of a changed tree.
    """

    commits: int | None
    dirty: bool

    @property
    def is_current(self) -> bool:
        return self.commits == 0 and not self.dirty

    @property
    def distance(self) -> str:
        """From HEAD, in words."""
        if self.dirty:
            return "a changed tree"
        return (
            "a commit that this checkout lacks"
            if self.commits is None
            else plural(self.commits, "commit")
        )

    @property
    def text(self) -> str:
        return "HEAD's code" if self.is_current else f"stale: {self.distance}"


def freshness(rows: pd.DataFrame, head: Head) -> Freshness:
    """Return the freshness of the newest row of a suite.

    Static metrics that did not change keep their older rows.
    """
    newest = rows.iloc[-1]
    commit = str(newest["commit"])
    # An installed package and its rows have no commit.
    commits = head.commits_since(commit, str(newest["suite"])) if commit or head.commit else 0
    return Freshness(commits, bool(newest["dirty"]))


def newest_rows(suite: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that count of a suite on a machine.

    They are the newest run of each check at the newest commit. Static metrics are appended when
    they change, so that the last of each counts; each gate of accuracy has a command, and so a
    newest run, of its own.
    """
    newest = rows.iloc[-1]
    if suite == STATIC_SUITE:
        return last_rows(rows)
    if suite == ACCURACY:
        return pd.concat(
            [newest_run(gate_rows) for _, gate_rows in rows.groupby("metric", sort=False)]
        ).sort_index()
    if not newest["commit"]:
        return newest_run(rows)
    same = rows[(rows["commit"] == newest["commit"]) & (rows["dirty"] == newest["dirty"])]
    return same[same["run_id"] == same.groupby(SERIES)["run_id"].transform("last")]


@dataclass(frozen=True)
class SuiteVerdict:
    """The verdict of the newest run of a suite on a machine.

    A void check did not see what it must see: it has not passed.

    Attributes:
        fresh: its distance from HEAD; None where the verdict is about the commit that was
            measured, whatever came after.
    """

    suite: str
    machine: str
    rows: pd.DataFrame
    fresh: Freshness | None = None

    @property
    def is_of_speed(self) -> bool:
        """True if its checks are ratios of times, or a comparison with another commit.

        Nothing in it can be wrong then.
        """
        return self.suite == COMPARE or bool((self.rows["unit"] == "time ratio").all())

    @property
    def is_stale(self) -> bool:
        return self.fresh is not None and not self.fresh.is_current

    @property
    def newest(self) -> Any:
        """The row that was measured last: commit, time, versions."""
        return next(self.rows.tail(1).itertuples())

    def count(self, verdict: str) -> int:
        return int((self.rows["verdict"] == verdict).sum())

    @property
    def word(self) -> str:
        """The word: `fail` if a row failed, else `void` if one was void, else `pass` or `stale`.

        It is stale if HEAD is other code.
        """
        word = overall(self.rows["verdict"])
        return "stale" if word == "pass" and self.is_stale else word


def verdicts(rows: pd.DataFrame, head: Head | None = None) -> list[SuiteVerdict]:
    """Return, per suite and machine, the rows with a verdict of the newest run.

    The operating curve judges the harness: a benchmark that fails there is quarantined, and nothing
    else has failed.
    """
    judged = rows[(rows["verdict"] != "") & (rows["suite"] != CURVE)]
    suites = []
    for key, group in judged.groupby(["suite", "machine"], sort=True):
        suite, machine = map(str, key)
        newest = newest_rows(suite, group)
        fresh = None if head is None else freshness(newest, head)
        suites.append(SuiteVerdict(suite, machine, newest, fresh))
    return suites


def overall(words: Iterable[str]) -> str:
    """Return the first of `fail`, `void`, `stale` and `pass` that is there; `none` without any."""
    present = set(words)
    return next((word for word in ("fail", "void", "stale", "pass") if word in present), "none")
