"""How often `hybrid-kv bisect` names the right commit: the newest rates of its self-test."""

from __future__ import annotations

from typing import Any

from hybrid_kv.dashboard.data import BISECT, Results, column, each

KINDS = {
    "tokens": "a scenario that fails",
    "counts": "an exact count",
    "time": "a time, 5 % longer",
    "equal time": "a time, equal code",
    "answers": "answers, 5 % lost",
}
HEAD = ["what went red", "histories", "right", "an innocent blamed", "nobody blamed", "asked", "pairs", "at most"]


def bisected_table(results: Results) -> tuple[list[str], list[list[str]]] | None:
    """A line for each kind of history, drawn or planted in git."""
    rows = results.of(BISECT)
    rows = rows.assign(**{name: column(rows, name, str) for name in ("way",)})
    for name in ("questions", "pairs", "longest_cpu_minutes"):
        rows = rows.assign(**{name: column(rows, name, int, float)})
    right, wrong = ({(row.way, row.benchmark): row for row in each(rows[rows["metric"] == f"{one}_rate"])}
                    for one in ("right", "wrong"))  # fmt: skip
    keys = [(way, kind) for way in ("drawn", "planted") for kind in KINDS if {(way, kind)} <= right.keys()]
    lines = [_line(*key, right[key], wrong[key]) for key in keys]
    return (HEAD, lines) if lines else None


def _line(way: str, kind: str, right: Any, wrong: Any) -> list[str]:
    hits, misses = round(right.value * right.n), round(wrong.value * wrong.n)
    took = f"{right.longest_cpu_minutes:.1f} CPU min" if right.longest_cpu_minutes else "–"
    pairs = f"{right.pairs:.0f}" if right.pairs else "–"
    # Where nobody is guilty, nobody can be found.
    found = "–" if kind == "equal time" else str(hits)
    return [KINDS[kind], f"{right.n} {way}", found, str(misses), str(right.n - hits - misses),
            f"{right.questions:.1f}", pairs, took]  # fmt: skip
