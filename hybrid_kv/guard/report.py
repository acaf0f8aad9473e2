"""What `hybrid-kv guard` runs, prints and writes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

from hybrid_kv.config import ConfigError
from hybrid_kv.errors import require
from hybrid_kv.guard.registry import Check, CheckResult, Run, Size, load_checks, refuse_unknown_levels
from hybrid_kv.results import Receipt, Row, metric_key, provenance, timing_row


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
) -> list[CheckResult]:
    """All checks, on one thread: on tensors this small a second one costs more than it brings.

    Args:
        amount: by section, such as `amounts("quick")`.
        device: of the guard model; the exact one follows its integers on the CPU.
        select: parts of sections' names; one of them is enough.
        only: levels by factor; only sections that have these factors run.
        repro: folder for small cases of what failed; it is made when there is one.

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
        asked = [*(select or ()), *(only or ())]
        raise ConfigError(f"no section of this guard has {' or '.join(asked)!r}; leave -k or --only out")
    require(*dict.fromkeys(package for check in chosen for package in check.needs))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results: list[CheckResult] = []
    total = sum(amount[check.section] * check.seconds for check in chosen)
    with tqdm(
        total=total,
        disable=not progress,
        desc="guard",
        mininterval=0.1 if sys.stderr.isatty() else 10.0,  # A log keeps every line that a terminal overwrites.
        smoothing=0,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
    ) as bar:
        for check in chosen:
            bar.set_postfix_str(check.section)

            def advance(done: float, seconds: float = check.seconds) -> None:
                bar.update(min(done * seconds, total - bar.n))  # A sum of floats may pass their total.

            workers = min(8, os.cpu_count() or 1)
            results += _run(check, Run(amount[check.section], seed, advance, workers, device, only or {}, repro))
    torch.set_num_threads(threads)
    return results


def _run(check: Check, run: Run) -> list[CheckResult]:
    """A check that crashes has found something; one whose library is missing could not run."""
    try:
        return check.function(run)
    except ModuleNotFoundError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        return [CheckResult(check.section, "runs to its end", False, 0, "", "", 0, 0.0, detail)]


LIMITS = {">=": "at_least", "<=": "at_most", "": "limit"}


def result_rows(results: Sequence[CheckResult]) -> list[Row]:
    """A row for each check, and behind it one for each of its other numbers, whose metric is `CHECK:NUMBER`.

    `params` say what was run, and nothing of what came out: they are the same in every run. Seconds have no unit of
    time, since a guard's duration is no benchmark.
    """
    rows = []
    for result in results:
        key = metric_key(result.name)
        shared: dict[str, Any] = {"suite": "guard", "benchmark": result.section, "n": result.n}
        verdict = "pass" if result.passed else ("void" if result.detail.startswith("void") else "fail")
        low, high = result.interval or (None, None)
        values = {"metric": key, "value": result.value, "unit": result.unit, "verdict": verdict, **shared}
        values |= {"params": result.params, "ci_low": low, "ci_high": high}
        # The benchmark raises unless all subjects agreed before and after the timing.
        timed = result.unit == "time ratio"
        rows.append(timing_row(receipt=Receipt(True, True, 0.0), **values) if timed else Row(**values))
        numbers = {**_limit(result.limit), "seconds": round(result.seconds, 3), **result.figures}
        rows += [
            Row(metric=f"{key}:{name}", value=value, params=result.params, **shared)
            for name, value in numbers.items()
            if isinstance(value, int | float)
        ]
    return rows


def _limit(text: str) -> dict[str, float]:
    """A limit as a number, by what it means: at least, at most, or the value that is due."""
    sign, _, number = text.rpartition(" ")
    return {LIMITS[sign]: float(number)} if text else {}


def print_results(results: Sequence[CheckResult]) -> None:
    """The table, and below it the first thing that is wrong in each failed check."""
    # Into a file or a CI log rich would fold the table at 80 columns.
    console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    table = Table(box=None, pad_edge=False)
    for name in ("section", "check", "figure", "limit", "of", "seconds", ""):
        table.add_column(
            name, justify="right" if name in ("figure", "limit", "of", "seconds") else "left", no_wrap=True
        )
    for result in results:
        figure = f"{result.value:.3g}" if isinstance(result.value, float) else str(result.value)
        seconds = f"{result.seconds:.1f}" if result.seconds else ""
        verdict = "ok" if result.passed else "FAILED"
        table.add_row(result.section, result.name, figure, result.limit, f"{result.n:,}", seconds, verdict)
    console.print(table)
    for result in results:
        if not result.passed:
            console.print(f"\n{result.section}, {result.name}: {result.detail}")
    failed = sum(not result.passed for result in results)
    console.print(
        f"\n{len(results) - failed} of {len(results)} checks passed" + (f", {failed} failed" if failed else "")
    )


def document(results: Sequence[CheckResult], seed: int) -> dict[str, Any]:
    """For JSON: every check with its figure, and where the run comes from."""
    return {
        "passed": all(result.passed for result in results),
        "seed": seed,
        "provenance": asdict(provenance()),
        "checks": [asdict(result) for result in results],
    }
