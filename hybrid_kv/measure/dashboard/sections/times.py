"""Times: paired comparisons, other engines, GPUs, static metrics, errors of the harness."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import pandas as pd

from hybrid_kv.measure.dashboard.data import (
    COMPARE,
    CURVE,
    NO_IDENTITY,
    SERIES,
    STATIC_SUITE,
    Results,
    column,
    each,
    fullest_run,
    last_rows,
    newest_run,
    with_params,
)
from hybrid_kv.measure.dashboard.draw import (
    coloured,
    folded,
    paragraph,
    row_name,
    table,
    with_small_interval,
)
from hybrid_kv.measure.dashboard.report import Report, Section
from hybrid_kv.measure.dashboard.words import day, number, percent_change, with_unit

OUTCOMES = {"slower": "worse", "faster": "better", "inconclusive": "void"}
WHOLE = "any benchmark"  # the row of the operating curve that is about a whole comparison
STATIC_COLUMNS = [
    "registers",
    "spill_bytes",
    "shared_bytes",
    "blocks_per_sm",
    "load_bits",
    "store_bits",
]
STATIC_COLUMNS += ["instructions", "instructions_per_byte"]


def comparison(report: Report) -> Section | None:
    """Return the newest paired comparison of two versions."""
    rows = report.results.of(COMPARE)
    if rows.empty:
        return None
    newest = newest_run(rows)
    base = newest["baseline_commit"].iloc[0][:7] or "its baseline"

    def block(machine_rows: pd.DataFrame) -> str:
        return compared(newest_run(machine_rows), report.link)

    body = report.by_machine(rows, block)
    return Section("Comparison", f"{slower_text(newest)} than {base}", body)


def slower_text(rows: pd.DataFrame) -> str:
    """Return how many benchmarks of a comparison are slower."""
    timed = rows[rows["unit"] == "time ratio"]
    slower = int((timed["verdict"] == "fail").sum())
    return (
        f"{slower or 'None'} of {len(timed):,} benchmarks {'is' if slower <= 1 else 'are'} slower"
    )


def compared(rows: pd.DataFrame, link: Callable[[str], str]) -> str:
    """Return a comparison as tables: its versions, times that changed, counts that changed.

    Args:
        link: a commit as HTML.
    """
    rows = rows.assign(outcome=column(rows, "outcome", str).fillna("same"))
    rows = rows.assign(was=column(rows, "was", int, float).astype(float))
    newest = next(each(rows.tail(1)))
    head = str(newest.parsed.get("head_commit") or newest.commit)
    text = f"<p>{link(head)} compared with {link(newest.baseline_commit)}, {day(newest)}.</p>"
    unfit = next((mark for mark in column(rows, "unfit", str) if mark), None)
    if unfit:
        text += paragraph(f"Measured on a machine that was not fit for times: {unfit}.")
    changed = rows["outcome"] != "same"
    timed = rows["unit"] == "time ratio"
    times = rows[timed & changed]
    counts = rows[~timed & changed]
    times = times.reindex(times["value"].map(math.log).abs().sort_values(ascending=False).index)
    lines = [
        [
            row_name(row),
            coloured(OUTCOMES.get(row.outcome, "changed"), row.outcome),
            percent_change(row),
            f"{row.n:,}",
        ]
        for row in each(times)
    ]
    text += (
        table(["time", "", "change", "n"], lines) if lines else paragraph("Every time is the same.")
    )
    cells = [
        [
            row_name(row),
            coloured("fail" if row.verdict == "fail" else "changed", row.outcome),
            number(row.was),
            escape(with_unit(row)),
        ]
        for row in each(counts)
    ]
    return text + (table(["exact count", "", "was", "is"], cells) if cells else "")


def other_engines(report: Report) -> Section | None:
    """Return how many times as long other code takes as the engine, without suites of a GPU."""
    rows = report.results.rows
    rows = rows[(rows["metric"] == "ratio_to_engine") & (rows["suite"] != "gpu")]
    if rows.empty:
        return None
    last = last_rows(rows)
    beaten = int((last["value"] < 1).sum())
    finding = f"The engine is faster in {len(last) - beaten} of {len(last)} cells"

    def block(machine_rows: pd.DataFrame) -> str:
        blocks = []
        for (suite, benchmark), cells in machine_rows.groupby(["suite", "benchmark"], sort=False):
            last = last_rows(cells).sort_values("value")
            lines = [
                [escape(row.case), with_small_interval(row), f"{row.n:,}"] for row in each(last)
            ]
            summary = f"{suite}: {benchmark}, {len(lines)} cells"
            blocks.append(
                folded(summary, table(["subject and case", "times the engine's time", "n"], lines))
            )
        return "".join(blocks)

    return Section("Other engines", finding, report.by_machine(rows, block))


def gpu(report: Report) -> Section | None:
    """Return rows of `python -m bench.gpu`: our kernels, plain torch, other projects' kernels."""
    rows = report.results.of("gpu")
    if rows.empty:
        return None
    shares = rows[rows["metric"] == "share_of_copy"].drop_duplicates(SERIES, keep="last")["value"]
    span = " to ".join(
        dict.fromkeys(f"{100 * share:.0f}" for share in (shares.min(), shares.max()))
    )
    finding = (
        f"Kernels move their bytes at {span} % of the bandwidth of a copy"
        if len(shares)
        else "Kernels on a GPU"
    )

    def block(machine_rows: pd.DataFrame) -> str:
        groups = fullest_run(machine_rows).groupby("benchmark", sort=False)
        return "".join(folded(str(benchmark), _gpu_table(cells)) for benchmark, cells in groups)

    return Section("GPU", finding, report.by_machine(rows, block))


