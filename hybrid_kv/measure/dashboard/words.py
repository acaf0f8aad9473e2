"""Rows in prose: verdicts, metrics with their units and intervals, days."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from hybrid_kv.measure.dashboard.data import STATIC_SUITE
from hybrid_kv.measure.dashboard.series import Step

SIGNS = {"pass": "✓", "fail": "✕", "worse": "✕", "void": "○", "stale": "△", "none": "–"}
WORDS = {word: f"{sign} {word}" for word, sign in SIGNS.items()} | {"none": "no verdict"}
NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
AXES = {
    "": "value",
    "time ratio": "ratio of two times",
    "share": "share, %",
    "1/B": "per byte",
    "B": "bytes",
}
# Keys of metrics whose words are not the key without its underscores.
METRICS = {
    "cpu_time": "CPU time",
    "gpu_time": "GPU time",
    "cpu_time_ratio": "change of the CPU time",
    "gpu_time_ratio": "change of the GPU time",
    "ratio_to_engine": "times the engine's time",
    "ratio_to_real": "times the time of the real code",
    "share_of_copy": "share of a copy's bandwidth",
    "exact_match_strict": "right answers, strict",
    "exact_match_flexible": "right answers, flexible",
}


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 commit, 1,200 commits."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def suite_name(suite: str) -> str:
    return "static kernel metrics" if suite == STATIC_SUITE else suite


def metric_name(key: str) -> str:
    """Return a metric in words."""
    return METRICS.get(key, key.replace("/", ", ").replace("_", " "))


def axis_name(unit: str) -> str:
    """Return the title of an axis; times are drawn in seconds."""
    return "time, s" if unit in NANOSECONDS else AXES.get(unit, unit)


def benchmark_name(key: Sequence[str]) -> str:
    """Return a series, by its values of `SERIES`, without its case and machine."""
    suite, benchmark, metric, *_ = key
    return f"{suite}: {benchmark}, {metric_name(metric)}"


def title(key: Sequence[str]) -> str:
    """Return a series in words, without its machine."""
    return benchmark_name(key) + (f" ({key[3]})" if key[3] else "")


def levels_text(unit: str, step: Step) -> str:
    """Return both levels of a step: 100 ns → 120 ns."""
    return f"{metric(step.before, unit)} → {metric(step.after, unit)}"


def change_text(step: Step) -> str:
    """Return +12 %, or the difference where there was nothing before."""
    return f"{100 * step.change:+.3g} %" if step.before else f"{step.after - step.before:+.3g}"


def short_change(step: Step) -> str:
    """Return a change in two digits: +9 %, +0.03 where there was nothing before."""
    percent = 100 * step.change
    if not step.before:
        return f"{step.after:+.2g}"
    return f"{percent:+,.0f} %" if abs(percent) >= 10 else f"{percent:+.2g} %"


def percent_change(row: Any) -> str:
    """Return a time ratio as a change with its interval: +8 % (+7 to +9)."""
    change, low, high = (
        f"{100 * (ratio - 1):+.3g}" for ratio in (row.value, row.ci_low, row.ci_high)
    )
    return f"{change} % ({low} to {high})" if has_interval(row) else f"{change} %"


def has_interval(row: Any) -> bool:
    return not (pd.isna(row.ci_low) or pd.isna(row.ci_high))


def day(row: Any) -> str:
    return str(row.time_utc)[:10]


def commit_day(row: Any) -> str:
    """Return the day of a row's commit; where that is not known, of its measurement."""
    return f"{row.moment:%Y-%m-%d}"


def with_unit(row: Any) -> str:
    """Return a row's value with its unit."""
    return metric(row.value, row.unit)


def with_interval(row: Any) -> str:
    """Return a row's value, its unit and its 95 % interval."""
    ends = (
        f" ({metric(row.ci_low, row.unit)} to {metric(row.ci_high, row.unit)})"
        if has_interval(row)
        else ""
    )
    return with_unit(row) + ends


def metric(value: float, unit: str) -> str:
    """Return a value with its unit: 6.79 µs, 15.1×, 34, 100 %."""
    if unit in NANOSECONDS:
        return duration(value * NANOSECONDS[unit])
    if unit == "time ratio":
        return f"{number(value)}×"
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "B" and abs(value) >= 1e6:
        return f"{number(value / 1e9)} GB" if abs(value) >= 1e9 else f"{number(value / 1e6)} MB"
    return f"{number(value)} {unit}".strip()


def number(value: float, digits: int = 3) -> str:
    """Return a value with `digits` significant digits: 15,122, 6.79, 1.1e-13."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -4 or size >= 12:
        return f"{value:.{digits}g}"
    text = f"{value:,.{max(0, digits - 1 - size)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(nanoseconds: float) -> str:
    """Return a time with its unit: 410 ns, 6.79 µs, 15.1 ms."""
    units = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))
    unit, size = next(((name, size) for name, size in units if nanoseconds >= size), ("ns", 1.0))
    return f"{number(nanoseconds / size)} {unit}"
