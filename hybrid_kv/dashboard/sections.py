"""What each part of the page says. A section takes the rows, finds its finding, and says what is missing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import pandas as pd

from hybrid_kv.dashboard.data import (
    COMPARE,
    CURVE,
    NO_IDENTITY,
    STATIC_SUITE,
    Results,
    SuiteVerdict,
    about,
    duration,
    each,
    fullest_run,
    last_words,
    newest_run,
    number,
    overall,
    time_unit,
    verdicts,
)
from hybrid_kv.dashboard.draw import (
    BLUE,
    MARKS,
    Mark,
    Missing,
    Section,
    code,
    columns,
    intervals,
    legend,
    marks,
    of_machine,
    paragraph,
    plot,
    powers,
    table,
    wrapped,
)

MAX_MACHINES = 6  # with figures of their own; the history has all of them
MAX_LISTED = 50
MAX_LINES = 16  # of one figure

Link = Callable[[str], str]  # a commit as HTML

WORDS = {"pass": "✓ pass", "fail": "✕ fail", "void": "○ void", "none": "no verdict"}
_NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}


def by_machine(results: Results, rows: pd.DataFrame, block: Callable[[pd.DataFrame], str]) -> str:
    """A block per machine that has rows, those with the newest rows first."""
    found = [m for m in [*results.machines, ""] if (rows["machine"] == m).any()][:MAX_MACHINES]
    return "".join(of_machine(machine, block(rows[rows["machine"] == machine])) for machine in found)


def column(rows: pd.DataFrame, name: str) -> pd.Series[Any]:
    """One of the params of each row; None where it has none."""
    return rows["parsed"].map(lambda params: params.get(name))


# ---- verdict ----


def suite_name(found: SuiteVerdict) -> str:
    return "static kernel metrics" if found.suite == STATIC_SUITE else found.suite


def verdict_section(results: Results, link: Link, missing: Missing) -> Section:
    found = verdicts(results.rows)
    if not found:
        return Section("Verdict", "No check has said pass or fail yet", missing.note("a verdict", "hybrid-kv guard"))
    tiles = "".join(
        f'<li class="tile" data-word="{v.word}" data-machine="{escape(v.machine)}" data-passed="{v.count("pass")}" '
        f'data-judged="{len(v.rows)}"><b class="{v.word}">{WORDS[v.word]}</b>'
        f'<span class="name">{escape(suite_name(v))}</span>'
        f"<span>{v.count('pass'):,} of {len(v.rows):,} checks</span>"
        f"<span class=where>{link(v.newest.commit)}{' + changes' if v.newest.dirty else ''}, {day(v.newest)}</span>"
        f"<span class=where>{escape(v.machine) or 'any machine'}</span></li>"
        for v in found
    )
    bad = [(v, row) for v in found for row in each(v.rows[v.rows["verdict"] != "pass"])]
    listed = ""
    if bad:
        rows = [
            [
                f"{escape(v.suite)}: {escape(row.benchmark)}"
                f"<br><small>{escape(', '.join(filter(None, [row.metric, row.case])))}</small>",
                f'<b class="{row.verdict}">{WORDS[row.verdict]}</b>',
                with_unit(row),
                escape(str(row.parsed.get("limit", ""))),
                f"{row.n:,}",
            ]
            for v, row in bad[:MAX_LISTED]
        ]
        attributes = [f'data-machine="{escape(v.machine)}"' for v, _ in bad[:MAX_LISTED]]
        listed = table(["what did not pass", "", "figure", "limit", "n"], rows, attributes)
        if len(bad) > MAX_LISTED:
            listed += paragraph(f"and {len(bad) - MAX_LISTED:,} more")
    return Section("Verdict", verdict_line(found), f'<ul class="tiles">{tiles}</ul>{listed}')


def verdict_line(found: Sequence[SuiteVerdict]) -> str:
    """The overall verdict with its figures; page.js says the same of the machine that is chosen."""
    passed, judged = sum(v.count("pass") for v in found), sum(len(v.rows) for v in found)
    return f"{WORDS[overall(v.word for v in found)]}: {passed:,} of {judged:,} checks of the newest runs"


def day(row: Any) -> str:
    return str(row.time_utc)[:10]


def with_unit(row: Any) -> str:
    """A row's figure with its unit: 6.79 µs, 15.1×, 34, 100 %."""
    if row.unit in _NANOSECONDS:
        return duration(row.value * _NANOSECONDS[row.unit])
    if row.unit == "time ratio":
        return f"{number(row.value)}×"
    if row.unit == "share":
        return f"{100 * row.value:.1f} %"
    return f"{number(row.value)} {escape(row.unit)}".strip()


