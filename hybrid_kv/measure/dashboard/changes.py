"""Changes by a commit: its metrics next to those of the commit measured before it.

Only rows of the commit itself count, not those of a tree with changes. Commits are in the order in
which each was first measured. A metric with a 95 % interval has changed if its interval and the one
before do not overlap. Without one, a count and a static kernel metric have changed if they differ;
the rest may be rounding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from hybrid_kv.measure.dashboard.data import NO_LEVEL, SERIES, STATIC_SUITE
from hybrid_kv.measure.dashboard.series import Series, Step
from hybrid_kv.measure.dashboard.verdicts import SuiteVerdict, verdicts
from hybrid_kv.measure.results import TIME_UNITS

# A history of months, or 12 MB of pages next to the report.
MAX_COMMITS = 150
BEFORE = ["value", "ci_low", "ci_high", "commit"]


@dataclass(frozen=True)
class Measured:
    """A commit that was measured.

    Attributes:
        rows: of it, in order of time.
        changes: its last row of each series that another commit was measured in before; with `was_`
            and each of `BEFORE`, and `change`: `worse`, `better`, `changed` or `same`.
        steps: series whose level changed with it.
    """

    commit: str
    rows: pd.DataFrame
    changes: pd.DataFrame
    steps: list[tuple[Series, Step]]

    @property
    def file(self) -> str:
        """The name of its page."""
        return f"{self.commit[:12]}.html"

    @cached_property
    def verdicts(self) -> list[SuiteVerdict]:
        """Verdicts of its newest run of each suite on each machine."""
        return verdicts(self.rows)

    def count(self, change: str) -> int:
        return int((self.changes["change"] == change).sum())


def newest_commits(
    rows: pd.DataFrame, series: Sequence[Series], limit: int = MAX_COMMITS
) -> dict[str, Measured]:
    """Return the `limit` commits that were first measured last, in that order.

    Args:
        rows: of `Results`.
        series: their `histories`.
    """
    clean = rows[~rows["dirty"]]
    commits = [c for c in clean["commit"].drop_duplicates() if re.fullmatch(r"[0-9a-f]{40}", c)][
        -limit:
    ]
    of = dict(list(clean[clean["commit"].isin(commits)].groupby("commit", sort=False)))
    changes = changed_rows(rows, commits)
    changes_of = dict(list(changes.groupby("commit", sort=False)))
    steps: dict[str, list[tuple[Series, Step]]] = {}
    for history in series:
        for step in history.steps:
            steps.setdefault(history.step_row(step).commit, []).append((history, step))
    none = changes.iloc[:0]
    return {c: Measured(c, of[c], changes_of.get(c, none), steps.get(c, [])) for c in commits}


def changed_rows(rows: pd.DataFrame, commits: Sequence[str]) -> pd.DataFrame:
    """Return `Measured.changes` of all these commits, in one pass."""
    usable = rows[~rows["dirty"] & (rows["verdict"] != "void") & ~rows["suite"].isin(NO_LEVEL)]
    # Numbered as they first appear, which is their order; the last row of each stands for it.
    number = usable.groupby([*SERIES, "commit"], sort=False).ngroup()
    last = usable.assign(number=number).drop_duplicates("number", keep="last").sort_values("number")
    was = last.groupby(SERIES, sort=False)[BEFORE].shift().add_prefix("was_")
    compared = last.join(was)[last["commit"].isin(commits) & was["was_commit"].notna()]
    return compared.assign(change=_judged(compared))


def _judged(rows: pd.DataFrame) -> list[str]:
    now = rows["value"]
    before = rows["was_value"].astype(float)
    ends = rows[["ci_low", "ci_high", "was_ci_low", "was_ci_high"]].astype(float)
    apart = (ends["ci_low"] > ends["was_ci_high"]) | (ends["ci_high"] < ends["was_ci_low"])
    whole = (now == now.round()) & (before == before.round()) & ~rows["unit"].isin(TIME_UNITS)
    exact = ends.isna().any(axis=1) & (whole | (rows["suite"] == STATIC_SUITE)) & (now != before)
    lower = rows["better"] == "lower"
    higher = rows["better"] == "higher"
    worse = (lower & (now > before)) | (higher & (now < before))
    words = np.select(
        [~(apart | exact), worse, lower | higher], ["same", "worse", "better"], "changed"
    )
    return [str(word) for word in words]
