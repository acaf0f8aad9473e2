"""What a state update moves under both schemes of undoing drafts, and how long it takes."""

from __future__ import annotations

import re
from html import escape
from typing import Any

import pandas as pd

from hybrid_kv.dashboard.data import NO_IDENTITY, STATIC_SUITE, each, last_words
from hybrid_kv.dashboard.draw import MARKS, columns, legend, line_trace, plot
from hybrid_kv.dashboard.report import Report, Section
from hybrid_kv.dashboard.words import NANOSECONDS, about, in_nanoseconds, metric_name, time_unit

PLACE = 50
LIMIT, FLUSH = "limit", "replay, a step that flushes"
LOOKS = {"replay": MARKS[0], FLUSH: MARKS[3], "slots": MARKS[1], LIMIT: MARKS[4]}
MAX_LINES = 16  # of one figure
_SCHEME = re.compile(r"slots|replay|limit")
_K = re.compile(r"\bK\s?=\s?(\d+)")


def section(report: Report) -> Section | None:
    rows = scheme_rows(last_words(report.results.rows))
    moved, timed = rows[~rows["unit"].isin(NANOSECONDS)], in_nanoseconds(rows)
    parts, finding = "", "What a state update moves: slots and replay"
    if len(moved):
        parts += report.by_machine(moved, _scheme_figures)
        finding = _scheme_finding(moved) or finding
        if not (rows["scheme"] == LIMIT).any():
            parts += report.missing.note("the least that any scheme must move", "hybrid-kv kernels --update")
    else:
        report.missing.note("bytes that a state update moves, slots against replay", "hybrid-kv kernels --update")
    if len(timed):
        parts += report.by_machine(timed, _scheme_figures)
    elif parts:
        parts += report.missing.note("time of the state update on a GPU", "make gpu-bench")
    return Section("Slots and replay", finding, parts) if parts else None


def scheme_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Bytes and times of a state update, with columns `scheme`, `line`, `K`, `model`, `dtype`, `of`, `rest`.

    A row belongs here if its scheme (`slots`, `replay`, `limit`: the least that any scheme must move) is in `params`,
    the metric's or the benchmark's name, on a GPU the subject's, and K in `params` or in their `shape`. `of` is the
    metric without a scheme, and `rest` what else the params say: each combination is a figure. `line` is the scheme, or
    `FLUSH`: what replay does in some steps, on the same axis as both.
    """
    states = rows["suite"].isin([STATIC_SUITE, "state_update", "replay", "kernel_metrics", "memory", "gpu"])
    moved = rows["metric"].str.contains("bytes") & ~rows["metric"].str.contains("spill|shared|instructions")
    rows = rows[states & (moved | rows["unit"].isin(NANOSECONDS))].copy()
    rows["scheme"] = [_scheme(row) for row in each(rows)]
    rows["line"] = [FLUSH if p.get("flush") is True else s for s, p in zip(rows["scheme"], rows["parsed"], strict=True)]
    rows["of"] = rows["metric"].str.replace(r"_?(slots|replay|limit)_?", "", regex=True)
    rows["K"] = [_num_drafts(params) for params in rows["parsed"]]
    rows["model"] = [_K.sub("", str(p.get("model") or p.get("shape") or "")).strip(", ") for p in rows["parsed"]]
    rows["dtype"] = [str(p.get("dtype") or "") for p in rows["parsed"]]
    apart = {*NO_IDENTITY, "scheme", "flush", "subject", "launch", "K", "model", "shape", "dtype", "target"}
    rows["rest"] = [", ".join(f"{k}={v}" for k, v in sorted(p.items()) if k not in apart) for p in rows["parsed"]]
    return rows[(rows["scheme"] != "") & rows["K"].notna()]


def _scheme(row: Any) -> str:
    if row.suite == "gpu":
        subject = str(row.parsed.get("subject", ""))
        return subject if subject in ("slots", "replay") else ""
    for text in (str(row.parsed.get("scheme", "")), row.metric, row.benchmark):
        if found := _SCHEME.search(text):
            return found[0]
    return ""


def _num_drafts(params: dict[str, Any]) -> int | None:
    if isinstance(params.get("K"), int):
        return int(params["K"])
    found = _K.search(str(params.get("shape", "")))
    return int(found[1]) if found else None


def _scheme_finding(rows: pd.DataFrame) -> str:
    wide = rows.pivot_table(index=["model", "dtype", "K"], columns="scheme", values="value", aggfunc="last")
    if not {"slots", "replay"} <= set(wide):
        return ""
    ratio = (wide["slots"] / wide["replay"]).dropna()
    ratio = ratio[ratio.index.get_level_values("K") > 0]
    if ratio.empty:
        return ""
    if ratio.min() < 1:
        return f"Replay moves more bytes than slots in {int((ratio < 1).sum())} of {len(ratio)} cases"
    span = about(ratio.min()), about(ratio.max())
    return f"Replay moves {span[0] if span[0] == span[1] else ' to '.join(span)} times fewer bytes than slots"


def _scheme_figures(rows: pd.DataFrame) -> str:
    order = [name for name in LOOKS if (rows["line"] == name).any()]
    figures = []
    for key, cell in list(rows.groupby(["model", "dtype", "of", "rest"], sort=False))[:MAX_LINES]:
        model, dtype, metric, rest = map(str, key)
        unit, scale = cell["unit"].iloc[-1], 1.0
        if unit == "ns":
            unit, size = time_unit(cell["value"].max())
            scale = 1 / size
        traces = []
        for name in order:
            line = cell[cell["line"] == name].sort_values("K").drop_duplicates("K", keep="last")
            if len(line):
                trace = line_trace(line, name, LOOKS, "K", "drafts", scale)
                if name == LIMIT:
                    trace |= {"mode": "lines"}
                traces.append(trace)
        figures.append(
            plot(
                traces,
                ", ".join(filter(None, [model, dtype, rest])) + f": {metric_name(metric)}",
                f"{metric} by K for {', '.join(order)}",
                260,
                xaxis={"title": "draft tokens per step (K)", "dtick": 1},
                yaxis={"title": escape(unit), "rangemode": "tozero"},
            )
        )
    return legend({name: LOOKS[name] for name in order}) + columns(figures)
