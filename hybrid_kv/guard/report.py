"""What `hybrid-kv guard` runs, prints and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

from hybrid_kv.guard.checks import (
    LOGIT_CELLS,
    CheckResult,
    check_accuracy,
    check_exact_model,
    check_expansion,
    check_guard_logits,
    check_layout,
)
from hybrid_kv.results import Row, provenance

# How much of each check: the quick guard ends within a minute on two cores, the full one within five.
QUICK = {"requests": 1000, "prompts": 4, "questions": 60}
FULL = {"requests": 6000, "prompts": 16, "questions": 250}
LAYOUT_TRIALS = 200


def run_guard(quick: bool, seed: int, progress: bool = True) -> list[CheckResult]:
    """All checks, cheapest first."""
    from accuracy.guard_model.problems import eval_set

    amount = QUICK if quick else FULL
    sections: dict[str, int] = {
        "layout": LAYOUT_TRIALS,
        "exact model": amount["requests"],
        "guard model": amount["prompts"] * len(LOGIT_CELLS),
        "accuracy": amount["questions"],
        "expansion": 1,
    }
    results: list[CheckResult] = []
    with tqdm(total=sum(sections.values()), disable=not progress, desc="guard", unit="check") as bar:
        results += check_layout(seed, LAYOUT_TRIALS, bar.update)
        bar.set_postfix_str("exact model")
        results += check_exact_model(seed, amount["requests"], bar.update)
        bar.set_postfix_str("guard model")
        prompts = [item.prompt for item in eval_set(seed + 7, amount["prompts"])]
        results += check_guard_logits(prompts, bar.update)
        bar.set_postfix_str("accuracy")
        results += check_accuracy(amount["questions"], bar.update)
        bar.set_postfix_str("expansion")
        results += check_expansion(bar.update)
    return results


def result_rows(results: Sequence[CheckResult]) -> list[Row]:
    """One row per check. Times stay in `params`: a guard's duration is no benchmark."""
    rows = []
    for result in results:
        verdict = "pass" if result.passed else ("void" if result.detail.startswith("void") else "fail")
        params = {**result.params, "limit": result.limit, "seconds": round(result.seconds, 3)}
        rows.append(
            Row(
                suite="guard",
                benchmark=result.section,
                metric=result.name,
                value=result.value,
                unit=result.unit,
                params=params,
                n=result.n,
                verdict=verdict,
            )
        )
    return rows


def print_results(results: Sequence[CheckResult]) -> None:
    """The table, and below it the first thing that is wrong in each failed check."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("section", "check", "figure", "limit", "of", "seconds", ""):
        table.add_column(name, justify="right" if name in ("figure", "limit", "of", "seconds") else "left")
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
    console.print(f"\n{len(results) - failed} of {len(results)} checks passed" + (f", {failed} failed" if failed else ""))


def write_json(results: Sequence[CheckResult], path: Path) -> None:
    """Every check with its figure, and where the run comes from."""
    import json

    document: dict[str, Any] = {
        "passed": all(result.passed for result in results),
        "provenance": asdict(provenance()),
        "checks": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
