"""Rows as `results/` holds them, made up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pandas as pd

from hybrid_kv.measure.dashboard.data import Results, load
from hybrid_kv.measure.results import COLUMNS, NO_HEAD, Head

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
RECEIPT = {"checked_before": True, "checked_after": True, "max_error": 0.0}
DEFAULTS: dict[str, Any] = {
    "schema": 1,
    "dirty": False,
    "suite": "state_update",
    "benchmark": "slots",
    "metric": "cpu_time",
    "value": 100.0,
    "unit": "ns",
    "n": 25,
    "better": "lower",
    "verdict": "",
    "baseline_commit": "",
    "device": "cpu",
    "machine": "box",
    "python": "3.11.7",
    "torch": "2.13.0",
    "triton": "3.6.0",
}


def row(run: int = 0, params: Mapping[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    """A row of the `run`-th run, a day after the one before it."""
    time = (START + timedelta(days=run)).strftime("%Y-%m-%dT%H:%M:%SZ")
    own = {
        "run_id": f"run{run:05}",
        "time_utc": time,
        "commit": f"{run:05}" * 8,
        "params": json.dumps(params or {}),
    }
    return {**DEFAULTS, **own, **values}


def history(values: Iterable[float], **same: Any) -> list[dict[str, Any]]:
    """One series, a run a day."""
    return [row(run, value=value, **same) for run, value in enumerate(values)]


def write(folder: Path, rows: list[dict[str, Any]], name: str = "made.csv") -> Path:
    """A CSV of the schema in a folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(folder / name, index=False)
    return folder


def results(folder: Path, *rows: dict[str, Any], head: Head = NO_HEAD) -> Results:
    """The rows, written and read."""
    return load(write(folder, list(rows)), head)
