"""What is red now, and since when: checks that did not pass in the newest runs, and levels that are worse than before.

A check is red since the first of its last runs in a row that did not pass. A level is red if a step for the worse was
not undone: no later level is as good as the one before it. All of it follows from the rows, so that an alarm needs no
memory of what it has said: what is red with the rows of a night, and was not without them, is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from hybrid_kv.dashboard.data import SERIES, Series, each
from hybrid_kv.dashboard.steps import Step
from hybrid_kv.dashboard.verdicts import verdicts


@dataclass(frozen=True)
class Red:
    """One check that did not pass, or one series whose level is worse.

    Attributes:
        key: values of `SERIES`.
        word: `fail`, `void` or `worse`.
        newest: its last row.
        first: the row with which it became red.
        green: the last row before that; None: it was never green.
        step: from which level to which, of what is `worse`.
        depth: how many steps for the worse were not undone; 0 of a check.
    """

    key: tuple[str, ...]
    word: str
    newest: Any
    first: Any
    green: Any
    step: Step | None = None
    depth: int = 0


def find_red(rows: pd.DataFrame, series: Sequence[Series]) -> list[Red]:
    """Everything red: what failed, what was void, then levels; of each the newest first.

    Args:
        rows: of `Results`, one machine's or all.
        series: their `histories`.
    """
    checks = _checks(rows)
    known = {red.key for red in checks}
    found = [*checks, *(red for s in series if s.key not in known and (red := _level(s)) is not None)]
    order = {"fail": 0, "void": 1, "worse": 2}
    return sorted(found, key=lambda red: (order[red.word], -red.first.time.timestamp(), red.key))


def new_red(now: Sequence[Red], before: Sequence[Red]) -> list[Red]:
    """What became red, or went down another step; a step that more rows date otherwise is not new."""
    known = {(red.key, red.depth) for red in before}
    return [red for red in now if (red.key, red.depth) not in known]


def counted(red: Sequence[Red]) -> str:
    """How much of it is red, in words."""
    words = {"fail": "check{s} failed", "void": "check{s} {were} void", "worse": "level{s} {are} worse"}
    found = []
    for word, text in words.items():
        n = sum(one.word == word for one in red)
        forms = {"s": "s", "were": "were", "are": "are"} if n != 1 else {"s": "", "were": "was", "are": "is"}
        found += [f"{n:,} {text.format(**forms)}"] if n else []
    return ", ".join(found) or "Nothing is red"


def _checks(rows: pd.DataFrame) -> list[Red]:
    bad = [v.rows[v.rows["verdict"] != "pass"][SERIES] for v in verdicts(rows)]
    keys = pd.concat(bad).drop_duplicates() if bad else rows[SERIES].iloc[:0]
    if keys.empty:
        return []
    judged = rows[rows["verdict"] != ""].merge(keys, on=SERIES)
    found = []
    for key, own in judged.groupby(SERIES, sort=False):
        lines = list(each(own))
        while lines[-1].verdict == "pass":  # of another run at the same time
            lines.pop()
        green = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].verdict == "pass"), -1)
        last_green = lines[green] if green >= 0 else None
        found.append(Red(tuple(map(str, key)), lines[-1].verdict, lines[-1], lines[green + 1], last_green))
    return found


def _level(series: Series) -> Red | None:
    """Its newest step for the worse that stands; what a check judges is red if the check is."""
    steps = series.steps
    if not steps or series.rows["verdict"].iloc[-1] != "":
        return None
    sign = 1 if series.better == "lower" else -1
    stands = [
        step
        for i, step in enumerate(steps)
        if series.judge(step) == "worse" and all(sign * later.after > sign * step.before for later in steps[i:])
    ]
    if not stands:
        return None
    step = stands[-1]
    places = [len(series.rows) - 1, *series.clean[[step.index, step.index - 1]]]
    newest, first, green = each(series.rows.iloc[places])
    return Red(series.key, "worse", newest, first, green, step, len(stands))