def with_interval(row: Any) -> str:
    """A row's figure, its unit and its 95 % interval."""
    if pd.isna(row.ci_low) or pd.isna(row.ci_high):
        return with_unit(row)
    ends = [with_unit(row._replace(value=end)) for end in (row.ci_low, row.ci_high)]
    return f"{with_unit(row)} <small>({ends[0]} to {ends[1]})</small>"


# ---- block ids ----

ENGINE = "engine"


def expansion_section(results: Results, missing: Missing) -> Section | None:
    rows = results.of("kernel_blocks")
    if rows.empty:
        missing.note("how long it takes to bring block ids to the device", "make bench")
        return None
    append = rows[rows["benchmark"] == "expand"]
    finding = "Block ids on their way to the device"
    body = by_machine(results, rows, lambda own: _appends(own) + _steps(own))
    if len(append):
        finding = _append_finding(fullest_run(append)) or finding
        if results.of("gpu", "expansion").empty:
            body += missing.note("expansion by a Triton kernel, which takes a GPU", "make gpu-bench")
    return Section("Block ids", finding, body)


def _cells(rows: pd.DataFrame, *names: str) -> pd.DataFrame:
    rows = fullest_run(rows).copy()
    for name in ("subject", *names):
        rows[name] = column(rows, name)
    return rows.dropna(subset=["subject", *names])


def _append_finding(rows: pd.DataFrame) -> str:
    rows = _cells(rows[rows["metric"] == "ratio_to_engine"], "num_blocks")
    if rows.empty:
        return ""
    low, high = rows["value"].min(), rows["value"].max()
    if low < 1:
        return f"The engine is beaten in {int((rows['value'] < 1).sum())} of {len(rows)} comparisons of one append"
    return f"One append of block ids takes {about(low)} to {about(high)} times as long without staging"


def _appends(rows: pd.DataFrame) -> str:
    timed = rows["metric"].isin(["cpu_time", "gpu_time"]) & (rows["benchmark"] == "expand")
    rows = _cells(rows[timed], "num_blocks", "blocks_per_kv_block")
    if rows.empty:
        return ""
    looks = marks([ENGINE, *sorted(set(rows["subject"]) - {ENGINE})])
    scale = _NANOSECONDS[rows["unit"].iloc[-1]]
    ticks = powers(scale * rows["value"].min(), scale * rows["value"].max())
    sizes = sorted(rows["num_blocks"].unique())[::2]
    figures = []
    for per_block, cell in rows.groupby("blocks_per_kv_block"):
        traces = []
        for subject, line in cell.sort_values("num_blocks").groupby("subject"):
            traces.append(_line(line, str(subject), looks, "num_blocks", "blocks", scale))
        figures.append(
            plot(
                traces,
                f"{per_block} kernel blocks per block",
                f"CPU time of one append by number of blocks, for {', '.join(looks)}; {per_block} kernel blocks each",
                260,
                xaxis={"type": "log", "title": "blocks appended", "tickvals": sizes, "ticktext": list(map(str, sizes))},
                yaxis={
                    "type": "log",
                    "title": "CPU time",
                    "tickvals": ticks,
                    "ticktext": [duration(t) for t in ticks],
                    "range": [f"{len(str(int(ticks[0]))) - 1}", f"{len(str(int(ticks[-1]))) - 1}"],
                },
            )
        )
    n = _span(rows["n"])
    note = f"Medians of {n} interleaved rounds with 95 % intervals; both axes are logarithmic."
    return legend(looks) + columns(figures) + paragraph(note)


