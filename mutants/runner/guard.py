"""The guard's way of catching a bug first, and the case that does, reduced and run again.

Each function that is given a task is run by a fresh process that imports the changed copy of the
package. The task names the ways; the answer is written next to it, and the case, where there is
one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from hybrid_kv.check.guard.registry import Size

EXACT, SANITIZER, ACCURACY = "exact model", "sanitizer", "accuracy"
RUN = "run"  # the section of what took too long, or ended the process
REQUESTS = 3100  # of the sanitizer's scenarios, as many as the quick guard has
# Exact requests before all sections: 3 s of one core, in which all but one of a thousand bugs are
# seen that the exact model sees at all. So its others, 25 s, come behind the sections, which take
# 37.
FIRST = 300
# CPU seconds after which a change loops. A scenario takes 2 at most, the very first with all that
# it imports; a section has four times its own and these, of which the slowest needs 16.
SCENARIO_LIMIT, SECTION_LIMIT = 20.0, 60.0


class LoopError(BaseException):
    """An error in the middle of a loop, which no `except Exception` of the engine catches."""


@dataclass
class Catch:
    """The first catch; nothing was caught if `section` is empty.

    `cell`: of a server, its model and setting.
    """

    section: str = ""
    rule: str = ""
    detail: str = ""
    requests: int = 0
    cell: str = ""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `LoopError` after this much CPU time."""

    def stop(*_: object) -> None:
        raise LoopError(f"not done after {seconds:.0f} CPU seconds")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class Scenarios:
    """The exact model's scenarios, one after the other; a wrong one is written into `case`."""

    def __init__(self, case: Path, *, sanitize: bool) -> None:
        from hybrid_kv.check.guard.play import Differences

        self._section, self._sanitize, self._case = SANITIZER if sanitize else EXACT, sanitize, case
        self._total, self._numbers = Differences(), count()

    def play(self, amount: int) -> Catch:
        """Go on to the first that is wrong, or until there were so many requests."""
        from hybrid_kv.check.guard.play import run_scenario
        from hybrid_kv.check.guard.replay import to_json
        from hybrid_kv.check.guard.traffic import draw_scenario

        while self._total.num_requests < amount:
            scenario = draw_scenario(next(self._numbers))
            if self._sanitize:
                scenario = replace(scenario, options={**scenario.options, "sanitize": True})
            with time_limit(SCENARIO_LIMIT):
                self._total += run_scenario(scenario)
            if self._total.wrong:
                first = self._total.wrong[0]
                self._case.write_text(to_json(first.scenario, first.rule))
                return Catch(self._section, first.rule, str(first), self._total.num_requests)
        return Catch(requests=self._total.num_requests)

    def end(self, amount: int) -> Catch:
        """Play to the end, then return what never happened."""
        from hybrid_kv.check.guard.patterns import REQUIRED

        catch = self.play(amount)
        missing = [name for name in REQUIRED if not self._total.seen[name]]
        if catch.section or not missing:
            return catch
        return Catch(self._section, "void", ", ".join(missing), catch.requests)


def compile_loops() -> None:
    """Have numba compile what the guard uses, or load it.

    Copies of the package find it, too, instead of each taking ten seconds.
    """
    import torch

    from hybrid_kv.kernels.block_tables import HostTables, TableLayout
    from hybrid_kv.kernels.ssd.host import scan_loop
    from hybrid_kv.threads import one_thread

    HostTables([TableLayout(1, 1, 1, 1)], 1, 1)
    with one_thread():
        for dtype in (torch.float32, torch.float64):
            scan_loop(torch.empty(0, dtype=dtype))


Steps = dict[str, Callable[[], Catch]]


def _section(name: str, amount: int, case: Path) -> Catch:
    from hybrid_kv.check.guard.registry import CHECKS
    from hybrid_kv.check.guard.run import GuardRunOptions, run_guard

    options = GuardRunOptions(progress=False, fail_fast=True, jobs=1)
    with time_limit(SECTION_LIMIT + 4 * CHECKS[name].seconds * amount):
        results = run_guard({name: amount}, options)
    failed = next((result for result in results if not result.passed), None)
    if failed is None:
        return Catch()
    if failed.case:
        case.write_text(failed.case)
    return Catch(failed.section, failed.name, failed.detail)


def _sections(size: Size, case: Path) -> Steps:
    """Yield the guard's sections but the exact model, those that take less than a second first.

    Block ids are left out: they are compared with a clock, which says nothing of a bug.
    """
    from hybrid_kv.check.guard.registry import load_checks
    from hybrid_kv.measure import guard_checks  # noqa: F401  (registers them)

    steps: Steps = {}
    # A stable sort: both kinds stay in the guard's own order.
    for check in sorted(load_checks(), key=lambda check: check.seconds * check.amounts[size] >= 1):
        section, amount = check.section, check.amounts[size]
        if amount and section not in (EXACT, "block ids"):
            steps[section] = partial(_section, section, amount, case)
    return steps


def steps_of(ways: Sequence[str], case: Path) -> Steps:
    """Return the steps of some ways by name, those first that find most in a second.

    These are some requests of the exact model, its sections, and the exact model's other requests.
    The sanitizer runs those last ones, if it is one of the ways.
    """
    from hybrid_kv.check.guard.registry import load_checks
    from hybrid_kv.measure import guard_checks  # noqa: F401  (registers them)

    amounts = {check.section: check.amounts for check in load_checks()}
    steps: Steps = {}
    for way in ways:
        if way == ACCURACY:
            steps[way] = partial(_section, way, amounts[way]["full"], case)
        elif way == SANITIZER:
            steps[way] = partial(Scenarios(case, sanitize=True).end, REQUESTS)
        else:
            size = cast("Size", way)
            exact = Scenarios(case, sanitize=False)
            steps["first"] = partial(exact.play, FIRST)
            steps |= _sections(size, case)
            if SANITIZER not in ways:
                steps[EXACT] = partial(exact.end, amounts[EXACT][size])
    return steps


def _first(steps: Steps) -> Catch:
    """Return what the first step that catches anything has caught."""
    requests = 0
    for step in steps.values():
        catch = step()
        requests = max(requests, catch.requests)
        if catch.section:
            return catch
    return Catch(requests=requests)


def run(task: Mapping[str, Any], case: Path) -> dict[str, Any]:
    """Carry out a task and write the case that fails.

    An engine that fails by itself has been caught, too.
    """
    import torch

    torch.set_num_threads(1)
    try:
        catch = _first(steps_of(task["ways"], case))
    except LoopError as error:
        catch = Catch(RUN, "time limit", str(error))
    except Exception as error:
        catch = Catch("crash", type(error).__name__, str(error))
    return {**asdict(catch), "seconds": sum(os.times()[:4])}


def reduced(task: Mapping[str, Any], case: Path) -> dict[str, Any]:
    """Reduce a case and write it into the task's `folder`; a `Reproducer` without its story."""
    from hybrid_kv.check.guard.cases import reproduce

    made = asdict(reproduce(case.read_text(), Path(task["folder"])))
    del made["story"]
    return made


def rule(task: Mapping[str, Any], case: Path) -> str:
    """Return the rule that the case in the task's `file` breaks."""
    from hybrid_kv.check.guard.cases import broken_rule

    return broken_rule(Path(task["file"]))
