"""Other checks: answers to a task, hits and drafts by cache mode, swarms of the guard."""

from __future__ import annotations

import json
from functools import partial
from html import escape
from typing import Any

import pandas as pd

from hybrid_kv.measure.dashboard.data import (
    ACCURACY,
    SWARM,
    Results,
    column,
    each,
    fullest_run,
    newest_run,
    with_params,
)
from hybrid_kv.measure.dashboard.draw import (
    code,
    coloured,
    name_of,
    paragraph,
    table,
    with_small_interval,
)
from hybrid_kv.measure.dashboard.report import Report, Section
from hybrid_kv.measure.dashboard.words import WORDS, day, metric_name, number

PAIRED = {
    "paired_difference": "difference",
    "questions_lost": "lost",
    "questions_gained": "gained",
    "mcnemar_p": "McNemar p, one-sided",
    "detectable_loss": "smallest loss found with 80 % power",
}
# The gates of accuracy, with what each is held against: a limit in the row's own run, or the noise
# of the same run.
GATES = {
    "exact_match_strict": "right answers, strict",
    "acceptance_length": "acceptance length",
    "acceptance_length_change": "change of the acceptance length",
    "cached_kl": "KL per token, cached answers against uncached scoring",
    "uncached_kl": "the same without cache hits: the noise",
    "unlikely_tokens": "greedy tokens 1 nat or more below the likeliest",
    "unpaired_difference": "difference of two scores without pairs",
}
NO_SETTING = ("seed", "limit", "task", "lm_eval", "num_fewshot")
METHODS = {"ngram": "n-gram", "mtp": "MTP"}


def accuracy(report: Report) -> Section | None:
    """Return the gates of accuracy, shares of right answers, and paired tests of two versions."""
    rows = report.results.of(ACCURACY)
    rows = rows[
        rows["metric"].str.contains("match|invalid") | rows["metric"].isin({*PAIRED, *GATES})
    ]
    if rows.empty:
        return None

    def block(machine_rows: pd.DataFrame) -> str:
        return gates(machine_rows, report) + shares(machine_rows) + _paired(machine_rows)

    return Section("Accuracy", right_answers(rows), report.by_machine(rows, block))


def gates(rows: pd.DataFrame, report: Report) -> str:
    """Return the newest figure of each gate, for each task and model, with its verdict."""
    rows = with_params(rows[rows["metric"].isin(GATES)], model=str)
    newest = rows.drop_duplicates(["benchmark", "model", "metric"], keep="last")
    order = list(GATES)

    def place(row: Any) -> int:
        return order.index(row.metric)

    lines = [
        [
            f"{escape(GATES[row.metric])}<br><small>"
            f"{escape(f'{row.benchmark}, {row.model}')}</small>",
            with_small_interval(row),
            f"{row.n:,}",
            coloured(row.verdict, WORDS[row.verdict]) if row.verdict else "–",
            f"{report.link(row.commit)}, <time>{day(row)}</time>",
        ]
        for row in sorted(each(newest), key=place)
    ]
    return table(["gate", "newest", "n", "", "at"], lines) if lines else ""


def right_answers(rows: pd.DataFrame) -> str:
    """Return the newest share of each task, and the newest figures of the other two gates."""
    right = rows[rows["metric"] == "exact_match_strict"].drop_duplicates("benchmark", keep="last")
    texts = [
        f"{100 * row.value:.1f} % of {row.n:,} questions of {row.benchmark}" for row in each(right)
    ]
    title = f"Right answers: {', '.join(texts)}" if texts else "Answers to the task's questions"
    for metric, name in (("acceptance_length", "acceptance length"), ("cached_kl", "cached KL")):
        metric_rows = rows[rows["metric"] == metric]
        title += f"; {name} {number(metric_rows['value'].iloc[-1])}" if len(metric_rows) else ""
    return title


def shares(rows: pd.DataFrame) -> str:
    """Return a line for each task, metric and settings of a model with its newest share.

    Runs of other seeds are one line.
    """
    rows = rows[rows["metric"].str.contains("match|invalid")]
    settings = [{k: v for k, v in p.items() if k not in NO_SETTING} for p in rows["parsed"]]
    rows = rows.assign(settings=[json.dumps(setting, sort_keys=True) for setting in settings])
    lines = []
    for (task, metric, text), same in rows.groupby(["benchmark", "metric", "settings"], sort=False):
        newest = next(each(same.tail(1)))
        named = ", ".join(f"{name}={value}" for name, value in json.loads(str(text)).items())
        label = f"{escape(f'{task}, {metric_name(str(metric))}')}<br><small>{escape(named)}</small>"
        lines.append(
            [
                label,
                with_small_interval(newest._replace(unit="share")),
                f"{newest.n:,}",
                str(len(same)),
            ]
        )
    return table(["answers", "newest share", "n", "runs"], lines[::-1]) if lines else ""


