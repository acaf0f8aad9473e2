"""The columns of a row, what each may hold, and the units there are."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from hybrid_kv.config import HybridKVError

SCHEMA = 1
COLUMNS = (
    "schema",
    "run_id",
    "time_utc",
    "commit",
    "dirty",
    "suite",
    "benchmark",
    "params",
    "metric",
    "value",
    "unit",
    "ci_low",
    "ci_high",
    "n",
    "better",
    "verdict",
    "baseline_commit",
    "device",
    "machine",
    "python",
    "torch",
    "triton",
)
HEADER = (",".join(COLUMNS) + "\n").encode()
TIME_UNITS = ("ns", "us", "ms", "s", "time ratio", "GB/s")
# `check_file` knows these; another one is added here, so that no timing hides behind its own spelling of "seconds".
UNITS = {
    *TIME_UNITS,
    "",
    "1/B",
    "B",
    "MHz",
    "alarms",
    "answers",
    "bit",
    "blocks",
    "instructions",
    "launches",
    "logit",
    "modules",
    "operations",
    "packages",
    "patterns",
    "questions",
    "registers",
    "requests",
    "settings",
    "share",
    "tokens",
    "views",
}


def check_header(path: Path, head: bytes) -> None:
    """Refuse another file; nothing, or the start of a header that was not written to its end, is fine."""
    if HEADER.startswith(head):
        return
    found = head.decode("utf-8", "replace").split("\n")[0].split(",")
    for position, name in enumerate(COLUMNS):
        if position >= len(found) or found[position] != name:
            other = repr(found[position]) if position < len(found) else "nothing"
            raise HybridKVError(f"{path}: column {position + 1} must be {name!r}, found {other}; is it another file?")
    if len(found) > len(COLUMNS):
        raise HybridKVError(f"{path}: column {len(COLUMNS) + 1} {found[len(COLUMNS)]!r} is not in schema {SCHEMA}")


def _flag(text: str) -> bool:
    return {"True": True, "False": False}[text]


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _bound(text: str) -> float:
    bound = float(text or "nan")
    if math.isinf(bound):
        raise ValueError
    return bound


def _moment(text: str) -> str:
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", text):
        raise ValueError
    datetime.fromisoformat(text[:-1])
    return text


@lru_cache(maxsize=4096)
def _json_object(text: str) -> str:
    if not isinstance(json.loads(text), dict):
        raise ValueError
    return text


# A text that none of these takes makes the whole file unreadable: no reader has to think of it again.
_PARSERS: dict[str, Callable[[str], Any]] = {
    "schema": int,
    "time_utc": _moment,
    "dirty": _flag,
    "params": _json_object,
    "value": _finite,
    "ci_low": _bound,
    "ci_high": _bound,
    "n": int,
}
_PARSED = [(position, name) for position, name in enumerate(COLUMNS) if name in _PARSERS]


def parsed(path: Path, number: int, texts: list[str]) -> list[Any]:
    if len(texts) != len(COLUMNS):
        raise HybridKVError(f"{path} line {number}: {len(texts)} fields instead of {len(COLUMNS)}")
    values: list[Any] = list(texts)
    for position, name in _PARSED:
        try:
            values[position] = _PARSERS[name](texts[position])
        except (ValueError, KeyError):
            raise HybridKVError(f"{path} line {number}: column {name!r} holds {texts[position]!r}") from None
    if values[0] != SCHEMA:
        raise HybridKVError(f"{path} line {number}: column 'schema' holds {values[0]}, this version reads {SCHEMA}")
    return values
