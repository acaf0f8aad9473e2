"""Runs of the chosen sections so that no core is idle, the most telling first.

The exact model spreads over all cores and comes first: it finds most in least time. Then sections
of one process each run at the same time, the longest first. What measures time comes last, alone.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from hybrid_kv.check.guard.cases import reproduce
from hybrid_kv.check.guard.registry import (
    CHECKS,
    Check,
    CheckResult,
    Run,
    Size,
    load_checks,
    refuse_unknown_levels,
)
from hybrid_kv.check.guard.workers import CONTEXT, num_workers, processes
from hybrid_kv.check.progress import progress_bar
from hybrid_kv.config import ConfigError
from hybrid_kv.errors import deaf_to_ctrl_c, require
from hybrid_kv.threads import one_thread

Advance = Callable[[str, float], object]  # gets a section, and how much of its amount is done
Ended = tuple[Check, list[CheckResult], float]  # and the seconds that it took


def amounts(size: Size) -> dict[str, int]:
    """Return how much of each section a guard of this size runs; 0 leaves it out."""
    return {check.section: check.amounts[size] for check in load_checks()}


@dataclass(frozen=True)
class GuardRunOptions:
    """The options of a guard.

    Attributes:
        progress: whether to show a bar.
        device: of the guard model; the exact one follows its integers on the CPU.
        select: words in sections' names; one of them is enough. Empty: all.
        only: levels by factor; only sections that have these factors run.
        repro: folder for reduced cases of what failed; it is made when there is one.
        fail_fast: end with the first section that fails, and those that run at the same time.
        jobs: processes at a time; None: see `num_workers`.
    """

    seed: int = 0
    progress: bool = True
    device: str = "cpu"
    select: Sequence[str] = ()
    only: Mapping[str, str] = field(default_factory=dict)
    repro: Path | None = None
    fail_fast: bool = False
    jobs: int | None = None


def _unreported(results: list[CheckResult]) -> None:
    pass


def run_guard(
    amount: Mapping[str, int],
    options: GuardRunOptions,
    report: Callable[[list[CheckResult]], object] = _unreported,
) -> list[CheckResult]:
    """Run all checks, each process on one thread.

    On tensors this small a second thread costs more than it brings.

    Args:
        amount: by section, such as `amounts("quick")`.
        report: called with each section's results as it ends.

    Raises:
        ConfigError: no section is left, or none has these levels; nothing has run.
        ModuleNotFoundError: a section needs a package that is not installed; nothing has run.
    """
    known = load_checks()
    chosen = _chosen(known, amount, options)
    workers = num_workers(options.jobs)
    run = Run(
        0,
        options.seed,
        workers=workers,
        device=options.device,
        only=options.only,
        repro=options.repro,
        fail_fast=options.fail_fast,
    )
    runs = {check.section: replace(run, amount=amount[check.section]) for check in chosen}
    results: dict[str, list[CheckResult]] = {}
    begin = time.perf_counter()
    with (
        one_thread(),
        _bar(chosen, runs, options.progress) as advance,
        worker_pool(workers, chosen) as pool,
    ):
        for check, lines, seconds in _sections(chosen, runs, advance, pool):
            started = time.perf_counter() - begin - seconds
            results[check.section] = [_since_start(line, started) for line in lines]
            report(results[check.section])
            if options.fail_fast and not all(line.passed for line in lines):
                break
        else:
            if pool is not None:
                pool.shutdown()  # Workers that are done end by themselves, and clear up.
    return [result for check in known for result in results.get(check.section, [])]


def _chosen(
    known: Sequence[Check], amount: Mapping[str, int], options: GuardRunOptions
) -> list[Check]:
    """Return the sections that run. Raises as `run_guard`."""
    only = options.only
    refuse_unknown_levels(only, known)
    chosen = [
        check
        for check in known
        if amount.get(check.section)
        and (not options.select or any(word.lower() in check.section for word in options.select))
        and (not only or only.keys() <= check.factors().keys())
    ]
    if not chosen:
        asked = " or ".join([*options.select, *only])
        raise ConfigError(f"no section of this guard has {asked!r}; leave --only out")
    require(*dict.fromkeys(package for check in chosen for package in check.needs.split()))
    return chosen


def _since_start(result: CheckResult, started: float) -> CheckResult:
    """Count the time of a failure from the start of the guard, not of its section."""
    if result.passed:
        return result
    return replace(result, failed_after=started + (result.failed_after or 0.0))


def _sections(
    chosen: Sequence[Check], runs: Mapping[str, Run], advance: Advance, pool: Executor | None
) -> Iterator[Ended]:
    """Yield each section as it ends."""
    beside = [check for check in chosen if check.runs == "beside"] if pool is not None else []
    first = [check for check in chosen if check not in beside and check.runs != "alone"]
    for check in first:
        yield _here(check, runs, advance, pool)
    if pool is not None and beside:
        yield from _beside(beside, runs, advance, pool)
    for check in chosen:
        if check.runs == "alone":
            yield _here(check, runs, advance, None)


def _here(check: Check, runs: Mapping[str, Run], advance: Advance, pool: Executor | None) -> Ended:
    begin = time.perf_counter()
    run = replace(runs[check.section], progress=partial(advance, check.section), pool=pool)
    return check, _run(check, run), time.perf_counter() - begin


def _beside(
    checks: Sequence[Check], runs: Mapping[str, Run], advance: Advance, pool: Executor
) -> Iterator[Ended]:
    """Run each section in a process, as many at a time as there are workers, the longest first."""

    def seconds_of(check: Check) -> float:
        return check.seconds * runs[check.section].amount

    ordered = sorted(checks, key=seconds_of, reverse=True)
    with deaf_to_ctrl_c():  # A submit may start a worker.
        futures = {
            pool.submit(
                _in_worker, check.function.__module__, check.section, runs[check.section]
            ): check
            for check in ordered
        }
    while futures:
        done, _ = wait(futures, timeout=0.2, return_when=FIRST_COMPLETED)
        while not _ticks.empty():
            advance(*_ticks.get())
        for future in done:
            check = futures.pop(future)
            results, seconds = future.result()
            yield check, results, seconds


_ticks: Any = None  # the queue of what workers have done; each process has its end of it


def _hear(ticks: Any) -> None:
    global _ticks
    _ticks = ticks


def _in_worker(module: str, section: str, run: Run) -> tuple[list[CheckResult], float]:
    import_module(module)  # registers the check, which may lie outside of `guard.checks`
    begin = time.perf_counter()

    def progress(done: float) -> None:
        _ticks.put((section, done))

    results = _run(CHECKS[section], replace(run, progress=progress))
    return results, time.perf_counter() - begin


@contextmanager
def worker_pool(workers: int, chosen: Sequence[Check]) -> Iterator[Executor | None]:
    """Provide processes for sections and exact scenarios; None where this process is enough.

    They end with the block.
    """
    if workers == 1 or (len(chosen) == 1 and chosen[0].runs != "spread"):
        yield None
        return
    _hear(CONTEXT.SimpleQueue())
    try:
        with processes(workers, _hear, _ticks) as pool:
            yield pool
    finally:
        _hear(None)


@contextmanager
def _bar(chosen: Sequence[Check], runs: Mapping[str, Run], progress: bool) -> Iterator[Advance]:
    """Show a progress bar of time."""
    seconds = {check.section: check.seconds for check in chosen}
    total = sum(runs[section].amount * each for section, each in seconds.items())
    with progress_bar(
        total=total,
        shown=progress,
        desc="guard",
        smoothing=0,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
    ) as bar:

        def advance(section: str, done: float) -> None:
            bar.set_postfix_str(section, refresh=False)
            # A sum of floats may pass their total.
            bar.update(min(done * seconds[section], total - bar.n))

        yield advance


def _run(check: Check, run: Run) -> list[CheckResult]:
    """Run a check; one that crashes has failed, one whose library is missing could not run.

    In each section the first failure that has a case is reduced.
    """
    begin = time.perf_counter()
    try:
        results = check.function(run)
    except ModuleNotFoundError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        moment = time.perf_counter() - begin
        return [
            CheckResult(
                "section crashed", 0, "", "", 0, detail, section=check.section, failed_after=moment
            )
        ]
    first = next((i for i, result in enumerate(results) if result.case), None)
    if first is not None and run.repro is not None:
        failed = results[first]
        results[first] = replace(
            failed, detail=f"{failed.detail}\n\n{reproduce(failed.case, run.repro).story}"
        )
    return results
