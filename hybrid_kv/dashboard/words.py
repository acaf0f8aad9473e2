"""How rows read in prose: verdicts, figures with their units and intervals, days."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from hybrid_kv.dashboard.data import STATIC_SUITE
from hybrid_kv.dashboard.steps import Step

WORDS = {"pass": "✓ pass", "fail": "✕ fail", "void": "○ void", "stale": "△ passed on other code", "none": "no verdict"}
NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}


def suite_name(suite: str) -> str:
    return "static kernel metrics" if suite == STATIC_SUITE else suite


def in_nanoseconds(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that are a time, whatever its unit, in nanoseconds with their intervals."""
    rows = rows[rows["unit"].isin(NANOSECONDS)].copy()
    for name in ("value", "ci_low", "ci_high"):
        rows[name] = rows[name].astype(float) * rows["unit"].map(NANOSECONDS)
    rows["unit"] = "ns"
    return rows


# A metric is a key that never changes; what readers see is made of it here. Any other loses its underscores.
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
    "invalid_rate": "answers without a number",
    "mcnemar_p": "McNemar p, one-sided",
    "spill_bytes": "spilled bytes",
    "shared_bytes": "shared memory",
    "blocks_per_sm": "blocks per SM",
    "load_bits": "bits per load",
    "store_bits": "bits per store",
}


AXES = {"": "value", "time ratio": "ratio of two times", "share": "share, %", "1/B": "per byte", "B": "bytes"}


def metric_name(key: str) -> str:
    """A metric in words."""
    return METRICS.get(key, key.replace("/", ", ").replace("_", " "))


def axis_name(unit: str) -> str:
    """What stands beside an axis of a unit; times are drawn in seconds."""
    return "time, s" if unit in NANOSECONDS else AXES.get(unit, unit)


def benchmark_name(key: Sequence[str]) -> str:
    """What a series is of, by its values of `SERIES`, without its case and machine."""
    suite, benchmark, metric, *_ = key
    return f"{suite}: {benchmark}, {metric_name(metric)}"


def title(key: Sequence[str]) -> str:
    """A series in words, without its machine."""
    case = key[3]
    return benchmark_name(key) + (f" ({case})" if case else "")


def levels_text(unit: str, step: Step) -> str:
    """Both levels of a step: 100 ns → 120 ns."""
    return f"{figure(step.before, unit)} → {figure(step.after, unit)}"


def change_text(step: Step) -> str:
    """+12 %, or the difference where there was nothing before."""
    return f"{100 * step.change:+.3g} %" if step.before else f"{step.after - step.before:+.3g}"


def percent_change(row: Any) -> str:
    """A time ratio as a change with its interval: +8 % (+7 to +9)."""
    change, low, high = (f"{100 * (ratio - 1):+.3g}" for ratio in (row.value, row.ci_low, row.ci_high))
    return f"{change} %" if pd.isna(row.ci_low) or pd.isna(row.ci_high) else f"{change} % ({low} to {high})"


def day(row: Any) -> str:
    return str(row.time_utc)[:10]


def with_unit(row: Any) -> str:
    """A row's figure with its unit."""
    return figure(row.value, row.unit)


def figure(value: float, unit: str) -> str:
    """A figure with its unit: 6.79 µs, 15.1×, 34, 100 %."""
    if unit in NANOSECONDS:
        return duration(value * NANOSECONDS[unit])
    if unit == "time ratio":
        return f"{number(value)}×"
    if unit == "share":
        return f"{100 * value:.1f} %"
    return f"{number(value)} {unit}".strip()


def with_interval(row: Any) -> str:
    """A row's figure, its unit and its 95 % interval."""
    if pd.isna(row.ci_low) or pd.isna(row.ci_high):
        return with_unit(row)
    ends = [with_unit(row._replace(value=end)) for end in (row.ci_low, row.ci_high)]
    return f"{with_unit(row)} ({ends[0]} to {ends[1]})"


def number(value: float, digits: int = 3) -> str:
    """A figure with `digits` significant digits, thousands set apart: 15,122, 6.79, 1.1e-13."""
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


def about(value: float) -> str:
    """Two significant digits: 1.9, 6,300."""
    return number(float(f"{value:.2g}"))


def time_unit(nanoseconds: float) -> tuple[str, float]:
    """The unit in which a time has one to three digits before its point, and its size in nanoseconds."""
    units = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))
    return next(((name, size) for name, size in units if nanoseconds >= size), ("ns", 1.0))


def duration(nanoseconds: float) -> str:
    """A time with its unit: 410 ns, 6.79 µs, 15.1 ms."""
    unit, size = time_unit(nanoseconds)
    return f"{number(nanoseconds / size)} {unit}"