def _span(values: pd.Series[Any]) -> str:
    low, high = values.min(), values.max()
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _line(
    line: pd.DataFrame, name: str, looks: dict[str, Mark], x: str, what: str, scale: float = 1.0
) -> dict[str, Any]:
    look = looks[name]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape(name),
        "x": list(line[x]),
        "y": list(line["value"] * scale),
        "error_y": {**intervals(line, scale), "color": look.colour},
        "line": {"color": look.colour, "dash": look.dash, "width": 2},
        "marker": {"color": look.colour, "symbol": look.symbol, "size": 8},
        "customdata": [f"{with_interval(row)}, n = {row.n}" for row in each(line)],
        "hovertemplate": f"{escape(name)}<br>%{{x:,}} {what}: %{{customdata}}<extra></extra>",
    }


def _steps(rows: pd.DataFrame) -> str:
    compared = (rows["metric"] == "ratio_to_engine") & (rows["benchmark"] == "step")
    rows = _cells(rows[compared], "scenario", "blocks_per_kv_block")
    rows = rows[rows["subject"] != "device"]
    if rows.empty:
        return ""
    looks = marks(sorted(set(rows["subject"])))
    scenarios = list(dict.fromkeys(rows["scenario"]))[::-1]
    ticks = powers(min(1.0, rows["value"].min()), rows["value"].max())
    ticks = ticks[:: 1 + len(ticks) // 5]  # four at most are told apart on a phone
    figures = []
    for per_block, cell in rows.groupby("blocks_per_kv_block"):
        traces = []
        for index, (subject, line) in enumerate(cell.groupby("subject")):
            look = looks[str(subject)]
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": escape(str(subject)),
                    "x": list(line["value"]),
                    "y": [scenarios.index(name) + 0.22 * (1 - index) for name in line["scenario"]],
                    "error_x": {**intervals(line), "color": look.colour},
                    "marker": {"color": look.colour, "symbol": look.symbol, "size": 9},
                    "customdata": [f"{with_interval(row)}, n = {row.n}" for row in each(line)],
                    "hovertemplate": f"{escape(str(subject))}<br>%{{customdata}}<extra></extra>",
                }
            )
        figures.append(
            plot(
                traces,
                f"A whole step, {per_block} kernel blocks per block",
                f"Ratios to the engine of {', '.join(looks)} in {len(scenarios)} scenarios",
                70 + 52 * len(scenarios),
                xaxis={
                    "type": "log",
                    "title": "times the engine's CPU time",
                    "tickvals": ticks,
                    "ticktext": [f"{t:,.0f}×" if t >= 1 else f"{t:g}×" for t in ticks],
                },
                yaxis={
                    "tickvals": list(range(len(scenarios))),
                    "ticktext": [wrapped(name) for name in scenarios],
                    "range": [-0.6, len(scenarios) - 0.4],
                    "showgrid": False,
                },
                shapes=[_limit_line(x=1.0)],
            )
        )
    return legend(looks) + columns(figures)


def _limit_line(x: float) -> dict[str, Any]:
    return {
        "type": "line",
        "x0": x,
        "x1": x,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": BLUE, "width": 2},
    }


# ---- slots and replay ----

LIMIT = "limit"
_SCHEME = re.compile(r"slots|replay|limit")
_K = re.compile(r"\bK\s?=\s?(\d+)")