def _paired(rows: pd.DataFrame) -> str:
    lines = []
    for _, test in list(rows.groupby("run_id", sort=False))[::-1]:
        by_metric = {row.metric: row for row in each(test)}
        main = by_metric.get("paired_difference")
        if main is None:
            continue
        candidate = str(main.parsed.get("candidate_commit") or main.commit)
        commits = f"{main.baseline_commit[:7] or 'baseline'} to {candidate[:7]}"
        lines.append(
            [
                f"{escape(main.benchmark)}<br><small>{escape(commits)}</small>",
                *(_paired_value(by_metric.get(name)) for name in PAIRED),
                f"{main.n:,}",
                coloured(main.verdict or "none", WORDS[main.verdict or "none"]),
            ]
        )
    return table(["paired test", *PAIRED.values(), "n", ""], lines) if lines else ""


def _paired_value(row: Any) -> str:
    if row is None:
        return "–"
    if row.metric not in ("paired_difference", "detectable_loss"):
        return number(row.value)
    ends = (
        ""
        if pd.isna(row.ci_low)
        else f" <small>({100 * row.ci_low:+.1f} to {100 * row.ci_high:+.1f})</small>"
    )
    return f"{100 * row.value:+.1f} points{ends}"


def drafts_and_hits(report: Report) -> Section | None:
    """Return prefix hits and accepted drafts by cache mode, as the newest full guard has them."""
    rows = hit_rows(report.results)
    if rows.empty:
        return None
    drafts = (
        rows.dropna(subset=["method"])[["method", "K"]]
        .drop_duplicates()
        .itertuples(index=False, name=None)
    )
    columns = {(method, k): f"{METHODS.get(method, method)} {k}" for method, k in drafts}
    lines = []
    for mode, cells in rows.groupby("mode", sort=False):
        rate = dict.fromkeys(
            _percent(share) for share in (cells["hit_rate"].min(), cells["hit_rate"].max())
        )
        accepted = {(row.method, row.K): row.acceptance for row in each(cells)}
        shown = [_percent(accepted[key]) if key in accepted else "–" for key in columns]
        lines.append([code(str(mode)), " to ".join(rate), *shown])
    alike = all(line[2:] == lines[0][2:] for line in lines)
    finding = (
        "Caching costs no accepted draft"
        if alike
        else "Caching changes how many drafts are accepted"
    )
    note = (
        f"{rows['n'].iloc[0]:,} questions per cell. Hit rate: prompt tokens from the cache; then "
        "accepted drafts."
    )
    body = table(["mode", "hit rate", *columns.values()], lines) + paragraph(note)
    return Section("Hits and drafts", f"{finding}: hits and drafts by cache mode", body)


def hit_rows(results: Results) -> pd.DataFrame:
    """Return cells of the newest full run of the guard's section *answers*.

    Columns: mode, method, K, hit_rate, acceptance.
    """
    rows = fullest_run(results.of("guard", "answers"))
    rows = with_params(
        rows, mode=str, method=str, K=int, loaded_blocks=int, accepted=int, drafted=int
    )
    rows = rows.assign(hit_rate=column(rows, "hit_rate", int, float).astype(float))
    rows = rows[rows["loaded_blocks"].isna() & rows["mode"].notna()]
    return rows.assign(
        acceptance=(rows["accepted"] / rows["drafted"].replace(0, None)).astype(float)
    )


def _percent(share: float) -> str:
    return "–" if pd.isna(share) else f"{100 * share:.1f} %" if share else "0"


def swarms(report: Report) -> Section | None:
    """Return runs of swarms, their coverage, and the rules that were violated."""
    rows = report.results.of(SWARM)
    if rows.empty:
        return None
    last = rows[rows["metric"] != "failures"].drop_duplicates(["run_id", "metric"], keep="last")
    requests = last[last["metric"] == "requests"]["value"].sum()
    broken = last[
        (last["metric"] == "rules_broken") & last["run_id"].isin(newest_run(rows)["run_id"])
    ]["value"]
    count = int(broken.iloc[-1]) if len(broken) else 0
    rules = f"{count or 'no'} rule{'s' * (count != 1)}"
    finding = f"Swarms ran {number(requests)} exact requests; the newest violated {rules}"
    return Section("Swarms", finding, report.by_machine(rows, partial(_swarms, report=report)))


def _swarms(rows: pd.DataFrame, report: Report) -> str:
    last = rows[rows["metric"] != "failures"].drop_duplicates(["run_id", "metric"], keep="last")
    lines = []
    for _, run in list(last.groupby("run_id", sort=False))[::-1]:
        of = {row.metric: row for row in each(run)}
        newest = next(each(run.tail(1)))
        counts = [
            f"{number(of[name].value)}" if name in of else "–" for name in ("seeds", "requests")
        ]
        covered = [
            f"{number(of[name].value)} of {of[name].n:,}" if name in of else "–"
            for name in ("patterns", "settings")
        ]
        lines.append([f"<time>{day(newest)}</time>", report.link(newest.commit), *counts, *covered])
    text = table(["run", "commit", "seeds", "requests", "request patterns", "settings"], lines)
    failures = with_params(rows[rows["metric"] == "failures"], rule=str).dropna(subset=["rule"])
    failures = failures.drop_duplicates(["run_id", "rule"], keep="last").iloc[::-1]
    cells = [
        [name_of(row.rule), number(row.value), report.link(row.commit), day(row)]
        for row in each(failures)
    ]
    return text + (
        table(["rule that was violated first", "scenarios", "commit", "day"], cells)
        if cells
        else ""
    )
