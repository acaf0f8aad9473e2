"""What catches a planted bug first: run by a fresh process that imports the changed copy of the package.

The task names the ways and the changed lines; the answer is written beside it, and the case, where there is one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from hybrid_kv.guard.registry import Size

EXACT, SANITIZER, ACCURACY = "exact model", "sanitizer", "accuracy"
RUN = "run"  # the section of what took too long, or ended the process
# Exact requests before all sections: 3 s of one core, in which most bugs are seen. The others take 25 s and show
# nothing of arithmetic, so they come behind the sections, which take 37.
FIRST = 300
# CPU seconds after which a change loops. A scenario takes 2 at most, the very first with all that it imports; a section
# has four times its own and these, of which the slowest needs 16.
LOOPS, SECTION_LOOPS = 20.0, 60.0


class LoopError(BaseException):
    """Raised in the middle of a loop: no `except Exception` of the engine takes it for an error of its own."""


@dataclass
class Catch:
    """What was found first: nothing if `section` is empty."""

    section: str = ""
    rule: str = ""
    detail: str = ""
    requests: int = 0


class Trace:
    """Whether some lines of some files were reached. It costs nothing any more once one was."""

    def __init__(self, lines: Mapping[str, list[int]]) -> None:
        self._lines = {file: set(numbers) for file, numbers in lines.items()}
        self.reached = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        wanted = self._lines.get(frame.f_code.co_filename)
        if wanted is None:
            return None
        if frame.f_lineno in wanted and event == "line":
            self.reached = True
            sys.settrace(None)
            return None
        return self


class Reach:
    """Which steps reach each line of some files, by number. It costs nothing more where a step reached all of a
    function."""

    def __init__(self, files: Sequence[str]) -> None:
        self.steps: dict[str, dict[int, list[int]]] = {file: {} for file in files}
        self.begin(-1)  # an import

    def begin(self, step: int) -> None:
        """What is reached from now on, is by this one."""
        self._step = step
        self._left: dict[CodeType, set[int]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if (steps := self.steps.get(code.co_filename)) is None:
            return None
        if (left := self._left.get(code)) is None:
            left = self._left[code] = {line for *_, line in code.co_lines() if line}
        if event == "line" and frame.f_lineno in left:
            left.discard(frame.f_lineno)
            steps.setdefault(frame.f_lineno, []).append(self._step)
        return self if left else None


@contextmanager
def _no_loop(seconds: float) -> Iterator[None]:
    """Raise `LoopError` after this much CPU time."""

    def stop(*_: object) -> None:
        raise LoopError(f"still at it after {seconds:.0f} CPU seconds")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class Scenarios:
    """The exact model's scenarios one after the other.

    Args:
        case: where the one that is wrong is written.
    """

    def __init__(self, sanitize: bool, case: Path) -> None:
        from hybrid_kv.guard.play import Differences

        self._section, self._sanitize, self._case = SANITIZER if sanitize else EXACT, sanitize, case
        self._total, self._number = Differences(), 0

    def play(self, amount: int) -> Catch:
        """Go on to the first that is wrong, or until there were so many requests."""
        from hybrid_kv.guard.play import run_scenario
        from hybrid_kv.guard.replay import to_json
        from hybrid_kv.guard.traffic import draw_scenario

        total = self._total
        while total.num_requests < amount:
            with _no_loop(LOOPS):
                scenario = draw_scenario(self._number)
                if self._sanitize:
                    scenario = replace(scenario, options={**scenario.options, "sanitize": True})
                total += run_scenario(scenario)
            if total.wrong:
                first = total.wrong[0]
                self._case.write_text(to_json(first.scenario, first.rule))
                return Catch(self._section, first.rule, str(first), total.num_requests)
            self._number += 1
        return Catch(requests=total.num_requests)

    def end(self, amount: int) -> Catch:
        """`play`, then what never happened."""
        from hybrid_kv.guard.patterns import REQUIRED

        catch = self.play(amount)
        missing = [name for name in REQUIRED if not self._total.seen[name]]
        return (
            Catch(self._section, "void", ", ".join(missing), catch.requests) if missing and not catch.section else catch
        )


Steps = dict[str, Callable[[], Catch]]


def _section(name: str, amount: int, case: Path) -> Catch:
    from hybrid_kv.guard.registry import CHECKS
    from hybrid_kv.guard.run import run_guard

    with _no_loop(SECTION_LOOPS + 4 * CHECKS[name].seconds * amount):
        results = run_guard({name: amount}, 0, progress=False, fail_fast=True, jobs=1)
    failed = next((result for result in results if not result.passed), None)
    if failed is None:
        return Catch()
    if failed.case:
        case.write_text(failed.case)
    return Catch(failed.section, failed.name, failed.detail)


def guard_steps(size: Size, case: Path) -> Steps:
    """The guard's parts by name, those first that find most in a second: some requests of the exact model, sections
    that take less than one, other sections, the exact model's other requests.

    Block ids are left out: they are held against a clock, which says nothing of a bug.
    """
    from hybrid_kv.guard.registry import load_checks

    amount = {check.section: check.amounts[size] for check in load_checks() if check.section != "block ids"}
    seconds = {check.section: check.seconds * check.amounts[size] for check in load_checks()}
    exact = Scenarios(False, case)
    steps: Steps = {"first": partial(exact.play, FIRST)}
    # A stable sort: both kinds stay in the guard's own order.
    for section in sorted(amount, key=lambda section: seconds[section] >= 1):
        if amount[section] and section != EXACT:
            steps[section] = partial(_section, section, amount[section], case)
    return {**steps, EXACT: partial(exact.end, amount[EXACT])}


def _steps(ways: Sequence[str], amount: int, case: Path) -> Steps:
    from hybrid_kv.guard.registry import load_checks

    steps: Steps = {}
    for way in ways:
        if way == SANITIZER:
            steps[way] = partial(Scenarios(True, case).end, amount)
        elif way == ACCURACY:
            amounts = {check.section: check.amounts["full"] for check in load_checks()}
            steps[way] = partial(_section, way, amounts[way], case)
        else:
            steps |= guard_steps(cast("Size", way), case)
    return steps


def _first(steps: Steps, reached: Sequence[int] | None) -> Catch:
    """What the first step finds that finds something.

    Args:
        reached: the numbers of those that can; None: all. The sanitizer plays the exact model's scenarios.
    """
    wanted = {name for number, name in enumerate(steps) if reached is None or number in reached}
    wanted |= {SANITIZER} if EXACT in wanted else set()
    requests = 0
    for name, step in steps.items():
        if name not in wanted:
            continue
        catch = step()
        requests = max(requests, catch.requests)
        if catch.section:
            return catch
    return Catch(requests=requests)


def run(task: Mapping[str, Any], case: Path) -> dict[str, Any]:
    """Carry out a task and write the case that fails; an engine that fails by itself has been caught, too."""
    import torch  # before the trace, which would cost it seconds

    torch.set_num_threads(1)
    trace = Trace(task["lines"])
    sys.settrace(trace)
    try:
        catch = _first(_steps(task["ways"], task["amount"], case), task["reached"])
    except LoopError as error:
        catch = Catch(RUN, "time limit", str(error))
    except Exception as error:
        catch = Catch("crash", type(error).__name__, str(error))
    sys.settrace(None)
    return {**asdict(catch), "executed": trace.reached, "seconds": sum(os.times()[:4])}


def reach(task: Mapping[str, Any], case: Path) -> dict[str, dict[int, list[int]]]:
    """By file and line the numbers of the steps that reach it, in an unchanged copy; -1: an import does.

    The sanitizer is left out: it plays scenarios that others play before.
    """
    import torch

    torch.set_num_threads(1)
    trace = Reach(task["files"])
    sys.settrace(trace)
    for number, (name, step) in enumerate(_steps(task["ways"], task["amount"], case).items()):
        trace.begin(number)
        if name != SANITIZER:
            step()
    sys.settrace(None)
    return trace.steps
