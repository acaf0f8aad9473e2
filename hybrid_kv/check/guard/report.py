"""The guard's table and its JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hybrid_kv.check.ci import Verdict, Word
from hybrid_kv.check.guard.registry import CheckResult
from hybrid_kv.errors import VOID

VERDICTS: dict[str, Word] = {"pass": "ok", "fail": "failed", "void": "void"}


def verdicts(results: Sequence[CheckResult]) -> list[Verdict]:
    """Return the results as `hybrid_kv.check.ci` takes them."""
    return [
        Verdict(
            f"{result.section}, {result.name}",
            VERDICTS[result.verdict],
            result.detail,
            result.seconds,
        )
        for result in results
    ]


def section_text(results: Sequence[CheckResult], verbose: bool = False) -> str:
    """Return a section's line, and below it each check that failed, or every check.

    A failed check names the first thing that is wrong.
    """
    section = results[0].section
    seconds = sum(result.seconds for result in results)
    bad = Counter(VERDICTS[result.verdict].upper() for result in results if not result.passed)
    words = ", ".join(f"{count} {word}" for word, count in bad.items())
    count = (
        f"{words} of {len(results)} checks"
        if bad
        else f"{len(results)} check{'s' * (len(results) > 1)} ok"
    )
    lines = [f"{section:<12}  {seconds:>7.1f} s  {count}"]
    for result in results:
        if verbose or not result.passed:
            value = f"{result.value:.3g}" if isinstance(result.value, float) else str(result.value)
            limit = f" (limit {result.limit})" if result.limit else ""
            lines.append(f"    {result.name}: {value}{limit}, of {result.n:,}")
        if not result.passed:
            lines.append(f"    {result.verdict}: {result.detail}")
    return "\n".join(lines)


def print_closing(results: Sequence[CheckResult]) -> None:
    """Print what failed first, and how many passed."""
    first = first_failure(results)
    if first is not None:
        exact = f" and {first['exact_requests']} exact requests" if first["exact_requests"] else ""
        print(f"\nfirst failure: {first['section']}, after {first['seconds']:.1f} s{exact}")
    count = Counter(result.verdict for result in results)
    others = (f", {count[name]} {VERDICTS[name]}" for name in ("fail", "void") if count[name])
    passed = f"\n{count['pass']} of {len(results)} checks passed{''.join(others)}"
    unfit = unfit_machine(results)
    print(passed + (f"; unfit machine: {unfit}" if unfit else ""))


def exit_code(results: Sequence[CheckResult]) -> int:
    """Return 0 if all passed, 1 if one failed, `VOID` if none failed and one was void."""
    verdicts = {result.verdict for result in results}
    return 1 if "fail" in verdicts else VOID if "void" in verdicts else 0


def unfit_machine(results: Sequence[CheckResult]) -> str:
    """Return why the times among them prove nothing; empty: they do, or there are none."""
    return next((result.params["unfit"] for result in results if "unfit" in result.params), "")


def first_failure(results: Sequence[CheckResult]) -> dict[str, Any] | None:
    """Return the check that failed first, and the seconds until then.

    If it counts exact requests, their number too.
    """
    failed = [result for result in results if result.failed_after is not None]
    if not failed:
        return None
    first = min(failed, key=lambda result: result.failed_after or 0.0)
    requests = first.metrics.get("requests_to_failure")
    return {
        "section": first.section,
        "check": first.name,
        "seconds": first.failed_after,
        "exact_requests": requests,
    }


def document(
    results: Sequence[CheckResult], seed: int, provenance: Mapping[str, Any], complete: bool = True
) -> dict[str, Any]:
    """Return every check with its metric, and the origin of the run, for JSON.

    A run that is not complete did not pass.
    """
    return {
        "passed": complete and all(result.passed for result in results),
        "complete": complete,
        "seed": seed,
        "unfit": unfit_machine(results),
        "first_failure": first_failure(results),
        "provenance": dict(provenance),
        "checks": [
            {key: value for key, value in asdict(result).items() if key != "case"}
            | {"passed": result.passed}
            for result in results
        ],
    }