def scheme_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Bytes and times of a state update, with columns `scheme`, `K`, `model`, `dtype`, `of`, `rest`.

    A row belongs here if its scheme (`slots`, `replay`, `limit`: the least that any scheme must move) is in `params`,
    the metric's or the benchmark's name, on a GPU the subject's, and K in `params` or in their `shape`. `of` is the
    metric without a scheme, and `rest` what else the params say: each combination is a figure.
    """
    states = rows["suite"].isin([STATIC_SUITE, "state_update", "replay", "kernel_metrics", "memory", "gpu"])
    moved = rows["metric"].str.contains("bytes") & ~rows["metric"].str.contains("spill|shared|instructions")
    rows = rows[states & (moved | rows["unit"].isin(_NANOSECONDS))].copy()
    rows["scheme"] = [_scheme(row) for row in each(rows)]
    rows["of"] = rows["metric"].str.replace(r"_?(slots|replay|limit)_?", "", regex=True)
    rows["K"] = [_num_drafts(params) for params in rows["parsed"]]
    rows["model"] = [_K.sub("", str(p.get("model") or p.get("shape") or "")).strip(", ") for p in rows["parsed"]]
    rows["dtype"] = [str(p.get("dtype") or "") for p in rows["parsed"]]
    apart = {*NO_IDENTITY, "scheme", "subject", "launch", "K", "model", "shape", "dtype", "target"}
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


def scheme_section(results: Results, missing: Missing) -> Section | None:
    rows = scheme_rows(last_words(results.rows))
    timed = rows["unit"].isin(_NANOSECONDS)
    parts, finding = "", "What a state update moves: slots and replay"
    if (~timed).any():
        parts += by_machine(results, rows[~timed], _scheme_figures)
        finding = _scheme_finding(rows[~timed]) or finding
        if not (rows["scheme"] == LIMIT).any():
            parts += missing.note("the least that any scheme must move", "hybrid-kv kernels --update")
    else:
        missing.note("bytes that a state update moves, slots against replay", "hybrid-kv kernels --update")
    if timed.any():
        parts += by_machine(results, rows[timed], _scheme_figures)
    elif parts:
        parts += missing.note("time of the state update on a GPU", "make gpu-bench")
    return Section("Slots and replay", finding, parts) if parts else None


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
    order = [name for name in ("replay", "slots", LIMIT) if (rows["scheme"] == name).any()]
    looks = {"replay": MARKS[0], "slots": MARKS[1], LIMIT: MARKS[4]}
    figures = []
    for key, cell in list(rows.groupby(["model", "dtype", "of", "rest"], sort=False))[:MAX_LINES]:
        model, dtype, metric, rest = map(str, key)
        unit, scale = cell["unit"].iloc[-1], 1.0
        if unit in _NANOSECONDS:
            name, size = time_unit(_NANOSECONDS[unit] * cell["value"].max())
            unit, scale = name, _NANOSECONDS[unit] / size
        traces = []
        for scheme in order:
            line = cell[cell["scheme"] == scheme].sort_values("K").drop_duplicates("K", keep="last")
            if len(line):
                trace = _line(line, scheme, looks, "K", "drafts", scale)
                if scheme == LIMIT:
                    trace |= {"mode": "lines"}
                traces.append(trace)
        figures.append(
            plot(
                traces,
                ", ".join(filter(None, [model, dtype, rest])) + f": {metric.replace('_', ' ')}",
                f"{metric} by K for {', '.join(order)}",
                260,
                xaxis={"title": "draft tokens per step (K)", "dtick": 1},
                yaxis={"title": unit, "rangemode": "tozero"},
            )
        )
    return legend({name: looks[name] for name in order}) + columns(figures)


# ---- accuracy ----


def accuracy_section(results: Results, missing: Missing) -> Section | None:
    rows = results.of("accuracy")
    asked = rows[rows["metric"].str.contains("match|invalid") | rows["metric"].isin(PAIRED)]
    if asked.empty:
        missing.note("answers to the task's questions", "hybrid-kv accuracy")
        return None
    right = rows[rows["metric"] == "exact_match_strict"].drop_duplicates("benchmark", keep="last")
    newest = [f"{100 * row.value:.1f} % of {row.n:,} questions of {row.benchmark}" for row in each(right)]
    finding = f"Right answers: {', '.join(newest)}" if newest else "Answers to the task's questions"
    body = by_machine(results, asked, lambda own: _shares(own) + _paired(own))
    if not rows["metric"].isin(PAIRED).any():
        body += missing.note("two versions on the same questions", "hybrid-kv accuracy compare A B")
    return Section("Accuracy", finding, body)


def _shares(rows: pd.DataFrame) -> str:
    """One line per task, model, settings and metric with a point per run: runs of other seeds show the spread."""
    rows = rows[~rows["metric"].isin(PAIRED)]
    if rows.empty:
        return ""
    settings = [
        ", ".join(
            f"{k}={v}" for k, v in sorted(p.items()) if k not in ("seed", "limit", "task", "lm_eval", "num_fewshot")
        )
        for p in rows["parsed"]
    ]
    groups = list(rows.assign(settings=settings).groupby(["benchmark", "settings", "metric"], sort=False))[-MAX_LINES:]
    labels, traces = [], []
    for index, (_, line) in enumerate(groups):
        newest = line.tail(1)
        row = next(each(newest))
        name = row.metric.replace("exact_match_", "").replace("_", " ")
        count = f"{len(line)} runs of {row.n:,}" if len(line) > 1 else f"n = {row.n:,}"
        labels.append(f"{row.benchmark}, {name}, {count}")
        for points, size, symbol in ((line.iloc[:-1], 7, "circle-open"), (newest, 10, "circle")):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": list(100 * points["value"]),
                    "y": [index] * len(points),
                    "error_x": {**intervals(points, 100.0), "color": BLUE, "visible": points is newest},
                    "marker": {"color": BLUE, "size": size, "symbol": symbol},
                    "customdata": [escape(f"{p.case}, {day(p)}, {p.commit[:7]}") for p in each(points)],
                    "hovertemplate": "%{x:.1f} %<br>%{customdata}<extra></extra>",
                }
            )
    return plot(
        traces,
        "Shares of the questions: the newest run with its 95 % interval, earlier runs hollow",
        "; ".join(
            f"{label}: {100 * line['value'].iloc[-1]:.1f} %" for label, (_, line) in zip(labels, groups, strict=True)
        ),
        80 + 40 * len(groups),
        xaxis={"title": "share of the questions", "ticksuffix": " %", "range": [-5, 105]},
        yaxis={
            "tickvals": list(range(len(labels))),
            "ticktext": [wrapped(label, 24) for label in labels],
            "range": [len(labels) - 0.4, -0.6],
            "showgrid": False,
        },
    )


PAIRED = {
    "paired_difference": "difference",
    "questions_lost": "lost",
    "questions_gained": "gained",
    "mcnemar_p": "McNemar p, one-sided",
    "detectable_loss": "smallest loss found with 80 % power",
}


def _paired(rows: pd.DataFrame) -> str:
    lines = []
    for _, test in list(rows.groupby("run_id", sort=False))[::-1][:MAX_LISTED]:
        by_metric = {row.metric: row for row in each(test)}
        main = by_metric.get("paired_difference")
        if main is None:
            continue
        commits = (
            f"{main.baseline_commit[:7] or 'baseline'} to {str(main.parsed.get('candidate_commit') or main.commit)[:7]}"
        )
        figures = [_points(main), *(_paired_figure(by_metric.get(name)) for name in list(PAIRED)[1:])]
        verdict = f'<b class="{main.verdict or "none"}">{WORDS[main.verdict or "none"]}</b>'
        lines.append(
            [f"{escape(main.benchmark)}<br><small>{escape(commits)}</small>", *figures, f"{main.n:,}", verdict]
        )
    return table(["paired test", *PAIRED.values(), "n", ""], lines) if lines else ""


def _points(row: Any) -> str:
    text = f"{100 * row.value:+.1f} points"
    if pd.isna(row.ci_low) or pd.isna(row.ci_high):
        return text
    return f"{text} <small>({100 * row.ci_low:+.1f} to {100 * row.ci_high:+.1f})</small>"


def _paired_figure(row: Any) -> str:
    if row is None:
        return "–"
    return f"{100 * row.value:.1f} points" if row.metric == "detectable_loss" else number(row.value)


# ---- hits and drafts ----


def answers_cells(results: Results) -> pd.DataFrame:
    """The newest full run of the guard's section *answers*: mode, method, K, hit_rate, acceptance of each cell."""
    rows = fullest_run(results.of("guard", "answers")).copy()
    for name in ("mode", "method", "K", "hit_rate", "loaded_blocks", "accepted", "drafted"):
        rows[name] = column(rows, name)
    rows = rows[rows["loaded_blocks"].isna() & rows["mode"].notna()]
    rows["acceptance"] = [a / d if d else None for a, d in zip(rows["accepted"], rows["drafted"], strict=True)]
    return rows


