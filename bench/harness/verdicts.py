"""Verdicts of a comparison: outcomes per benchmark, alarms, and how they are shown and kept.

Exact counts: any change is an alarm until `results/acknowledged.csv` holds it with a reason; so is
a count that HEAD no longer has. Times: see `bench.harness.compare`. A benchmark whose false alarms
exceed its rate in `results/operating_curve.csv` is *quarantined*: it is measured and shown, but
raises no alarm.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.harness.cells import CellInfo
from bench.harness.compare import Comparison, Measured, own_benchmarks
from bench.harness.inference import Estimate, estimate, kept
from bench.harness.judgement import Design, Times, confirmed, verdict
from hybrid_kv.check.ci import plain
from hybrid_kv.config import ConfigError
from hybrid_kv.measure.dashboard.words import duration
from hybrid_kv.measure.results import Receipt, Row, provenance, read_beside, timing_row

if TYPE_CHECKING:
    import pandas as pd

METRICS = {"cpu": "cpu_time_ratio", "gpu": "gpu_time_ratio"}
ALARMS = ("slower", "changed", "wrong result", "broken at HEAD")  # unless quarantined
AT_BASE = "_at_base"  # behind a count's metric: its value at BASE
Change = tuple[str, str, str, str]  # suite, benchmark, params as in a row, metric
Steps = Mapping[
    int, Mapping[int | None, str]
]  # reasons by old and new value; None: the count is gone


@dataclass(frozen=True)
class Outcome:
    """One time, or one count, of BASE and HEAD.

    Attributes:
        verdict: `same`, `slower`, `faster` or `inconclusive` of a time, `same`, `changed` or
            `acknowledged` of a count; `wrong result`, `broken at HEAD` (BASE can run it) or `not
            comparable` of either.
        base, head: seconds per call, or the count. Of times, `head / base` is the estimate's ratio.
        estimate: how many times as long HEAD takes, from the repeat if there was one.
        p: of the repeat, adjusted.
        reason: why there is no comparison, or why a change is fine.
        own: why a side ran the benchmark that its version came with.
    """

    cell: CellInfo
    metric: str
    verdict: str
    unit: str = "s"
    base: float | None = None
    head: float | None = None
    estimate: Estimate | None = None
    p: float | None = None
    suspect: bool = False
    quarantined: bool = False
    reason: str = ""
    max_error: float = 0.0
    clock_mhz: tuple[int, int] | None = None
    own: Mapping[str, str] = field(default_factory=dict)

    @property
    def alarm(self) -> bool:
        return self.verdict in ALARMS and not self.quarantined

    @property
    def name(self) -> str:
        return f"{self.cell.key} {self.metric}" if self.cell.tier == "count" else self.cell.key


# ---- times ----


def _kept(times: Times) -> tuple[float, float]:
    """Return seconds of BASE and HEAD.

    They are geometric means over the pairs that the ratio keeps, so that theirs is that ratio.
    """
    logs = np.log(np.array(times.seconds)[kept(times.log_ratios)])
    base, head = np.exp(logs.mean(axis=0))
    return float(base), float(head)


def _clocks(times: Times) -> tuple[int, int] | None:
    known = [(base, head) for base, head in times.clock_mhz if base and head]
    if not known:
        return None
    base, head = map(median_high, zip(*known, strict=True))
    return base, head


def timed_outcomes(
    measured: Measured, design: Design, quarantined: Collection[str] = ()
) -> Iterator[Outcome]:
    """Yield outcomes of the cells that have times."""
    alarms = confirmed(measured.first, measured.repeat, design)
    for cell in measured.cells:
        if cell.key in measured.failures or cell.key not in measured.first:
            continue
        times = measured.repeat.get(cell.key, measured.first[cell.key])
        alarm, p = alarms.get(cell.key, ("", None))
        base, head = _kept(times)
        yield Outcome(
            cell,
            METRICS[cell.tier],
            verdict(times, alarm, design),
            base=base,
            head=head,
            estimate=estimate(times.log_ratios),
            p=p,
            suspect=cell.key in measured.repeat,
            quarantined=cell.key in quarantined,
            max_error=times.max_error,
            clock_mhz=_clocks(times),
            own=times.own,
        )


def rows_here(file: Path, metric: str) -> pd.DataFrame:
    """Return the rows of a metric that were measured on this machine."""
    frame = read_beside(file)
    return frame[(frame["metric"] == metric) & (frame["machine"] == provenance().machine)]


def read_quarantine(file: Path) -> set[str]:
    """Keys of the benchmarks that could not keep their false-alarm rate on this machine."""
    newest = rows_here(file, "false_alarm_rate").drop_duplicates("benchmark", keep="last")
    return set(newest.loc[newest["verdict"] == "fail", "benchmark"])


# ---- counts ----


def change_of(cell: CellInfo, metric: str) -> Change:
    """Return what identifies a count in `acknowledged.csv`."""
    return cell.suite, cell.benchmark, json.dumps(cell.params, sort_keys=True), metric


def read_acknowledged(file: Path) -> dict[Change, Steps]:
    """Return reasons by count, old value and new value.

    Raises:
        ConfigError: a row that `--acknowledge` did not write.
    """
    found: dict[Change, dict[int, dict[int | None, str]]] = defaultdict(lambda: defaultdict(dict))
    for row in read_beside(file).itertuples():
        params = json.loads(str(row.params))
        old, reason, gone = (
            params.pop("was", None),
            params.pop("reason", None),
            params.pop("gone", False),
        )
        if not isinstance(old, int | float) or not isinstance(reason, str):
            raise ConfigError(
                f"{file}: the row of {row.benchmark} has no 'was' and 'reason'; restore the file"
            )
        change = (
            str(row.suite),
            str(row.benchmark),
            json.dumps(params, sort_keys=True),
            str(row.metric),
        )
        found[change][int(old)][None if gone else int(row.value)] = reason
    return found


def reason_for(old: int, new: int | None, steps: Steps) -> str:
    """Return reasons of the acknowledged steps from `old` to `new`; empty if none lead there."""
    paths, seen = [(old, "")], {old}
    while paths:
        value, reasons = paths.pop(0)
        for after, reason in steps.get(value, {}).items():
            path = f"{reasons}; {reason}" if reasons else reason
            if after == new:
                return path
            if after is not None and after not in seen:
                seen.add(after)
                paths.append((after, path))
    return ""


def count_outcomes(measured: Measured, acknowledged: Mapping[Change, Steps]) -> Iterator[Outcome]:
    """Yield outcomes of the counts.

    One that only BASE has is changed: it is watched no longer. A new one has no BASE.
    """
    for cell in measured.cells:
        if cell.key not in measured.counts:
            continue
        answers = measured.counts[cell.key]
        base, head = (answer["counts"] for answer in answers)
        for metric in {**base, **head}:
            if metric not in base:
                yield Outcome(
                    cell, metric, "not comparable", "", reason="BASE: it has no such count"
                )
                continue
            old, unit = base[metric][:2]
            new, unit = head[metric][:2] if metric in head else (None, unit)
            reason = (
                ""
                if old == new
                else reason_for(old, new, acknowledged.get(change_of(cell, metric), {}))
            )
            verdict = "same" if old == new else "acknowledged" if reason else "changed"
            if new is None:
                reason = (
                    f"HEAD: it has no such count; {reason}"
                    if reason
                    else "HEAD: it has no such count"
                )
            yield Outcome(
                cell, metric, verdict, unit, old, new, reason=reason, own=own_benchmarks(answers)
            )


def acknowledging_rows(outcomes: Sequence[Outcome], reason: str, base_commit: str) -> list[Row]:
    """Return the rows that make the changed counts acknowledged.

    A count that is gone keeps its value, and says so.
    """
    return [
        Row(
            one.cell.suite,
            one.cell.benchmark,
            one.metric,
            one.base if one.head is None else one.head,
            one.unit,
            {
                **one.cell.params,
                "was": one.base,
                "reason": " ".join(reason.split()),
                **({"gone": True} if one.head is None else {}),
            },
            baseline_commit=base_commit,
        )
        for one in outcomes
        if one.verdict == "changed" and one.base is not None
    ]


# ---- all of it ----


def outcomes_of(comparison: Comparison, results: Path) -> list[Outcome]:
    """Return all outcomes, alarms first, otherwise in the order of the registry.

    Args:
        results: folder of `acknowledged.csv` and `operating_curve.csv`.

    Raises:
        ConfigError: no benchmark ran on both sides.
    """
    measured = comparison.measured
    quarantined = read_quarantine(results / "operating_curve.csv")
    found = [
        *timed_outcomes(measured, comparison.design, quarantined),
        *count_outcomes(measured, read_acknowledged(results / "acknowledged.csv")),
    ]
    for cell in measured.cells:
        if (failure := measured.failures.get(cell.key)) is not None:
            found.append(
                Outcome(
                    cell, METRICS.get(cell.tier, "counts"), failure.verdict, reason=failure.reason
                )
            )
    if all(one.verdict == "not comparable" for one in found):
        reasons = sorted({one.reason for one in found})
        raise ConfigError(f"nothing can be compared with {comparison.base}: {'; '.join(reasons)}")
    place = {cell.key: i for i, cell in enumerate(measured.cells)}
    return sorted(found, key=lambda one: (not one.alarm, place[one.cell.key]))


def verdict_line(comparison: Comparison, outcomes: Sequence[Outcome]) -> str:
    """Return the verdict in one line."""
    versions = f"{comparison.head} against {comparison.base}, seed {comparison.seed}"
    return f"{_counted(comparison, outcomes)}; {versions}"


def _counted(comparison: Comparison, outcomes: Sequence[Outcome]) -> str:
    alarms = [one for one in outcomes if one.alarm]
    numbers: dict[str, int] = defaultdict(int)
    for one in outcomes:
        numbers["quarantined" if one.quarantined else one.verdict] += 1
    parts = ", ".join(f"{number} {word}" for word, number in numbers.items())
    if any(one.estimate is not None and one.verdict == "same" for one in outcomes):
        parts += f" (the same: within ±{100 * comparison.design.threshold:g} %)"
    head = f"{len(alarms)} alarm{'s' * (len(alarms) != 1)}" if alarms else "no regression found"
    return f"{head}: {parts}" + (f"; unfit machine: {comparison.unfit}" if comparison.unfit else "")


def rows(comparison: Comparison, outcomes: Sequence[Outcome]) -> Iterator[Row]:
    """Yield rows for `results/compare.csv`.

    What was not measured on both sides has no value, hence no row.
    """
    for one in outcomes:
        shared: dict[str, Any] = {
            "suite": "compare",
            "benchmark": f"{one.cell.suite}/{one.cell.benchmark}",
            "baseline_commit": comparison.base.commit,
        }
        params = {**one.cell.params, "outcome": one.verdict}
        if one.quarantined:
            params["quarantined"] = True
        if comparison.unfit and one.estimate is not None:
            params["unfit"] = comparison.unfit
        verdict = "fail" if one.alarm else "" if one.verdict == "inconclusive" else "pass"
        if one.estimate is not None:
            yield timing_row(
                receipt=Receipt(checked_before=True, checked_after=True, max_error=one.max_error),
                params=params,
                value=one.estimate.ratio,
                ci_low=one.estimate.low,
                ci_high=one.estimate.high,
                n=one.estimate.n,
                unit="time ratio",
                metric=one.metric,
                better="lower",
                verdict=verdict,
                **shared,
            )
            if one.p is not None:
                yield Row(
                    metric="p_value",
                    value=one.p,
                    params=one.cell.params,
                    n=one.estimate.n,
                    **shared,
                )
            for side, mhz in zip(("base", "head"), one.clock_mhz or (), strict=False):
                yield Row(
                    metric=f"clock_{side}", value=mhz, unit="MHz", params=one.cell.params, **shared
                )
        elif one.head is not None and one.base is not None:
            counted = {"unit": one.unit, **shared}
            yield Row(
                metric=one.metric,
                value=one.head,
                better="lower",
                verdict=verdict,
                params=params,
                **counted,
            )
            yield Row(
                metric=f"{one.metric}{AT_BASE}", value=one.base, params=one.cell.params, **counted
            )


def cells_of_table(one: Outcome) -> tuple[str, str, str, str, str, str]:
    """Return name, BASE, HEAD, their ratio, its interval and verdict."""
    verdict = f"{one.verdict}, quarantined" if one.quarantined else one.verdict
    notes = [one.reason] * bool(one.reason) + [f"{side} by its own benchmark" for side in one.own]
    if notes:
        verdict += f" ({'; '.join(notes)})"
    if one.estimate is None or one.base is None or one.head is None:
        base, head = (
            "" if value is None else f"{value:,} {one.unit}" for value in (one.base, one.head)
        )
        return one.name, base, head, "", "", verdict
    ratio = f"{one.estimate.ratio:.3f}"
    interval = f"{one.estimate.low:.3f} … {one.estimate.high:.3f}"
    return one.name, duration(1e9 * one.base), duration(1e9 * one.head), ratio, interval, verdict


HEADINGS = ("benchmark", "BASE", "HEAD", "HEAD / BASE", "95 % interval", "verdict")


def print_table(outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    table = Table(box=None, pad_edge=False)
    for i, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if 0 < i < 5 else "left", overflow="fold")
    for one in outcomes:
        table.add_row(
            *cells_of_table(one),
            style="red" if one.alarm else "green" if one.verdict == "faster" else None,
        )
    console.print(table)
    for side, why in sorted({item for one in outcomes for item in one.own.items()}):
        console.print(f"{side} by its own benchmark where today's fails there: {why}")


def markdown(comparison: Comparison, outcomes: Sequence[Outcome]) -> str:
    """Return a comment for a pull request: the verdict, what changed, and the rest folded away."""

    def table(some: Sequence[Outcome]) -> list[str]:
        lines = [f"| {' | '.join(HEADINGS)} |", "|---|--:|--:|--:|--:|---|"]
        for name, *metrics, word in map(cells_of_table, some):
            # With a reason, which is anybody's text, it is more than a word.
            cells = [plain(name), *metrics, word if word.isalpha() else plain(word)]
            lines.append(f"| {' | '.join(cells)} |")
        return lines

    changed = [one for one in outcomes if one.verdict not in ("same", "not comparable")]
    rest = [one for one in outcomes if one not in changed]
    head, base = plain(str(comparison.head)), plain(str(comparison.base))
    versions = f"{head} against {base}, seed {comparison.seed}"
    lines = [f"**{_counted(comparison, outcomes)}**; {versions}", ""]
    if changed:
        lines += [*table(changed), ""]
    if rest:
        lines += [
            "<details><summary>unchanged, or not comparable</summary>",
            "",
            *table(rest),
            "",
            "</details>",
            "",
        ]
    return "\n".join(lines)


def document(comparison: Comparison, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return everything for JSON, with every worker pair's log-ratio."""

    def described(one: Outcome) -> dict[str, Any]:
        key = one.cell.key
        looks = {
            "first": comparison.measured.first.get(key),
            "repeat": comparison.measured.repeat.get(key),
        }
        ratios = {name: times.log_ratios for name, times in looks.items() if times is not None}
        cell = {**asdict(one.cell), "key": key}
        return {**asdict(one), "cell": cell, "alarm": one.alarm, "log_ratios": ratios}

    return {
        "verdict": verdict_line(comparison, outcomes),
        "unfit": comparison.unfit,
        "base": asdict(comparison.base),
        "head": asdict(comparison.head),
        "seed": comparison.seed,
        "design": asdict(comparison.design),
        "outcomes": [described(one) for one in outcomes],
    }
