"""Say what is wrong with a file of results, row by row."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hybrid_kv.errors import HybridKVError
from hybrid_kv.results.read import read_lines
from hybrid_kv.results.row import Row
from hybrid_kv.results.schema import COLUMNS, parsed
from hybrid_kv.results.store import DATASET, NAMES, opened


def check_file(path: str | Path) -> list[str]:
    """What is wrong with a file of results, one line each: schema, types, receipts, units, verdicts, provenance.

    Raises:
        HybridKVError: the file cannot be read or has another header.
    """
    path = Path(path)
    found: list[str] = []
    seen: dict[tuple[str, ...], int] = {}
    for number, texts in _lines(path):
        try:
            values = dict(zip(COLUMNS, parsed(path, number, texts), strict=True))
        except HybridKVError as error:
            found.append(str(error))
            continue
        found += [f"{path} line {number}: {problem}" for problem in _problems(values)]
        if (first := seen.setdefault(tuple(texts), number)) != number:
            found.append(f"{path} line {number}: the same row as line {first}")
    return found


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of every row, as a CSV has them."""
    if path.suffix != DATASET:
        yield from read_lines(path)
        return
    with opened([path]) as store:
        for number, row in enumerate(store.records(f"SELECT {NAMES} FROM rows ORDER BY place, line"), 1):
            yield number, ["" if value is None else str(value) for value in row.values()]


_FORMS = {
    "run_id": r"[0-9a-f]{12}",
    "commit": r"([0-9a-f]{40})?",
    "baseline_commit": r"([0-9a-f]{40}(-dirty)?)?",
    **dict.fromkeys(("suite", "benchmark", "metric", "device", "machine", "python", "torch"), r".*\S.*"),
}


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    for name, form in _FORMS.items():
        if not re.fullmatch(form, values[name]):
            yield f"{name} holds {values[name]!r}"
    low, high = values["ci_low"], values["ci_high"]
    if math.isnan(low) != math.isnan(high) or low > high:
        yield f"{low} to {high} is no interval"
    params = json.loads(values["params"])
    if folder := next((text for text in _texts(params) if re.match(r"/|~|[A-Za-z]:\\", text)), None):
        yield f"params names a place on a machine: {folder!r}"
    try:
        row = Row(**{**{f.name: values[f.name] for f in fields(Row)}, "params": params})
        if row.params_json != values["params"]:
            yield f"params are not compact JSON with sorted keys: {values['params']!r}"
    except (ValueError, TypeError) as error:
        yield str(error)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)
