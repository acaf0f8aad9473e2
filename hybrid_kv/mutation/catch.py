"""What catches a planted bug first: run by a fresh process that imports the changed copy of the package.

    python -m hybrid_kv.mutation.catch TASK.json

The task names the way and the changed lines; the answer is written beside it, and the case, where there is one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_kv.guard.registry import Size


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


def by_scenarios(amount: int, sanitize: bool, case: Path) -> Catch:
    """The exact model's scenarios one after the other, to the first that is wrong; then what never happened.

    Args:
        case: where the one that is wrong is written.
    """
    from hybrid_kv.guard.patterns import REQUIRED
    from hybrid_kv.guard.play import Differences, run_scenario
    from hybrid_kv.guard.replay import to_json
    from hybrid_kv.guard.traffic import draw_scenario

    total = Differences()
    section = "sanitizer" if sanitize else "exact model"
    number = 0
    while total.num_requests < amount:
        scenario = draw_scenario(number)
        if sanitize:
            scenario = replace(scenario, options={**scenario.options, "sanitize": True})
        total += run_scenario(scenario)
        if total.wrong:
            first = total.wrong[0]
            case.write_text(to_json(first.scenario, first.rule))
            return Catch(section, first.rule, str(first), total.num_requests)
        number += 1
    missing = [name for name in REQUIRED if not total.seen[name]]
    rule = "void" if missing else ""
    return Catch(section if missing else "", rule, ", ".join(missing), total.num_requests)


def by_guard(size: Size, case: Path) -> Catch:
    """The exact model, then the guard's other sections, to the first that fails.

    Block ids are left out: they are held against a clock, which says nothing of a bug.
    """
    from hybrid_kv.guard.run import amounts, run_guard

    amount = amounts(size)
    catch = by_scenarios(amount["exact model"], sanitize=False, case=case)
    if catch.section:
        return catch
    others = {**amount, "exact model": 0, "block ids": 0}
    for result in run_guard(others, 0, progress=False, fail_fast=True, jobs=1):
        if not result.passed:
            if result.case:
                case.write_text(result.case)
            return Catch(result.section, result.name, result.detail)
    return catch


def run(task: Mapping[str, Any], case: Path) -> dict[str, Any]:
    """Carry out a task and write the case that fails; an engine that fails by itself has been caught, too."""
    import torch  # before the trace, which would cost it seconds

    torch.set_num_threads(1)
    trace = Trace(task["lines"])
    sys.settrace(trace)
    try:
        by = task["by"]
        catch = by_scenarios(task["amount"], True, case) if by == "sanitizer" else by_guard(by, case)
    except Exception as error:
        catch = Catch("crash", type(error).__name__, str(error))
    sys.settrace(None)
    return {**asdict(catch), "executed": trace.reached, "seconds": sum(os.times()[:4])}


if __name__ == "__main__":
    file = Path(sys.argv[1])
    found = run(json.loads(file.read_text()), file.with_suffix(".case"))
    file.with_suffix(".answer").write_text(json.dumps(found))
