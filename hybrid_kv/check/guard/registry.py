"""Checks, and where the guard finds them: every module of `guard.checks` registers its own.

A check that measures lies in `hybrid_kv.measure.guard_checks`, which registers them once it is
imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal

from hybrid_kv.check.guard import checks
from hybrid_kv.config import ConfigError

Size = Literal["quick", "full", "long"]
Runs = Literal["beside", "spread", "alone"]


@dataclass(frozen=True)
class CheckResult:
    """One line of the guard's table.

    `value` is the metric, `limit` what it was compared with (empty if nothing), `detail` the first
    thing that is wrong: empty if nothing is, and it begins with `void` if what had to happen did
    not. `params` say what was run, `metrics` what else was counted, `interval` is the 95 % interval
    of `value`. `case` is the text of a file that plays the first failure again, see `guard.cases`;
    empty: there is none. `failed_after` is when the first thing was wrong, in seconds since its
    section began; in the guard's results since the guard did. `section` and `seconds` are filled in
    by `check`, but for a line in another section's part of the table.
    """

    name: str
    value: float
    unit: str
    limit: str
    n: int
    detail: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    interval: tuple[float, float] | None = None
    failed_after: float | None = None
    case: str = ""
    section: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.detail

    @property
    def verdict(self) -> str:
        """`pass`, `fail`, or `void`: nothing is wrong, but what had to happen did not."""
        return "pass" if self.passed else "void" if self.detail.startswith("void") else "fail"


def unseen(done: float) -> None:
    """Progress that is not shown; a lambda could not go to another process."""


@dataclass(frozen=True)
class Run:
    """The inputs of a check.

    Attributes:
        amount: how much to do, in the check's own unit.
        progress: called with the share of the amount that is done, in the same unit.
        workers: processes that it may use, those of `pool`; without a pool this one alone.
        device: of the guard model; the exact one follows its integers on the CPU.
        only: levels by factor: run all that has them and nothing else, whatever the amount.
        repro: folder for a small case of what failed; None writes none.
        fail_fast: the check may stop after its first failure; after a line, `check` sees to that.
    """

    amount: int
    seed: int = 0
    progress: Callable[[float], object] = unseen
    workers: int = 1
    device: str = "cpu"
    only: Mapping[str, str] = field(default_factory=dict)
    repro: Path | None = None
    fail_fast: bool = False
    pool: Executor | None = None


Function = Callable[[Run], list[CheckResult]]


def _no_lines(run: Run) -> list[CheckResult]:
    return []


CHECKS: dict[str, Check] = {}  # by section


@dataclass(frozen=True)
class Check:
    """A section of the guard: a decorator of the function that yields its lines.

    It registers itself.

    Args:
        quick, full, long: how much of it in each size of guard; 0 leaves it out, `long` is as
            `full` unless given. On two cores the quick guard ends within a minute, the full one
            within four, the long one within half an hour.
        seconds: for one of its amount; the progress bar is one of time.
        place: sections are printed in this order, and run in it where they run one by one.
        needs: packages that are an extra's, separated by spaces.
        factors: what `only` of a run may name, with all levels of each; called when it is needed.
        runs: `beside` others in one process, `spread` over all processes, or `alone`, with nothing
            else running, as what measures time must.
        function: what was decorated; each of its lines gets the seconds since the one before.
    """

    section: str
    quick: int
    full: int
    seconds: float
    long: int | None = None
    place: int = 100
    needs: str = ""
    factors: Callable[[], Mapping[str, Sequence[Any]]] = dict
    runs: Runs = "beside"
    function: Function = _no_lines

    @property
    def amounts(self) -> dict[Size, int]:
        return {
            "quick": self.quick,
            "full": self.full,
            "long": self.full if self.long is None else self.long,
        }

    def __call__(self, function: Callable[[Run], Iterator[CheckResult]]) -> Function:
        @wraps(function)
        def lines(run: Run) -> list[CheckResult]:
            results = list[CheckResult]()
            start = time.perf_counter()
            begin = start
            for line in function(run):
                end = time.perf_counter()
                moment = (
                    None
                    if line.passed
                    else end - start
                    if line.failed_after is None
                    else line.failed_after
                )
                results.append(
                    replace(
                        line,
                        section=line.section or self.section,
                        seconds=end - begin,
                        failed_after=moment,
                    )
                )
                if run.fail_fast and not line.passed:
                    break
                begin = end
            return results

        CHECKS[self.section] = replace(self, function=lines)
        return lines


check = Check


def refuse_unknown_levels(only: Mapping[str, str], checks: Sequence[Check]) -> None:
    """Refuse factors and levels that no check has.

    Raises:
        ConfigError: no check has such a factor, or the factor no such level.
    """
    if not only:
        return
    known = {
        name: [str(level) for level in levels]
        for check in checks
        for name, levels in check.factors().items()
    }
    for name, level in only.items():
        if name not in known:
            raise ConfigError(
                f"--only {name}={level}: there is no such factor; use one of {', '.join(known)}"
            )
        if level not in known[name]:
            raise ConfigError(f"--only {name}={level}: use one of {', '.join(known[name])}")


def load_checks() -> list[Check]:
    """Return the checks of `guard.checks` and those registered elsewhere, in their order."""
    for module in iter_modules(checks.__path__):
        import_module(f"{checks.__name__}.{module.name}")
    return sorted(CHECKS.values(), key=lambda check: (check.place, check.section))
