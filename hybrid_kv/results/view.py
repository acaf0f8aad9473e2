"""Choose rows of results and show them: what `hybrid-kv results` does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_kv.config import HybridKVError

if TYPE_CHECKING:
    import pandas as pd


def result_files(places: Sequence[Path]) -> list[Path]:
    """The files among `places` and the CSVs of the folders among them.

    Raises:
        HybridKVError: a place does not exist, or there is no file at all.
    """
    files: list[Path] = []
    for place in places:
        if not place.exists():
            raise HybridKVError(f"{place} does not exist; name a CSV or a folder of them")
        files += sorted(place.glob("*.csv")) if place.is_dir() else [place]
    if not files:
        raise HybridKVError(f"no .csv in {', '.join(map(str, places))}")
    return files


def select_rows(
    frame: pd.DataFrame,
    *,
    select: Sequence[str] | None = None,
    equal: Mapping[str, str | None] | None = None,
    containing: Mapping[str, str | None] | None = None,
    commit: str | None = None,
    since: str | None = None,
    last: int | None = None,
) -> pd.DataFrame:
    """Rows that fit everything that is not None, oldest first.

    Args:
        frame: rows of one or more files.
        select: parts of `suite/benchmark`; one of them is enough.
        equal: column to its whole text.
        containing: column to a part of its text, in upper or lower case.
        commit: the start of a commit hash.
        since: a day or moment in UTC, such as 2026-11-21 or 2026-11-21T06:00:00Z.
        last: only so many rows, the newest.

    Raises:
        HybridKVError: `since` is no moment, or `last` is less than 1.
    """
    if select:
        names = (frame["suite"] + "/" + frame["benchmark"]).str.lower()
        frame = frame[[any(part.lower() in name for part in select) for name in names]]
    for name, text in (equal or {}).items():
        if text is not None:
            frame = frame[frame[name] == text]
    for name, text in (containing or {}).items():
        if text is not None:
            frame = frame[frame[name].str.lower().str.contains(text.lower(), regex=False)]
    if commit is not None:
        frame = frame[frame["commit"].str.startswith(commit.lower())]
    if since is not None:
        try:
            moment = datetime.fromisoformat(since.replace("Z", "+00:00"))
            moment = moment.replace(tzinfo=timezone.utc) if moment.tzinfo is None else moment.astimezone(timezone.utc)
        except (ValueError, OverflowError):  # A zone can lead out of the years 1 to 9999.
            raise HybridKVError(f"--since {since} is no moment; write 2026-11-21 or 2026-11-21T06:00:00Z") from None
        frame = frame[frame["time_utc"] >= moment.strftime("%Y-%m-%dT%H:%M:%SZ")]
    frame = frame.sort_values("time_utc", kind="stable")
    if last is not None:
        if last < 1:
            raise HybridKVError(f"--last {last} must be at least 1")
        frame = frame.tail(min(last, len(frame)))
    return frame


def documents(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """For JSON, an object per row; `params` is an object too, a bound that is not there is null."""
    rows: list[Any] = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{**row, "params": json.loads(row["params"])} for row in rows]


def _shown(value: object) -> str:
    """A value as it is, or as JSON if a terminal would obey it."""
    return text if (text := str(value)).isprintable() else json.dumps(value)


def print_rows(frame: pd.DataFrame) -> None:
    """The rows for people, on stdout: a paragraph for each benchmark of a run, a line for each metric."""
    keys = ["run_id", "suite", "benchmark", "params"]
    for _, group in frame.groupby(keys, sort=False):
        first = group.iloc[0]
        params = {name: value for name, value in json.loads(first["params"]).items() if name != "receipt"}
        commit = (first["commit"][:10] or "no commit") + "*" * bool(first["dirty"])
        print(f"{first['time_utc']}  {commit}  {first['suite']}: {first['benchmark']}  {first['device']}")
        print("  " + ", ".join(f"{name}={_shown(value)}" for name, value in params.items()))
        width = max(map(len, group["metric"]))
        for row in group.to_dict("records"):
            bounds = "" if math.isnan(row["ci_low"]) else f"  {row['ci_low']:.4g} to {row['ci_high']:.4g}"
            value = f"{row['value']:.6g} {row['unit']}".rstrip()
            verdict = f"  {row['verdict']}" if row["verdict"] else ""
            print(f"  {row['metric']:<{width}}  {value}{bounds}  (n={row['n']}){verdict}")
    print(f"{len(frame)} row{'s' * (len(frame) != 1)}")