def _gpu_table(rows: pd.DataFrame) -> str:
    """Return a line per case and subject, in the order in which they were measured."""
    metrics: dict[tuple[str, str], dict[str, Any]] = {}
    for row in each(rows):
        apart = {*NO_IDENTITY, "subject", "launch"}
        case = ", ".join(
            f"{name}={value}" for name, value in sorted(row.parsed.items()) if name not in apart
        )
        eager = " (eager)" if row.parsed.get("launch") == "eager" else ""
        metric = "ratio" if row.metric.startswith("ratio_to_") else row.metric
        metrics.setdefault((case, f"{row.parsed.get('subject', '')}{eager}"), {})[metric] = row
    lines = [
        [
            f"{escape(subject)}<br><small>{escape(case)}</small>",
            _raced_time(of),
            escape(with_unit(of["bandwidth"])) if "bandwidth" in of else "",
            f"{100 * of['share_of_copy'].value:.0f} %" if "share_of_copy" in of else "",
            with_small_interval(of["ratio"]) if "ratio" in of else "",
        ]
        for (case, subject), of in metrics.items()
    ]
    return table(["subject", "time", "bandwidth", "of a copy's", "times ours"], lines)


def _raced_time(metrics: Mapping[str, Any]) -> str:
    """Return the time that rivals were compared by, as HTML.

    It is from end to end if that was measured, else the device's.
    """
    time = metrics.get("end_to_end_time", metrics.get("gpu_time"))
    return "" if time is None else with_small_interval(time)


def static_kernel_metrics(report: Report) -> Section | None:
    """Return registers, spills, access and instructions of the kernels."""
    rows = static_table(report.results)
    if rows.empty:
        return None
    spilling = int((rows["spill_bytes"] > 0).sum())
    finding = (
        f"{spilling or 'None'} of {len(rows)} compiled cases spill{'s' * (spilling <= 1)} registers"
    )
    body = ""
    head = ["kernel", *(name.replace("_", " ") for name in STATIC_COLUMNS)]
    for target, machine_rows in rows.groupby("target", sort=False):
        cells = [
            [
                f"{escape(row.benchmark)}<br><small>{escape(f'{row.shape}, {row.dtype}')}</small>",
                *(number(float(getattr(row, name))) for name in STATIC_COLUMNS),
            ]
            for row in each(machine_rows)
        ]
        body += folded(f"{target}, {len(machine_rows)} cases", table(head, cells, limit=1000))
    versions = ", ".join(sorted(set(report.results.of(STATIC_SUITE)["triton"]) - {""}))
    note = (
        f"Compiled ahead of time without a GPU, with Triton {versions}. Each instruction counts "
        "once."
    )
    return Section("Kernels", finding, body + paragraph(note))