METHODS = {"ngram": "n-gram", "mtp": "MTP"}


def answers_table(results: Results) -> tuple[list[str], list[list[str]]] | None:
    """Head and cells: hit rate and accepted drafts by mode; None without rows."""
    rows = answers_cells(results)
    if rows.empty:
        return None
    drafts = list(dict.fromkeys((m, k) for m, k in zip(rows["method"], rows["K"], strict=True) if isinstance(m, str)))
    head = ["mode", "hit rate", *(f"{METHODS.get(m, m)} {k}" for m, k in drafts)]
    lines = []
    for mode, cell in rows.groupby("mode", sort=False):
        rate = cell["hit_rate"].astype(float)
        same = rate.max() - rate.min() < 5e-4
        line = [str(mode), percent(rate.iloc[0]) if same else f"{percent(rate.min())} to {percent(rate.max())}"]
        for method, k in drafts:
            found = cell[(cell["method"] == method) & (cell["K"] == k)]["acceptance"]
            line.append(percent(float(found.iloc[0])) if len(found) else "–")
        lines.append(line)
    return head, lines


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share else "0"


def answers_section(results: Results, missing: Missing) -> Section | None:
    found = answers_table(results)
    if found is None:
        missing.note("prefix hits and accepted drafts", "hybrid-kv guard")
        return None
    head, lines = found
    accepted = [line[2:] for line in lines]
    alike = all(cells == accepted[0] for cells in accepted)
    finding = (
        "Caching costs no accepted draft" if alike else "Caching changes how many drafts are accepted"
    ) + ": hits and drafts by cache mode"
    rows = [[code(line[0]), *map(escape, line[1:])] for line in lines]
    n = answers_cells(results)["n"].iloc[0]
    note = f"{n:,} questions per cell. Hit rate: prompt tokens that were not computed again; then accepted drafts."
    return Section("Hits and drafts", finding, table(head, rows) + paragraph(note))


