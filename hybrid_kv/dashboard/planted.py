"""What found the planted bugs over HTTP, by probe: a table for the page about them."""

from __future__ import annotations

from hybrid_kv.dashboard.data import MUTANTS, Results, column, each

NOTHING = "nothing"


def planted_table(results: Results) -> str | None:
    """Each bug that was tried under the probe that found it first, in its newest row; and how many there are."""
    rows = results.of(MUTANTS, metric="caught")
    rows = rows[column(rows, "by", str) == "http"].drop_duplicates("benchmark", keep="last")
    rows = rows[rows["benchmark"] != "none"]
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
