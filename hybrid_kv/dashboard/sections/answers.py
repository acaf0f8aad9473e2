"""Prefix hits and accepted drafts by cache mode, as the guard counted them."""

from __future__ import annotations

from html import escape

import pandas as pd

from hybrid_kv.dashboard.data import Results, column, fullest_run
from hybrid_kv.dashboard.draw import code, paragraph, table
from hybrid_kv.dashboard.report import Report, Section

PLACE = 80
METHODS = {"ngram": "n-gram", "mtp": "MTP"}


def section(report: Report) -> Section | None:
    found = answers_table(report.results)
    if found is None:
        report.missing.note("prefix hits and accepted drafts", "hybrid-kv guard --record")
        return None
    head, lines = found
    accepted = [line[2:] for line in lines]
    alike = all(cells == accepted[0] for cells in accepted)
    finding = (
        "Caching costs no accepted draft" if alike else "Caching changes how many drafts are accepted"
    ) + ": hits and drafts by cache mode"
    rows = [[code(line[0]), *map(escape, line[1:])] for line in lines]
    n = answers_cells(report.results)["n"].iloc[0]
    note = f"{n:,} questions per cell. Hit rate: prompt tokens that were not computed again; then accepted drafts."
    return Section("Hits and drafts", finding, table(head, rows) + paragraph(note))


def answers_cells(results: Results) -> pd.DataFrame:
    """The newest full run of the guard's section *answers*: mode, method, K, hit_rate, acceptance of each cell."""
    rows = fullest_run(results.of("guard", "answers"))
    rows = rows.assign(
        **{name: column(rows, name, str) for name in ("mode", "method")},
        **{name: column(rows, name, int) for name in ("K", "loaded_blocks", "accepted", "drafted")},
        hit_rate=column(rows, "hit_rate", int, float).astype(float),
    )
    rows = rows[rows["loaded_blocks"].isna() & rows["mode"].notna()]
    return rows.assign(acceptance=(rows["accepted"] / rows["drafted"].replace(0, None)).astype(float))


def answers_table(results: Results) -> tuple[list[str], list[list[str]]] | None:
    """Head and cells: hit rate and accepted drafts by mode; None without rows."""
    rows = answers_cells(results)
    if rows.empty:
        return None
    drafts = list(dict.fromkeys((m, k) for m, k in zip(rows["method"], rows["K"], strict=True) if isinstance(m, str)))
    head = ["mode", "hit rate", *(f"{METHODS.get(m, m)} {k}" for m, k in drafts)]
    lines = []
    for mode, cell in rows.groupby("mode", sort=False):
        rate = cell["hit_rate"]
        same = rate.max() - rate.min() < 5e-4
        line = [str(mode), percent(rate.iloc[0]) if same else f"{percent(rate.min())} to {percent(rate.max())}"]
        for method, k in drafts:
            found = cell[(cell["method"] == method) & (cell["K"] == k)]["acceptance"]
            line.append(percent(float(found.iloc[0])) if len(found) else "–")
        lines.append(line)
    return head, lines


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share else "0"