# ---- static kernel metrics ----

STATIC_COLUMNS = {
    "registers": "registers",
    "spill_bytes": "spill, B",
    "shared_bytes": "shared, B",
    "blocks_per_sm": "blocks per SM",
    "load_bits": "load, bit",
    "store_bits": "store, bit",
    "instructions": "instructions",
    "instructions_per_byte": "per byte",
}


def static_table(results: Results) -> pd.DataFrame:
    """One line per kernel, shape, dtype and target with the last value of each of `STATIC_COLUMNS`."""
    rows = results.of(STATIC_SUITE)
    rows = rows.assign(
        name=rows["metric"].str.replace(r"^(sass|ptx|amdgcn)_", "", regex=True),
        **{name: column(rows, name) for name in ("shape", "dtype", "target")},
    )
    rows = rows[rows["name"].isin(STATIC_COLUMNS)].dropna(subset=["shape", "dtype", "target"])
    keys = ["benchmark", "shape", "dtype", "target"]
    last = rows.drop_duplicates([*keys, "name"], keep="last")
    order = {key: i for i, key in enumerate(dict.fromkeys(last[keys].itertuples(index=False, name=None)))}
    wide = last.pivot(index=keys, columns="name", values="value").reindex(columns=list(STATIC_COLUMNS))
    return wide.loc[sorted(wide.index, key=lambda key: order[key])].reset_index()


def static_section(results: Results, missing: Missing) -> Section | None:
    lines = static_table(results)
    if lines.empty:
        missing.note("registers, spills and access of the kernels", "hybrid-kv kernels --update")
        return None
    targets = list(dict.fromkeys(lines["target"]))
    spilling = int((lines["spill_bytes"] > 0).sum())
    kernels = lines["benchmark"].nunique()
    finding = f"None of {kernels} kernels spills a register on {', '.join(targets)}"
    if spilling:
        finding = f"{spilling} of {len(lines)} compiled cases spill registers"
    buttons = "".join(
        f'<button type="button" data-target="{escape(t)}" aria-pressed="{str(i == 0).lower()}">{escape(t)}</button>'
        for i, t in enumerate(targets)
    )
    # A kernel's name stands once per target, above its shapes.
    first = ~lines.duplicated(["benchmark", "target"])
    cells = [
        [
            (f"<b>{escape(row.benchmark.partition('.')[2] or row.benchmark)}</b><br>" if named else "")
            + f"<small>{escape(row.shape)}, {escape(row.dtype)}</small>",
            *(number(float(getattr(row, name))) for name in STATIC_COLUMNS),
        ]
        for row, named in zip(each(lines), first, strict=True)
    ]
    attributes = [f'data-target="{escape(t)}"{"" if t == targets[0] else " hidden"}' for t in lines["target"]]
    head = ["kernel", *STATIC_COLUMNS.values()]
    body = f'<div class="buttons" role="group" aria-label="target">{buttons}</div>' + table(head, cells, attributes)
    note = (
        "Compiled ahead of time, no GPU: exact for one version of Triton "
        f"({', '.join(sorted(set(results.of(STATIC_SUITE)['triton']) - {''}))}). Each instruction counts once, however "
        "often it runs."
    )
    return Section("Kernels", finding, body + paragraph(note))


