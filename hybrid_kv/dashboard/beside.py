"""The engine's tokens per second over those of other engines that read the same folders: rows of `bench.families`."""

from __future__ import annotations

from typing import Any

import pandas as pd

from hybrid_kv.dashboard.data import Results, column, each
from hybrid_kv.timing.measurement import ENGINE

PHASES, BATCHES = ("prefill", "decode"), (1, 8)


def beside_table(results: Results) -> tuple[list[str], list[list[str]]] | None:
    """A line for each family and rival of the family's newest run: equal tokens and ratios, or why it does not run."""
    rows = results.of("families")
    if rows.empty:
        return None
    rows = rows.assign(**{name: column(rows, name, str) for name in ("family", "subject", "reason", "dtype")})
    rows = rows.assign(batch=column(rows, "batch", int))
    rows = rows.assign(dtype=rows["dtype"].fillna("float32"))  # the first rows do not name it
    lines = []
    for (family, dtype), group in rows.groupby(["family", "dtype"]):
        name = f"`{family}`" + ("" if dtype == "float32" else f" in {dtype}")
        newest = group[(group["run_id"] == group["run_id"].iloc[-1]) & (group["subject"] != ENGINE)]
        lines += [[name, *_cells(subject, own)] for subject, own in newest.groupby("subject")]
    return ["family", "beside", "tokens", *(f"{phase}, {batch}" for phase in PHASES for batch in BATCHES)], lines


def _cells(subject: Any, rows: pd.DataFrame) -> list[str]:
    refused = list(each(rows[rows["metric"] == "runs"]))
    equal = (rows[rows["metric"] == "equal_requests"]["value"] == 1).all()
    rounded = rows[rows["metric"] == "rounded_of_unequal"]["value"]
    unequal = "differ by rounding" if len(rounded) and (rounded == 1).all() else "differ"
    tokens = f"does not run: {refused[0].reason}" if refused else "equal" if equal else unequal
    found = {(row.benchmark, row.batch): row for row in each(rows[rows["metric"] == "ratio_to_engine"])}
    shown = [found.get((phase, batch)) for phase in PHASES for batch in BATCHES]
    ratios = [f"{row.value:.2f} ({row.ci_low:.2f} to {row.ci_high:.2f})" if row else "–" for row in shown]
    return [str(subject).replace("vllm", "vLLM"), tokens, *ratios]
