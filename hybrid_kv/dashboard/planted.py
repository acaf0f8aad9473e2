"""What found the planted bugs: by class of bug, as small cases, over HTTP by probe, and generated ones by the part of
the engine that they change. Tables for their page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pandas as pd

from hybrid_kv.dashboard.data import MUTANTS, Results, column, each
from hybrid_kv.mutation.equivalent import is_there, read_equivalent
from hybrid_kv.mutation.generated import GUARD, TRITON, WAYS

NOTHING = "nothing"
SOON = 30  # seconds of one core, in which the quick guard is to see a bug
HUNTS = ("quick", "sanitizer", "full")  # from inside; a later one counts where none before it saw the bug
# Of a small case at most: the metric of its rows, in words, and the figure.
SIZES = {"small_requests": ("requests", 3), "small_tokens": ("prompt tokens", 64), "small_seconds": ("seconds", 60)}
# By the first letter of an id: the name, and what of such bugs the guard does not see.
CLASSES = {
    "A": (
        "geometry, page sizes, planning",
        "What kernels on a GPU really take: block sizes are held against a table.",
    ),
    "B": (
        "block tables, slots, units of a block",
        "Slots beyond 2³¹: the pools that run have at most a few thousand blocks.",
    ),
    "C": (
        "metadata, persistent buffers, padding",
        "What only a captured CUDA graph keeps: capture is simulated on a CPU.",
    ),
    "D": (
        "prefill or decode, first states, batches",
        "What needs more than 16 rows in a step, the most that a scenario has.",
    ),
    "E": (
        "drafts: accepted tokens, rollback",
        "Acceptance that falls by little: its floor is six standard deviations below what was recorded.",
    ),
    "F": (
        "prefix cache: what is kept, what a hit restores",
        "Fewer hits in other traffic than the one whose hits are counted.",
    ),
    "G": (
        "lifetime: stale memory, preemption, leaks",
        "Memory that is freed while a device still reads it: on a CPU all runs in one order.",
    ),
    "H": (
        "kernels: scans, offsets, dtypes",
        "Triton's kernels at sizes of real models, and compiled: the full guard interprets them with a tiny one.",
    ),
    "I": (
        "admission, capacity, liveness",
        "Starvation under load that never ends: a scenario's queue runs empty.",
    ),
    "J": (
        "offload, other tiers, several devices",
        "Ranks, and copies that arrive late: one process waits for its host memory and its folder.",
    ),
    "K": (
        "metrics, speed",
        "Most of speed: only the cost of block ids is held against a clock, the rest belongs to `bench/`.",
    ),
    "L": (
        "reported in November 2026",
        "Errors of a coarse state that grow over thousands of tokens: prompts here have hundreds.",
    ),
}


def classes_table(results: Results) -> str | None:
    """A line for each class of bugs: what sees them first, how many, how soon; and what is not seen at all."""
    rows = _first_catches(results)
    if rows.empty:
        return None
    lines = [
        _class(letter, *texts, rows[rows["benchmark"].str.startswith(letter)]) for letter, texts in CLASSES.items()
    ]
    quick = rows[(rows["value"] == 1) & (rows["by"] == "quick")]
    told = (
        f"{_caught(rows)} are caught, {len(quick)} of them by the quick guard, {sum(quick['seconds'] <= SOON)} in "
        f"{SOON} s of one core at most; the median takes {quick['seconds'].median():.1f} s."
    )
    if missed := sorted(rows[rows["value"] == 0]["benchmark"]):
        told += f" Not caught: {' '.join(missed)}."
    scored = _newest(results, "caught")
    scored = scored[scored["by"] == "accuracy"]
    if len(scored):
        told += f" Correct answers alone show {_caught(scored)}."
    head = ["| | class | first seen by | caught | s | what the guard does not see |", "|---|---|---|--:|--:|---|"]
    return "\n".join([told, "", *head, *lines])


def _class(letter: str, name: str, unseen: str, rows: pd.DataFrame) -> str:
    found = rows[rows["value"] == 1]
    seen = ", ".join(f"{section} {count}" for section, count in Counter(found["first"]).most_common())
    seconds = "–" if found["seconds"].isna().all() else f"{found['seconds'].median():.1f}"
    return f"| {letter} | {name} | {seen or '–'} | {_caught(rows)} | {seconds} | {unseen} |"


def _caught(rows: pd.DataFrame) -> str:
    return f"{int(rows['value'].sum())} of {len(rows)}"


def _first_catches(results: Results) -> pd.DataFrame:
    """A row for each known bug: of the first hunt that caught it, if one did. Of each hunt its newest row counts."""
    rows = _newest(results, "caught")
    rows = rows[rows["by"].isin(HUNTS)]
    seconds = _newest(results, "seconds").set_index(["benchmark", "by"])["value"]
    keys = pd.MultiIndex.from_frame(rows[["benchmark", "by"]])
    rows = rows.assign(seconds=seconds.reindex(keys).to_numpy(), first=column(rows, "section", str))
    late = rows["by"].map(HUNTS.index) + len(HUNTS) * (rows["value"] == 0)
    return rows.assign(late=late).sort_values("late", kind="stable").drop_duplicates("benchmark")


def _newest(results: Results, metric: str) -> pd.DataFrame:
    """The newest row of each known bug and hunt."""
    rows = _of_known(results, metric)
    return rows.assign(by=column(rows, "by", str)).drop_duplicates(["benchmark", "by"], keep="last")


def _of_known(results: Results, metric: str) -> pd.DataFrame:
    rows = results.of(MUTANTS, metric=metric)
    return rows[rows["benchmark"].str.fullmatch(r"[A-L]\d\d")]


def small_table(results: Results) -> str | None:
    """How small the cases got that caught a bug, the newest of each bug; how many fail each time and only with it."""
    rows = {metric: _newest(results, metric) for metric in (*SIZES, "small_held", "small_passes_unchanged")}
    rows = {metric: own.drop_duplicates("benchmark", keep="last") for metric, own in rows.items()}
    held, passed = rows["small_held"], rows["small_passes_unchanged"]
    if held.empty:
        return None
    caught = _of_known(results, "caught")  # in hunts that made cases small; a later one may have made none
    caught = caught[caught["run_id"].isin(held["run_id"]) & (caught["value"] == 1)]
    others = caught[~caught["benchmark"].isin(held["benchmark"])].drop_duplicates("benchmark", keep="last")
    lines = []
    for metric, (name, most) in SIZES.items():
        own = rows[metric].sort_values("value")
        worst, inside = own.iloc[-1], own[own["value"] <= most]
        line = [name, f"{own['value'].median():g}", f"{worst['value']:g} ({worst['benchmark']})"]
        lines.append(f"| {' | '.join(line)} | {len(inside)} of {len(own)} have at most {most} |")
    return "\n".join([
        f"Of {len(held)} small cases {sum(held['value'] == 1)} fail {held['n'].iloc[-1]} of {held['n'].iloc[-1]} times "
        f"with the bug, and {int(passed['value'].sum())} pass without it.{_without(others)}",
        "",
        "| of a case | median | worst | |",
        "|---|--:|--:|---|",
        *lines,
    ])  # fmt: skip


def _without(others: pd.DataFrame) -> str:
    """What has no small case, by the section that caught it."""
    sections = Counter(column(others, "section", str)).most_common()
    listed = ", ".join(f"{section} {count}" for section, count in sections)
    return f" {len(others)} more were caught without such a case: {listed}." if len(others) else ""


def generated_table(results: Results) -> str | None:
    """`_generated`: of the engine and the references of kernels."""
    return _generated(results, WAYS[GUARD])


def triton_table(results: Results) -> str | None:
    """`_generated`: of Triton's kernels."""
    return _generated(results, WAYS[TRITON])