# ---- comparison and operating curve ----

OUTCOMES = {"slower": MARKS[5], "faster": MARKS[2], "same": MARKS[4]}
MAX_COMPARED = 20


def compare_section(results: Results, link: Link, missing: Missing) -> Section | None:
    rows = results.of(COMPARE)
    if rows.empty:
        missing.note("a paired comparison of two versions", "hybrid-kv compare HEAD~1 HEAD")
        return None
    newest = newest_run(rows)
    slower = newest[(newest["verdict"] == "fail") & (newest["unit"] == "time ratio")]
    timed = int((newest["unit"] == "time ratio").sum())
    base = newest["baseline_commit"].iloc[0][:7] or "its baseline"
    finding = f"{len(slower) or 'None'} of {timed} benchmarks {'is' if len(slower) <= 1 else 'are'} slower than {base}"
    return Section("Comparison", finding, by_machine(results, rows, lambda own: _compared(newest_run(own), link)))


def _compared(rows: pd.DataFrame, link: Link) -> str:
    newest = next(each(rows.tail(1)))
    head = str(newest.parsed.get("head_commit") or newest.commit)
    text = f"<p>{link(head)} against {link(newest.baseline_commit)}, {day(newest)}.</p>"
    rows = rows.assign(outcome=column(rows, "outcome").fillna("same"), was=column(rows, "was"))
    rows["calm"] = column(rows, "quarantined").eq(True)
    timed = rows[rows["unit"] == "time ratio"]
    if len(timed):
        # The largest changes, slowest first.
        far = timed.reindex(timed["value"].map(math.log).abs().sort_values().index[-MAX_COMPARED:])
        text += _ratios(far.sort_values("value", ascending=False))
        if len(timed) > len(far):
            text += paragraph(f"The {len(far)} largest changes of {len(timed)}.")
    counted = rows[(rows["unit"] != "time ratio") & (rows["outcome"] != "same")]
    cells = [
        [
            escape(f"{row.benchmark}, {row.metric}") + (f"<br><small>{escape(row.case)}</small>" if row.case else ""),
            number(float(row.was)),
            with_unit(row),
            f'<b class="{"fail" if row.verdict == "fail" else "changed"}">{escape(row.outcome)}</b>',
        ]
        for row in each(counted.head(MAX_LISTED))
    ]
    return text + (table(["exact figure", "was", "is", ""], cells) if cells else "")


def _ratios(rows: pd.DataFrame) -> str:
    labels = [wrapped(f"{row.benchmark} {row.case}".strip(), 28) for row in each(rows)]
    looks = {name: OUTCOMES[name] for name in OUTCOMES if (rows["outcome"] == name).any()}
    traces = []
    for name, look in looks.items():
        chosen = (rows["outcome"] == name).to_numpy()
        line = rows[chosen]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": list(100 * (line["value"] - 1)),
                "y": [i for i, hit in enumerate(chosen) if hit],
                "error_x": {**intervals(line, 100.0), "color": look.colour},
                "marker": {
                    "color": look.colour,
                    "symbol": [look.symbol + ("-open" if calm else "") for calm in line["calm"]],
                    "size": 9,
                },
                "customdata": [f"{with_interval(r)}, n = {r.n}{', quarantined' if r.calm else ''}" for r in each(line)],
                "hovertemplate": f"{name}: %{{customdata}}<extra></extra>",
            }
        )
    calm = " Hollow: quarantined, raises no alarm." if rows["calm"].any() else ""
    return legend(looks) + plot(
        traces,
        f"Change of the time with its 95 % interval.{calm}",
        f"Changes of {len(rows)} benchmarks from {100 * (rows['value'].min() - 1):+.1f} to "
        f"{100 * (rows['value'].max() - 1):+.1f} %",
        80 + 17 * sum(max(2, label.count("<br>") + 2) for label in labels),
        xaxis={"title": "change of the time", "ticksuffix": " %", "nticks": 4},
        yaxis={
            "tickvals": list(range(len(labels))),
            "ticktext": labels,
            "range": [len(labels) - 0.4, -0.6],
            "showgrid": False,
        },
        shapes=[_limit_line(x=0.0)],
    )