def static_table(results: Results) -> pd.DataFrame:
    """Return a line per kernel, shape, dtype and target with the last of `STATIC_COLUMNS`."""
    rows = with_params(results.of(STATIC_SUITE), shape=str, dtype=str, target=str)
    rows = rows.assign(name=rows["metric"].str.replace(r"^(sass|ptx|amdgcn)_", "", regex=True))
    rows = rows[rows["name"].isin(STATIC_COLUMNS)].dropna(subset=["shape", "dtype", "target"])
    keys = ["benchmark", "shape", "dtype", "target"]
    last = rows.drop_duplicates([*keys, "name"], keep="last")
    wide = last.pivot(index=keys, columns="name", values="value").reindex(columns=STATIC_COLUMNS)
    return wide.reindex(pd.MultiIndex.from_frame(last[keys].drop_duplicates())).reset_index()


def operating_curve(report: Report) -> Section | None:
    """Return the errors of the harness: false alarms on equal code, injected slowdowns found."""
    rows = curve_rows(report.results)
    if rows.empty:
        return None
    whole = rows[(rows["benchmark"] == WHOLE) & (rows["inject"] == 0)]
    parts = [
        f"{count_text(row)} comparisons of equal code raised an alarm"
        for row in each(whole.tail(1))
    ]
    detected = rows[rows["inject"] == 5]["value"]
    parts += (
        [f"an injected slowdown of 5 % is found in {100 * detected.min():.0f} % of the trials"]
        if len(detected)
        else []
    )
    calm = rows[(rows["inject"] == 0) & (rows["verdict"] == "fail")]["benchmark"].nunique()
    parts += [f"{calm} quarantined"] if calm else []
    return Section(
        "Operating curve",
        "; ".join(parts) or "How often the harness errs",
        report.by_machine(rows, _curve),
    )


def curve_rows(results: Results) -> pd.DataFrame:
    """Return the last rates of the newest self-test.

    Column `inject` is the injected slowdown in percent, 0 for none.
    """
    rows = results.of(CURVE)
    rows = rows[rows["metric"].isin(["false_alarm_rate", "detection_rate"])]
    rows = with_params(rows, inject_percent=(int, float), experiment=str).rename(
        columns={"inject_percent": "inject"}
    )
    rows = rows.dropna(subset=["inject", "experiment"])
    rows = rows[rows["experiment"] == rows["experiment"].iloc[-1]] if len(rows) else rows
    return rows.drop_duplicates(["benchmark", "metric", "inject", "machine"], keep="last")


def _curve(rows: pd.DataFrame) -> str:
    cells = [
        [
            escape(row.benchmark),
            "equal code" if row.inject == 0 else f"{row.inject:g} % slower",
            count_text(row),
            f"{100 * row.ci_low:.1f} to {100 * row.ci_high:.1f} %",
            "quarantined" if row.inject == 0 and row.verdict == "fail" else "",
        ]
        for row in each(rows.sort_values(["inject", "value"], ascending=[True, False]))
    ]
    return folded(
        f"{len(cells)} rates",
        table(["benchmark", "code", "alarms", "95 % interval", ""], cells, limit=1000),
    )


def count_text(row: Any) -> str:
    """Return a rate as its count: 3 of 200."""
    return f"{round(row.value * row.n)} of {row.n:,}"
