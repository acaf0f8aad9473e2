"""Static metrics of the kernels: registers, spills, access, instructions."""

from __future__ import annotations

from html import escape

import pandas as pd

from hybrid_kv.dashboard.data import STATIC_SUITE, Results, column, each
from hybrid_kv.dashboard.draw import paragraph, table
from hybrid_kv.dashboard.report import Report, Section
from hybrid_kv.dashboard.words import number

PLACE = 90
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


def section(report: Report) -> Section | None:
    lines = static_table(report.results)
    if lines.empty:
        report.missing.note("registers, spills and access of the kernels", "hybrid-kv kernels --update")
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
    versions = ", ".join(sorted(set(report.results.of(STATIC_SUITE)["triton"]) - {""}))
    note = (
        f"Compiled ahead of time, no GPU: exact for one version of Triton ({versions}). Each instruction counts once, "
        "however often it runs."
    )
    summary = f"<summary>{len(lines):,} compiled cases, target by target</summary>"
    return Section("Kernels", finding, f"<details>{summary}{body}{paragraph(note)}</details>")


def static_table(results: Results) -> pd.DataFrame:
    """One line per kernel, shape, dtype and target with the last value of each of `STATIC_COLUMNS`."""
    rows = results.of(STATIC_SUITE)
    rows = rows.assign(
        name=rows["metric"].str.replace(r"^(sass|ptx|amdgcn)_", "", regex=True),
        **{name: column(rows, name, str) for name in ("shape", "dtype", "target")},
    )
    rows = rows[rows["name"].isin(STATIC_COLUMNS)].dropna(subset=["shape", "dtype", "target"])
    keys = ["benchmark", "shape", "dtype", "target"]
    last = rows.drop_duplicates([*keys, "name"], keep="last")
    order = {key: i for i, key in enumerate(dict.fromkeys(last[keys].itertuples(index=False, name=None)))}
    wide = last.pivot(index=keys, columns="name", values="value").reindex(columns=list(STATIC_COLUMNS))
    return wide.loc[sorted(wide.index, key=lambda key: order[key])].reset_index()
