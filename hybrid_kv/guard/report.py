"""What `hybrid-kv guard` prints and writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hybrid_kv.ci import Verdict, Word
from hybrid_kv.errors import VOID
from hybrid_kv.guard.registry import CheckResult
from hybrid_kv.results import Receipt, Row, metric_key, provenance, timing_row

VERDICTS: dict[str, Word] = {"pass": "ok", "fail": "failed", "void": "void"}
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
        low, high = result.interval or (None, None)
        values = {"metric": key, "value": result.value, "unit": result.unit, "verdict": result.verdict, **shared}
        values |= {"params": result.params, "ci_low": low, "ci_high": high}
        # The benchmark raises unless all subjects agreed before and after the timing.
        timed = result.unit == "time ratio"
        rows.append(timing_row(receipt=Receipt(True, True, 0.0), **values) if timed else Row(**values))
        moment = {} if result.failed_after is None else {"failed_after": round(result.failed_after, 3)}
        numbers = {**_limit(result.limit), "seconds": round(result.seconds, 3), **moment, **result.metrics}
        rows += [
            Row(metric=f"{key}:{name}", value=value, params=result.params, **shared)
            for name, value in numbers.items()
            if isinstance(value, int | float)
        ]
    return rows


def whole_row(size: str, results: Sequence[CheckResult]) -> Row:
    """The seconds of all checks of a whole guard of a size. More checks take longer, so neither way is better."""
    seconds = round(sum(result.seconds for result in results), 1)
    return Row(suite="guard", benchmark="whole", metric="seconds", value=seconds, params={"size": size}, n=len(results))


def _limit(text: str) -> dict[str, float]:
    """A limit as a number, by what it means: at least, at most, or the value that is due."""
    sign, _, number = text.rpartition(" ")
    return {LIMITS[sign]: float(number)} if text else {}


def verdicts(results: Sequence[CheckResult]) -> list[Verdict]:
    """For `hybrid_kv.ci`."""
    return [
        Verdict(f"{result.section}, {result.name}", VERDICTS[result.verdict], result.detail, result.seconds)
        for result in results
    ]


def section_text(results: Sequence[CheckResult], verbose: bool = False) -> str:
    """A section's line, and below it each check that failed, or every one, with the first thing that is wrong."""
    section, seconds = results[0].section, sum(result.seconds for result in results)
    bad = Counter(VERDICTS[result.verdict].upper() for result in results if not result.passed)
    words = ", ".join(f"{count} {word}" for word, count in bad.items())
    count = f"{words} of {len(results)} checks" if bad else f"{len(results)} check{'s' * (len(results) > 1)} ok"
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
    """What failed first, and how many passed."""
    if (first := first_failure(results)) is not None:
        exact = f" and {first['exact_requests']} exact requests" if first["exact_requests"] else ""
        print(f"\nfirst failure: {first['section']}, after {first['seconds']:.1f} s{exact}")
    count = Counter(result.verdict for result in results)
    others = (f", {count[name]} {VERDICTS[name]}" for name in ("fail", "void") if count[name])
    passed = f"\n{count['pass']} of {len(results)} checks passed{''.join(others)}"
    print(passed + (f"; unfit machine: {unfit}" if (unfit := unfit_machine(results)) else ""))


def exit_code(results: Sequence[CheckResult]) -> int:
    """0 if all passed, 1 if one failed, `VOID` if none did but one was void."""
    verdicts = {result.verdict for result in results}
    return 1 if "fail" in verdicts else VOID if "void" in verdicts else 0


def unfit_machine(results: Sequence[CheckResult]) -> str:
    """Why the times among them prove nothing; empty: they do, or there are none."""
    return next((result.params["unfit"] for result in results if "unfit" in result.params), "")


def first_failure(results: Sequence[CheckResult]) -> dict[str, Any] | None:
    """The check that failed first, the seconds until then, and the exact requests if it counts them."""
    failed = [result for result in results if result.failed_after is not None]
    if not failed:
        return None
    first = min(failed, key=lambda result: result.failed_after or 0.0)
    requests = first.metrics.get("requests_to_failure")
    return {"section": first.section, "check": first.name, "seconds": first.failed_after, "exact_requests": requests}


def document(results: Sequence[CheckResult], seed: int, complete: bool = True) -> dict[str, Any]:
    """For JSON: every check with its metric, and where the run comes from; one that is not complete did not pass."""
    return {
        "passed": complete and all(result.passed for result in results),
        "complete": complete,
        "seed": seed,
        "unfit": unfit_machine(results),
        "first_failure": first_failure(results),
        "provenance": asdict(provenance()),
        "checks": [
            {key: value for key, value in asdict(result).items() if key != "case"} | {"passed": result.passed}
            for result in results
        ],
    }
