"""The guard's results as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybrid_kv.measure.results.row import Receipt, Row, metric_key, timing_row

if TYPE_CHECKING:
    from hybrid_kv.check.guard.registry import CheckResult

LIMITS = {">=": "at_least", "<=": "at_most", "": "limit"}


def result_rows(results: Sequence[CheckResult]) -> list[Row]:
    """Return a row for each check, and after it one for each of its other numbers.

    The metric of those is `CHECK:NUMBER`. `params` say what was run, and nothing of what came out:
    they are the same in every run. Seconds have no unit of time, since a guard's duration is no
    benchmark.
    """
    rows = []
    for result in results:
        key = metric_key(result.name)
        shared: dict[str, Any] = {"suite": "guard", "benchmark": result.section, "n": result.n}
        low, high = result.interval or (None, None)
        values = {
            "metric": key,
            "value": result.value,
            "unit": result.unit,
            "verdict": result.verdict,
            **shared,
        }
        values |= {"params": result.params, "ci_low": low, "ci_high": high}
        # The benchmark raises unless all subjects agreed before and after the timing.
        timed = result.unit == "time ratio"
        rows.append(
            timing_row(
                receipt=Receipt(checked_before=True, checked_after=True, max_error=0.0), **values
            )
            if timed
            else Row(**values)
        )
        moment = (
            {} if result.failed_after is None else {"failed_after": round(result.failed_after, 3)}
        )
        numbers = {
            **_limit(result.limit),
            "seconds": round(result.seconds, 3),
            **moment,
            **result.metrics,
        }
        rows += [
            Row(metric=f"{key}:{name}", value=value, params=result.params, **shared)
            for name, value in numbers.items()
            if isinstance(value, int | float)
        ]
    return rows


def whole_row(size: str, results: Sequence[CheckResult]) -> Row:
    """Return the seconds of all checks of a whole guard of a size.

    More checks take longer, so neither way is better.
    """
    seconds = round(sum(result.seconds for result in results), 1)
    return Row(
        suite="guard",
        benchmark="whole",
        metric="seconds",
        value=seconds,
        params={"size": size},
        n=len(results),
    )


def _limit(text: str) -> dict[str, float]:
    """Return a limit as a number, by its meaning: at least, at most, or the value that is due."""
    sign, _, number = text.rpartition(" ")
    return {LIMITS[sign]: float(number)} if text else {}
