"""What `hybrid-kv guard` runs, prints and writes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

from hybrid_kv.config import ConfigError
from hybrid_kv.guard.answers import NUM_CELLS, check_answers, questions
from hybrid_kv.guard.checks import (
    LOGIT_CELLS,
    CheckResult,
    check_accuracy,
    check_costs,
    check_exact_model,
    check_expansion,
    check_guard_logits,
    check_layout,
)
from hybrid_kv.results import Receipt, Row, provenance, timing_row

# How much of each check: on two cores the quick guard ends within a minute, the full one within five, the long one
# within half an hour. All forced patterns and the covering design are the first 2,000 requests or so.
QUICK = {"requests": 2500, "trios": 12, "prompts": 4, "answers": 0, "questions": 100}
FULL = {"requests": 12_000, "trios": 48, "prompts": 16, "answers": 200, "questions": 250}
LONG = FULL | {"requests": 100_000}
LAYOUT_TRIALS = 200
# Seconds per step of each section, measured on two cores: the bar's share is one of time, not of steps.
_SECONDS = {
    "layout": 0.0005,
    "costs": 0.03,
    "exact model": 0.0066,
    "guard model": 0.125,
    "answers": 4.0,
    "accuracy": 0.026,
    "block ids": 2.2,
}


def run_guard(
    amount: dict[str, int],
    seed: int,
    progress: bool = True,
    device: str = "cpu",
    select: Sequence[str] | None = None,
) -> list[CheckResult]:
    """All checks, cheapest first, on one thread: on tensors this small a second one costs more than it brings.

    Args:
        amount: QUICK, FULL or LONG.
        device: of the guard model; the exact one follows its integers on the CPU.
        select: parts of sections' names; one of them is enough.

    Raises:
        ConfigError: no section is left.
    """
    from hybrid_kv.accuracy.guard_model.problems import eval_set

    sections: dict[str, int] = {
        "layout": LAYOUT_TRIALS,
        "costs": amount["trios"],
        "exact model": amount["requests"],
        "guard model": amount["prompts"] * len(LOGIT_CELLS),
        "answers": NUM_CELLS if amount["answers"] else 0,
        "accuracy": amount["questions"],
        "block ids": 1,
    }
    if select:
        sections = {name: steps for name, steps in sections.items() if any(part.lower() in name for part in select)}
    if not any(sections.values()):
        raise ConfigError(f"no section of this guard has {' or '.join(select or ())!r} in its name")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    prompts = [item.prompt for item in eval_set(seed + 7, amount["prompts"])]
    shared = questions(seed + 7, amount["prompts"])
    workers = min(8, os.cpu_count() or 1)
    results: list[CheckResult] = []
    seconds = 0.1 if sys.stderr.isatty() else 10.0  # A log keeps every line that a terminal overwrites.
    with tqdm(
        total=sum(steps * _SECONDS[name] for name, steps in sections.items()),
        disable=not progress,
        desc="guard",
        mininterval=seconds,
        smoothing=0,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
    ) as bar:
        section = ""

        def advance(steps: int) -> None:
            bar.update(steps * _SECONDS[section])

        checks: dict[str, Callable[[], list[CheckResult]]] = {
            "layout": lambda: check_layout(seed, LAYOUT_TRIALS, advance),
            "costs": lambda: check_costs(seed, amount["trios"], advance),
            "exact model": lambda: check_exact_model(seed, amount["requests"], advance, workers),
            "guard model": lambda: check_guard_logits(prompts, shared, advance, device),
            "answers": lambda: check_answers(amount["answers"], advance, device=device),
            "accuracy": lambda: check_accuracy(amount["questions"], advance),
            "block ids": lambda: check_expansion(advance),
        }
        for section, check in checks.items():
            if not sections.get(section):
                continue
            bar.set_postfix_str(section)
            results += _run(section, check)
    torch.set_num_threads(threads)
    return results


def _run(section: str, check: Callable[[], list[CheckResult]]) -> list[CheckResult]:
    """A check that crashes has found something; one whose library is missing could not run."""
    try:
        return check()
    except ModuleNotFoundError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        return [CheckResult(section, "runs to its end", False, 0, "", "", 0, 0.0, detail)]


def result_rows(results: Sequence[CheckResult]) -> list[Row]:
    """One row per check. Times stay in `params`: a guard's duration is no benchmark."""
    rows = []
    for result in results:
        verdict = "pass" if result.passed else ("void" if result.detail.startswith("void") else "fail")
        params = {**result.params, "limit": result.limit, "seconds": round(result.seconds, 3)}
        values: dict[str, Any] = {
            "suite": "guard",
            "benchmark": result.section,
            "metric": result.name,
            "value": result.value,
            "unit": result.unit,
            "n": result.n,
            "verdict": verdict,
        }
        if result.unit == "time ratio":
            # The benchmark raises unless all subjects agreed before and after the timing.
            rows.append(timing_row(receipt=Receipt(True, True, 0.0), params=params, **values))
        else:
            rows.append(Row(params=params, **values))
    return rows


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
