"""What `asv run` times: the registry's cells, a class per benchmark, under names that begin with the suite.

There is no `setup`: with asv_runner >= 0.3 it would mean one cold call per sample. A cell is built, checked and warmed
by the first call, which asv spends on warming up, and checked again behind every sample; none of that counts, since
asv reads a clock that runs inside our own samples alone. asv's verdict on a shared machine is no evidence: it draws the
history, `hybrid-kv compare` judges.

Names: `SUITE.time_X` is host code; `SUITE.time_launch_X` what a launch costs the host and `SUITE.time_X_sync` what it
takes the device; `SUITE.track_METRIC` an exact number; `SUITE.peakmem_X` the peak of a process.
"""

from __future__ import annotations

import inspect
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.harness import registry
from bench.harness.cells import Case, Cell
from bench.harness.measurement import kind_of, runs_here
from hybrid_kv.timing.case import checked
from hybrid_kv.timing.clock import Subject, calibrate


@dataclass(frozen=True)
class LaunchSubject(Subject):
    """A subject whose `run` launches: what that costs the host. The device is left to finish afterwards, untimed."""

    def sample(self, repeats: int) -> float:
        """Seconds per call of the host."""
        torch.cuda.synchronize()
        try:
            return super().sample(repeats)
        finally:
            torch.cuda.synchronize()


torch.set_num_threads(1)  # A second thread makes the times of small tensors bimodal: 0.25 or 8 ms were seen.
_seconds = 0.0  # of a call of every sample so far
_made: dict[str, tuple[Case, dict[str, tuple[Subject, int]]]] = {}


class Timed:
    """What asv needs to know of all timed benchmarks."""

    # asv reads this clock, calls, and reads it again: what a call spends on building, checking and resetting its
    # subject, and in waiting for a device, does not count.
    timer = staticmethod(lambda: _seconds)
    number = 5  # calls per sample, each a mean over about 0.3 ms
    repeat = (3, 15, 1.0)
    warmup_time = 0.1
    timeout = 120
    by_values: Mapping[tuple[Any, ...], Cell]

    def teardown(self, *values: Any) -> None:
        """Check again."""
        key = self.by_values[values].key
        if key in _made:
            checked(key, _made[key][0])


def _skip(reason: str) -> None:
    from asv_runner.benchmarks.mark import SkipNotImplemented

    raise SkipNotImplemented(reason)


def _sample(cell: Cell, kind: str) -> None:
    """One call as asv sees it: a sample, which moves the clock on by the mean over its runs."""
    global _seconds
    if not runs_here(cell):
        _skip("no GPU")
    if cell.key not in _made:
        try:
            case = cell.make()
        except (ImportError, AttributeError, TypeError) as error:
            _skip(f"this version of hybrid_kv lacks what {cell.key} needs: {error}")
        checked(cell.key, case)
        _made[cell.key] = case, {}
    case, subjects = _made[cell.key]
    if kind not in subjects:
        subject = (LaunchSubject if kind == "launch" else kind_of(cell))(case.run, case.reset, case.max_repeats)
        subjects[kind] = subject, calibrate(subject)
    subject, repeats = subjects[kind]
    _seconds += subject.sample(repeats)


def _timed(kind: str) -> Any:
    def time(self: Any, *values: Any) -> None:
        _sample(self.by_values[values], kind)

    return time


def _tracked(unit: str, metric: str) -> Any:
    def track(self: Any, *values: Any) -> float:
        counts = self.by_values[values].make()
        return counts[metric].value if metric in counts else float("nan")

    track.unit = unit
    return track


def method_names(cell: Cell) -> dict[str, str]:
    """Of the benchmarks that asv has for the cell; of each the metric, or `device` or `launch` of a time."""
    name = cell.benchmark
    if cell.tier == "gpu":
        return {f"time_launch_{name}": "launch", f"time_{name}_sync": "device"}
    if cell.tier == "cpu":
        return {f"time_{name}": "device"}
    return {f"track_{metric}": metric for metric in cell.units}


def asv_name(cell: Cell, method: str) -> str:
    """As asv's `--bench` sees it, parameters included."""
    return f"{cell.suite}.{method}({', '.join(map(repr, cell.params.values()))})"


def _class(of: Sequence[Cell]) -> type:
    first = of[0]
    names = tuple(first.params)
    source = inspect.getsource(sys.modules[f"bench.{first.suite}"])
    members: dict[str, Any] = {
        "__doc__": f"{first.suite}/{first.benchmark}",
        "by_values": {tuple(cell.params.values()): cell for cell in of},
        "param_names": names,
        "params": tuple(list(dict.fromkeys(cell.params[name] for cell in of)) for name in names),
        "version": f"{zlib.crc32(source.encode()):08x}",  # an edited suite starts a new history
    }
    for method, of_what in method_names(first).items():
        is_count = first.tier == "count"
        members[method] = _tracked(first.units[of_what], of_what) if is_count else _timed(of_what)
        members[method].__name__ = method
        members[method].benchmark_name = f"{first.suite}.{method}"  # what stands before the dot is a group of its pages
    return type(f"{first.suite}_{first.benchmark}", (object if first.tier == "count" else Timed,), members)


class PeakMemory:
    """Peaks of a process; that of a process which only imports everything is there to be subtracted."""

    params = (["reference", "none", "align", "all"],)
    param_names = ("mode",)

    def peakmem_generate(self, mode: str) -> None:
        values = {"mode": mode, "num_reqs": 4}
        for cell in registry.cells():
            if cell.benchmark == "nemotron" and dict(cell.params) == values:
                cell.make().run()

    peakmem_generate.benchmark_name = "end_to_end.peakmem_generate"


def classes() -> dict[str, type]:
    """By name, one for each benchmark of the registry and one for peaks."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in registry.cells():
        found.setdefault((cell.suite, cell.benchmark), []).append(cell)
    return {one.__name__: one for one in (*map(_class, found.values()), PeakMemory)}
