"""What catches a planted bug first: run by a fresh process that imports the changed copy of the package.

The task names the ways and the changed lines; the answer is written beside it, and the case, where there is one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from hybrid_kv.guard.play import Differences
    from hybrid_kv.guard.registry import Size

EXACT, SANITIZER, ACCURACY = "exact model", "sanitizer", "accuracy"
SCENARIO = "scenario "  # and its number
IMPORT = "import"  # what reaches a line that no step waits for
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
    """Which steps reach each line of some files, by name. It costs nothing more where a step reached all of a
    function."""

    def __init__(self, files: Sequence[str]) -> None:
        self.steps: dict[str, dict[int, list[str]]] = {file: {} for file in files}
        self.begin(IMPORT)

    def begin(self, step: str) -> None:
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
        numbers: of those that are played; None: all.
        seen: patterns that the others show.
    """

    def __init__(
        self, sanitize: bool, case: Path, numbers: Sequence[int] | None = None, seen: Sequence[str] = ()
    ) -> None:
        from hybrid_kv.guard.play import Differences

        self._section, self._sanitize, self._case = SANITIZER if sanitize else EXACT, sanitize, case
        self._total, self._numbers = Differences(seen=Counter(seen)), iter(count() if numbers is None else numbers)

    def play(self, amount: int) -> Catch:
        """Go on to the first that is wrong, or until there were so many requests."""
        from hybrid_kv.guard.replay import to_json

        total = self._total
        while total.num_requests < amount and (number := next(self._numbers, None)) is not None:
            with _no_loop(LOOPS):
                total += _play(number, self._sanitize)
            if total.wrong:
                first = total.wrong[0]
                self._case.write_text(to_json(first.scenario, first.rule))
                return Catch(self._section, first.rule, str(first), total.num_requests)
        return Catch(requests=total.num_requests)

    def end(self, amount: int) -> Catch:
        """`play`, then what never happened."""
        from hybrid_kv.guard.patterns import REQUIRED

        catch = self.play(amount)
        missing = [name for name in REQUIRED if not self._total.seen[name]]
        return (
            Catch(self._section, "void", ", ".join(missing), catch.requests) if missing and not catch.section else catch
        )


def _play(number: int, sanitize: bool) -> Differences:
    from hybrid_kv.guard.play import run_scenario
    from hybrid_kv.guard.traffic import draw_scenario

    scenario = draw_scenario(number)
    return run_scenario(replace(scenario, options={**scenario.options, "sanitize": True}) if sanitize else scenario)


def compile_loops() -> None:
    """Have numba compile what the guard uses, or find it: copies of the package find it, too, instead of each taking
    ten seconds."""
    import torch

    from hybrid_kv.kernels.block_tables import HostTables, TableLayout
    from hybrid_kv.kernels.ssd.host import scan_loop
    from hybrid_kv.threads import one_thread

    HostTables([TableLayout(1, 1, 1, 1)], 1, 1)
    with one_thread():
        for dtype in (torch.float32, torch.float64):
            scan_loop(torch.empty(0, dtype=dtype))


Steps = dict[str, Callable[[], Catch]]


def _section(name: str, amount: int, case: Path, only: Mapping[str, str] | None = None) -> Catch:
    from hybrid_kv.guard.registry import CHECKS
    from hybrid_kv.guard.run import run_guard

    with _no_loop(SECTION_LOOPS + 4 * CHECKS[name].seconds * amount):
        results = run_guard({name: amount}, 0, progress=False, only=only, fail_fast=True, jobs=1)
    failed = next((result for result in results if not result.passed), None)
    if failed is None:
        return Catch()
    if failed.case:
        case.write_text(failed.case)
    return Catch(failed.section, failed.name, failed.detail)


def _sections(size: Size, case: Path) -> Steps:
    """The guard's sections but the exact model: those that take less than a second, then the others.

    Each case of the kernels is a step of its own, as few of them reach any one line. Block ids are left out: they are
    held against a clock, which says nothing of a bug.
    """
    from hybrid_kv.guard.registry import load_checks

    steps: Steps = {}
    # A stable sort: both kinds stay in the guard's own order.
    for check in sorted(load_checks(), key=lambda check: check.seconds * check.amounts[size] >= 1):
        section, amount = check.section, check.amounts[size]
        if not amount or section in (EXACT, "block ids"):
            continue
        if section != "kernels":
            steps[section] = partial(_section, section, amount, case)
            continue
        for name in check.factors()["case"]:
            steps[f"{section} {name}"] = partial(_section, section, amount, case, {"case": name})
    return steps


def _steps(
    ways: Sequence[str], amount: int, case: Path, reached: Sequence[str] | None = None, seen: Sequence[str] = ()
) -> Steps:
    """The parts of some ways by name, those first that find most in a second: some requests of the exact model, its
    sections, the exact model's other requests. The sanitizer plays those last ones, if it is one of the ways.

    Args:
        reached: names of steps, and of scenarios as `scenario 3`: no others are made. None: all are.
        seen: by scenarios that are left out.
    """
    from hybrid_kv.guard.registry import load_checks

    numbers = None if reached is None else [int(name.split()[1]) for name in reached if name.startswith(SCENARIO)]
    steps: Steps = {}
    for way in ways:
        if way == ACCURACY:
            amounts = {check.section: check.amounts["full"] for check in load_checks()}
            steps[way] = partial(_section, way, amounts[way], case)
        elif way != SANITIZER:
            size = cast("Size", way)
            exact = Scenarios(False, case, numbers, seen)
            steps["first"] = partial(exact.play, FIRST)
            steps |= _sections(size, case)
            if SANITIZER not in ways:
                amounts = {check.section: check.amounts[size] for check in load_checks()}
                steps[EXACT] = partial(exact.end, amounts[EXACT])
        else:
            steps[way] = partial(Scenarios(True, case, numbers, seen).end, amount)
    if reached is not None:
        scenarios = ("first", EXACT, SANITIZER) if numbers else ()
        steps = {name: step for name, step in steps.items() if name in (*reached, *scenarios)}
    return steps


def _first(steps: Steps) -> Catch:
    """What the first step finds that finds something."""
    requests = 0
    for step in steps.values():
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
        catch = _first(_steps(task["ways"], task["amount"], case, task["reached"], task["seen"]))
    except LoopError as error:
        catch = Catch(RUN, "time limit", str(error))
    except Exception as error:
        catch = Catch("crash", type(error).__name__, str(error))
    sys.settrace(None)
    return {**asdict(catch), "executed": trace.reached, "seconds": sum(os.times()[:4])}


def reach(task: Mapping[str, Any], case: Path) -> dict[str, Any]:
    """What reaches what in an unchanged copy: `steps`, by file and line the names of the steps and scenarios that reach
    it, and `seen`, by scenario the patterns that it shows."""
    import torch

    torch.set_num_threads(1)
    trace, seen, requests, number = Reach(task["files"]), {}, 0, 0
    sys.settrace(trace)
    for name in task["modules"]:
        import_module(name)
    sections = _sections("quick", case)
    while requests < task["amount"]:
        trace.begin(name := f"{SCENARIO}{number}")
        result = _play(number, sanitize=False)
        seen[name] = [*+result.seen]
        requests, number = requests + result.num_requests, number + 1
    for name, step in sections.items():
        trace.begin(name)
        step()
    sys.settrace(None)
    return {"steps": trace.steps, "seen": seen}