WHOLE = "any benchmark"  # the row that is about a whole comparison


def curve_rows(results: Results) -> pd.DataFrame:
    """The last rates of the newest self-test, with column `plant`: the planted slowdown in percent, 0 for none."""
    rows = results.of(CURVE)
    rows = rows[rows["metric"].isin(["false_alarm_rate", "detection_rate"])]
    rows = rows.assign(plant=column(rows, "plant_percent"), experiment=column(rows, "experiment"))
    if len(rows):
        rows = rows[rows["experiment"] == rows["experiment"].iloc[-1]]
    return rows.drop_duplicates(["benchmark", "metric", "plant", "machine"], keep="last")


def curve_section(results: Results, missing: Missing) -> Section | None:
    rows = curve_rows(results)
    if rows.empty:
        missing.note("false alarms and detection of the harness itself", "hybrid-kv compare --self-test")
        return None
    return Section("Operating curve", _curve_finding(rows), by_machine(results, rows, _curve))


def _curve_finding(rows: pd.DataFrame) -> str:
    parts = []
    for row in each(rows[rows["benchmark"] == WHOLE].tail(1)):
        parts.append(f"{round(row.value * row.n)} of {row.n} comparisons of equal code raised an alarm")
    found = rows[(rows["metric"] == "detection_rate") & (rows["plant"] == 5)]
    if len(found):
        parts.append(f"a planted 5 % is found in {100 * found['value'].min():.0f} % of the trials or more")
    calm = _quarantined(rows)
    if calm:
        parts.append(f"{len(calm)} quarantined")
    return "; ".join(parts) or "How often the harness errs"


def _quarantined(rows: pd.DataFrame) -> set[str]:
    failed = (rows["metric"] == "false_alarm_rate") & (rows["verdict"] == "fail")
    return set(rows[failed]["benchmark"])


def _curve(rows: pd.DataFrame) -> str:
    calm = _quarantined(rows)
    planted = rows[rows["metric"] == "detection_rate"]["benchmark"]
    drawn = list(dict.fromkeys([*rows[rows["benchmark"] == WHOLE]["benchmark"], *sorted(calm), *planted]))
    others = rows[~rows["benchmark"].isin(drawn)]
    kinds = {"false alarms": 0} | {f"{percent} % found": percent for percent in sorted(set(rows["plant"]) - {0})}
    looks = marks(kinds)
    traces = []
    for index, (name, percent) in enumerate(kinds.items()):
        line = rows[(rows["plant"] == percent) & rows["benchmark"].isin(drawn)]
        look = looks[name]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": list(100 * line["value"]),
                "y": [drawn.index(b) + 0.2 * (index - (len(kinds) - 1) / 2) for b in line["benchmark"]],
                "error_x": {**intervals(line, 100.0), "color": look.colour},
                "marker": {"color": look.colour, "symbol": look.symbol, "size": 9},
                "customdata": [f"{round(r.value * r.n)} of {r.n}" for r in each(line)],
                "hovertemplate": f"{escape(name)}: %{{customdata}}<extra></extra>",
            }
        )
    labels = [label + (" (quarantined)" if label in calm else "") for label in drawn]
    figure = legend(looks) + plot(
        traces,
        "Share of the trials with an alarm, exact 95 % intervals: 0 is right for equal code, 100 % for a slowdown",
        "; ".join(labels),
        80 + 64 * len(drawn),
        xaxis={"title": "share of the trials", "ticksuffix": " %", "range": [-5, 105]},
        yaxis={
            "tickvals": list(range(len(drawn))),
            "ticktext": [wrapped(label.replace("[", " ["), 30) for label in labels],
            "range": [len(drawn) - 0.4, -0.6],
            "showgrid": False,
        },
    )
    cells = [
        [escape(row.benchmark), f"{round(row.value * row.n)} of {row.n:,}", f"{100 * row.ci_high:.1f} %"]
        for row in each(others)
    ]
    rest = table(["other benchmarks", "false alarms", "at most, 95 %"], cells)
    summary = f"{len(cells)} other benchmarks, false alarms only"
    return figure + (f"<details><summary>{summary}</summary>{rest}</details>" if cells else "")
