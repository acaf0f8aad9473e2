"""Selection and printing of rows for `hybrid-kv results`."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hybrid_kv.errors import HybridKVError
from hybrid_kv.measure.results.schema import COLUMNS
from hybrid_kv.measure.results.store import DATASET, NAMES, Store

Record = dict[str, Any]  # a row by its columns; a bound that is not there is None


def result_files(places: Sequence[Path]) -> list[Path]:
    """Return the CSVs and data sets among `places`, and those in the folders among them.

    Raises:
        HybridKVError: a place does not exist, or there is no file at all.
    """
    files: list[Path] = []
    for place in places:
        if not place.exists():
            raise HybridKVError(f"{place} does not exist; name a CSV or a folder of them")
        if place.is_dir() and place.suffix != DATASET:
            files += sorted([*place.glob("*.csv"), *place.glob(f"*{DATASET}")])
        else:
            files.append(place)
    if not files:
        raise HybridKVError(f"no .csv in {', '.join(map(str, places))}")
    return files


_CONDITIONS = {
    "suite": "suite = ?",
    "metric": "contains(lower(metric), lower(?))",
    "machine": "contains(lower(machine), lower(?))",
    "device": "contains(lower(device), lower(?))",
    "commit": "starts_with(commit, lower(?))",
    "since": "time_utc >= ?",
}


def select_rows(
    store: Store, select: Sequence[str] = (), last: int | None = None, **texts: str | None
) -> Iterator[Record]:
    """Yield rows that fit everything that is not None, oldest first.

    Args:
        select: parts of `suite/benchmark`; one of them is enough.
        last: only so many rows, the newest.
        texts: for `_CONDITIONS`; `since` is a day or moment in UTC, such as 2026-11-21 or
            2026-11-21T06:00:00Z.

    Raises:
        HybridKVError: `since` is not a moment, or `last` is less than 1.
    """
    given = {name: value for name, value in texts.items() if value is not None}
    if "since" in given:
        given["since"] = _moment(given["since"])
    parts = (
        " OR ".join(["contains(lower(suite || '/' || benchmark), lower(?))"] * len(select))
        or "true"
    )
    chosen = (
        "SELECT * FROM rows WHERE "
        f"{' AND '.join([f'({parts})', *(_CONDITIONS[name] for name in given)])}"
    )
    if last is not None and last < 1:
        raise HybridKVError(f"--last {last} must be at least 1")
    if last is not None:
        chosen += f" ORDER BY time_utc DESC, place DESC, line DESC LIMIT {min(last, 2**62)}"
    query = f"SELECT {NAMES} FROM ({chosen}) ORDER BY time_utc, place, line"
    return store.records(query, [*select, *given.values()])


def _moment(day: str) -> str:
    try:
        moment = datetime.fromisoformat(day.replace("Z", "+00:00"))
        moment = (
            moment.replace(tzinfo=timezone.utc)
            if moment.tzinfo is None
            else moment.astimezone(timezone.utc)
        )
    except (ValueError, OverflowError):  # A zone can lead out of the years 1 to 9999.
        raise HybridKVError(
            f"--since {day} is not a moment; write 2026-11-21 or 2026-11-21T06:00:00Z"
        ) from None
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def documents(rows: Iterable[Record]) -> list[Record]:
    """Return an object per row, for JSON; `params` is an object too."""
    return [{**row, "params": json.loads(row["params"])} for row in rows]


def _shown(value: object) -> str:
    """Return a value as it is, or as JSON if a terminal would obey it."""
    return str(value) if str(value).isprintable() else json.dumps(value)


def print_csv(rows: Iterable[Record]) -> None:
    """Print the rows as a CSV of the schema."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(row.values() for row in rows)


def print_rows(rows: Iterable[Record]) -> None:
    """Print the rows for people: a paragraph per benchmark of a run, a line per metric."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for row in rows:
        groups.setdefault(
            (row["run_id"], row["suite"], row["benchmark"], row["params"]), []
        ).append(row)
    for group in groups.values():
        first = group[0]
        params = {
            name: value for name, value in json.loads(first["params"]).items() if name != "receipt"
        }
        commit = (first["commit"][:10] or "no commit") + "*" * first["dirty"]
        print(
            f"{first['time_utc']}  {commit}  {first['suite']}: {first['benchmark']}  "
            f"{first['device']}"
        )
        print("  " + ", ".join(f"{name}={_shown(value)}" for name, value in params.items()))
        width = max(len(row["metric"]) for row in group)
        for row in group:
            ends = row["ci_low"], row["ci_high"]
            bounds = "" if None in ends else f"  {ends[0]:.4g} to {ends[1]:.4g}"
            value = f"{row['value']:.6g} {row['unit']}".rstrip()
            verdict = f"  {row['verdict']}" if row["verdict"] else ""
            print(f"  {row['metric']:<{width}}  {value}{bounds}  (n={row['n']}){verdict}")
    count = sum(map(len, groups.values()))
    print(f"{count} row{'s' * (count != 1)}")
