"""Runs the chosen sections so that no core is idle, the most telling first.

The exact model spreads over all cores and comes first: it finds most in least time. Then sections of one process each
run beside each other, the longest first. What measures time comes last, alone.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, wait
from contextlib import contextmanager
from dataclasses import replace
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
    """How much of each section a guard of this size runs; 0 leaves it out."""
    return {check.section: check.amounts[size] for check in load_checks()}


def run_guard(
    amount: dict[str, int],
    seed: int,
    progress: bool = True,
    device: str = "cpu",
    select: Sequence[str] | None = None,
    only: Mapping[str, str] | None = None,
    repro: Path | None = None,
    fail_fast: bool = False,
    jobs: int | None = None,
    report: Callable[[list[CheckResult]], object] = lambda found: None,
) -> list[CheckResult]:
    """All checks, each process on one thread: on tensors this small a second one costs more than it brings.

    Args:
        amount: by section, such as `amounts("quick")`.
        device: of the guard model; the exact one follows its integers on the CPU.
        select: parts of sections' names; one of them is enough.
        only: levels by factor; only sections that have these factors run.
        repro: folder for reduced cases of what failed; it is made when there is one.
        fail_fast: end with the first section that fails, and what runs beside it.
        jobs: processes at a time; None: see `num_workers`.
        report: called with each section's results as it ends.

    Raises:
        ConfigError: no section is left, or none has these levels; nothing has run.
        ModuleNotFoundError: a section needs a package that is not installed; nothing has run.
    """
    known = load_checks()
    refuse_unknown_levels(only or {}, known)
    chosen = [
        check
        for check in known
        if amount.get(check.section)
        and (not select or any(part.lower() in check.section for part in select))
        and (not only or only.keys() <= check.factors().keys())
    ]
    if not chosen:
        wanted = [*(select or ()), *(only or ())]
        raise ConfigError(f"no section of this guard has {' or '.join(wanted)!r}; leave --only out")
    require(*dict.fromkeys(package for check in chosen for package in check.needs.split()))
    workers = num_workers(jobs)
    run = Run(
        0, seed, workers=workers, device=device, only=only or {}, repro=repro, fail_fast=fail_fast
    )
    runs = {check.section: replace(run, amount=amount[check.section]) for check in chosen}
    results: dict[str, list[CheckResult]] = {}
    begin = time.perf_counter()
    with one_thread(), _bar(chosen, runs, progress) as advance, _pool(workers, chosen) as pool:
        for check, found, seconds in _sections(chosen, runs, advance, pool):
            started = time.perf_counter() - begin - seconds
            results[check.section] = [
                result
                if result.passed
                else replace(result, failed_after=started + (result.failed_after or 0.0))
                for result in found
            ]
            report(results[check.section])
            if fail_fast and not all(result.passed for result in found):
                break
        else:
            if pool is not None:
                pool.shutdown()  # Workers that are done end by themselves, and clear up.
    return [result for check in known for result in results.get(check.section, [])]


def _sections(
    chosen: Sequence[Check], runs: Mapping[str, Run], advance: Advance, pool: Executor | None
) -> Iterator[Ended]:
    """Each section as it ends."""
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
    """One process for each section, as many at a time as there are workers; the longest go first."""
    ordered = sorted(checks, key=lambda check: -check.seconds * runs[check.section].amount)
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
            found, seconds = future.result()
            yield check, found, seconds


_ticks: Any = None  # the queue of what workers have done; each process has its end of it


def _hear(ticks: Any) -> None:
    global _ticks
    _ticks = ticks


def _in_worker(module: str, section: str, run: Run) -> tuple[list[CheckResult], float]:
    import_module(module)  # registers the check, which may lie outside of `guard.checks`
    begin = time.perf_counter()
    found = _run(CHECKS[section], replace(run, progress=lambda done: _ticks.put((section, done))))
    return found, time.perf_counter() - begin


@contextmanager
def _pool(workers: int, chosen: Sequence[Check]) -> Iterator[Executor | None]:
    """Processes for sections and exact scenarios; none where this one is enough. They end with the block."""
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
    """A bar of time."""
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
            bar.update(
                min(done * seconds[section], total - bar.n)
            )  # A sum of floats may pass their total.

        yield advance


def _run(check: Check, run: Run) -> list[CheckResult]:
    """A check that crashes has found something; one whose library is missing could not run.

    Of each section the first failure that has a case is reduced.
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
        found = results[first]
        results[first] = replace(
            found, detail=f"{found.detail}\n\n{reproduce(found.case, run.repro).story}"
        )
    return results