def _generated(results: Results, ways: Sequence[str]) -> str | None:
    """Of each part of the engine how many generated mutants were hunted in these ways and caught, each by its newest
    row.

    Those are left out whose code is not there any more, or that are proven equivalent.
    """
    rows = results.of(MUTANTS, metric="caught")
    rows = rows[column(rows, "by", str) == "+".join(ways)]
    rows = rows.assign(change=column(rows, "change", str), first=column(rows, "section", str)).dropna(subset="change")
    rows = rows.assign(file=rows["benchmark"].map(lambda name: name.split(":")[0]))
    rows = rows.drop_duplicates(["file", "change"], keep="last")
    proven = read_equivalent() if len(rows) else set()
    named = zip(rows["file"], rows["change"], strict=True)
    rows = rows[[one not in proven and is_there(*one) for one in named]]
    if rows.empty:
        return None
    parts = rows["benchmark"].map(_part)
    caught, lines = rows[rows["value"] == 1], []
    for part, own in rows.groupby(parts):
        seen = Counter(own[own["value"] == 1]["first"]).most_common(3)
        told = ", ".join(f"{section} {count}" for section, count in seen)
        lines.append(f"| `{part}` | {len(own)} | {int(own['value'].sum())} | {told} |")
    return "\n".join([
        f"Of {len(rows):,} that were hunted, those that are proven equivalent left out, {len(caught):,} are caught "
        f"({len(caught) / len(rows):.1%}):",
        "",
        "| changed | hunted | caught | most of them by |",
        "|---|--:|--:|---|",
        *lines,
    ])  # fmt: skip


def _part(name: str) -> str:
    """The folder of the changed file; of an engine's the file itself, of a kernel its own."""
    file = name.split(":")[0]
    return file if file.startswith("engine/") else f"{file.rpartition('/')[0]}/"


def planted_table(results: Results) -> str | None:
    """Each bug that was tried under the probe that found it first, in its newest row; and how many there are."""
    rows = _newest(results, "caught")
    rows = rows[rows["by"] == "http"]
    if rows.empty:
        return None
    rows = rows.assign(rule=column(rows, "rule", str).fillna(NOTHING), is_first=column(rows, "is_first", bool))
    found: dict[str, list[str]] = {}
    for row in each(rows.sort_values("benchmark")):
        found.setdefault(str(row.rule), []).append(str(row.benchmark))
    order = sorted(found, key=lambda rule: (rule == NOTHING, -len(found[rule]), rule))
    named = rows["is_first"].dropna()
    caught, tried = int(rows["value"].sum()), len(rows)
    return "\n".join([
        f"{caught} of {tried} that were tried are found; where a token is named, it is the first that differs in "
        f"{sum(named)} of {len(named)}:",
        "",
        "| first found by | bugs |",
        "|---|---|",
        *(f"| {rule} | {' '.join(found[rule])} |" for rule in order),
    ])  # fmt: skip
