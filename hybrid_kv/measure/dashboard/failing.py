"""Checks that did not pass in the newest runs, levels that are worse, and since when.

A check fails since the first of its last runs in a row that did not pass. A level fails if no later
level is as good as the one before a step for the worse. All of it follows from the rows, so that an
alarm needs no memory: what fails with the rows of a night, and did not without them, is new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from hybrid_kv.measure.dashboard.data import SERIES, each, is_ours
from hybrid_kv.measure.dashboard.series import MIN_CHANGE, Series, Step
from hybrid_kv.measure.dashboard.verdicts import verdicts
from hybrid_kv.measure.dashboard.words import WORDS, change_text, levels_text, with_unit
from hybrid_kv.measure.results import TIME_UNITS


@dataclass(frozen=True)
class Failing:
    """One check that did not pass, or one series whose level is worse.

    Attributes:
        key: values of `SERIES`.
        word: `fail`, `void` or `worse`.
        newest: its last row.
        first: the row with which it began to fail.
        passed: the last row before that; None: it never passed.
        step: from which level to which, of what is `worse`.
        depth: how many steps for the worse were not reverted; 0 for a check.
    """

    key: tuple[str, ...]
    word: str
    newest: Any
    first: Any
    passed: Any
    step: Step | None = None
    depth: int = 0

    @property
    def text(self) -> str:
        """The kind of failure."""
        return f"{change_text(self.step)} worse" if self.step else WORDS[self.word]

    @property
    def value(self) -> str:
        """The last measured value, or both levels."""
        return levels_text(self.newest.unit, self.step) if self.step else with_unit(self.newest)


def find_failing(rows: pd.DataFrame, series: Sequence[Series]) -> list[Failing]:
    """Return failed checks, void checks, then worse levels; of each the newest first.

    Args:
        rows: of `Results`, one machine's or all.
        series: their `histories`.
    """
    checks = _checks(rows)
    known = {check.key for check in checks}
    levels = [_level(line) for line in series if line.key not in known]
    failures = [*checks, *(level for level in levels if level is not None)]
    return sorted(failures, key=_order)


def _order(failing: Failing) -> tuple[int, float, tuple[str, ...]]:
    kinds = {"fail": 0, "void": 1, "worse": 2}
    return kinds[failing.word], -failing.first.time.timestamp(), failing.key


def new_failures(now: Sequence[Failing], before: Sequence[Failing]) -> list[Failing]:
    """Return failures that began or went down another step.

    A step that more rows date otherwise is not new.
    """
    known = {(failing.key, failing.depth) for failing in before}
    return [failing for failing in now if (failing.key, failing.depth) not in known]


def counted(failing: Sequence[Failing]) -> str:
    """Return in words how many are failing."""
    words = {
        "fail": ("check failed", "checks failed"),
        "void": ("check was void", "checks were void"),
    }
    words["worse"] = ("level is worse", "levels are worse")
    count = Counter(failure.word for failure in failing)
    failures = [
        f"{count[word]:,} {forms[count[word] != 1]}" for word, forms in words.items() if count[word]
    ]
    return ", ".join(failures) or "Nothing is failing"


def _checks(rows: pd.DataFrame) -> list[Failing]:
    bad = [v.rows[v.rows["verdict"] != "pass"][SERIES] for v in verdicts(rows)]
    keys = pd.concat(bad).drop_duplicates() if bad else rows[SERIES].iloc[:0]
    if keys.empty:
        return []
    judged = rows[rows["verdict"] != ""].merge(keys, on=SERIES)
    failures = []
    for key, history in judged.groupby(SERIES, sort=False):
        lines = list(each(history))
        while lines[-1].verdict == "pass":  # of another run at the same time
            lines.pop()
        passed = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].verdict == "pass"), -1)
        last_passed = lines[passed] if passed >= 0 else None
        failures.append(
            Failing(
                tuple(map(str, key)), lines[-1].verdict, lines[-1], lines[passed + 1], last_passed
            )
        )
    return failures


def _stands(series: Series, steps: Sequence[Step]) -> bool:
    """Return whether every level since the first of these steps is worse than before it.

    A time must be worse by what counts as a step: two levels of one speed are never equal.
    """
    sign = 1 if series.better == "lower" else -1
    before = steps[0].before
    margin = MIN_CHANGE * abs(before) if series.unit in TIME_UNITS else 0.0
    return all(sign * (step.after - before) > margin for step in steps)


def _level(series: Series) -> Failing | None:
    """Return the engine's newest step for the worse that stands.

    A series that a check judges fails if the check does.
    """
    steps = series.steps
    if not steps or series.rows["verdict"].iloc[-1] != "" or not is_ours(series.key[3]):
        return None
    stands = [
        step
        for i, step in enumerate(steps)
        if series.judge(step) == "worse" and _stands(series, steps[i:])
    ]
    if not stands:
        return None
    step = stands[-1]
    places = [len(series.rows) - 1, *series.clean[[step.index, step.index - 1]]]
    newest, first, passed = each(series.rows.iloc[places])
    return Failing(series.key, "worse", newest, first, passed, step, len(stands))
