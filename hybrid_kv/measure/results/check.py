"""Checks of a file of results, row by row."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_kv.measure.results.read import read_texts
from hybrid_kv.measure.results.row import Row
from hybrid_kv.measure.results.schema import COLUMNS, parse
from hybrid_kv.measure.results.store import DATASET, opened

if TYPE_CHECKING:
    import pandas as pd


def check_file(path: str | Path) -> list[str]:
    """Return the faults of a file of results, one line each.

    They are of schema, types, receipts, units, verdicts and provenance.

    Raises:
        HybridKVError: the file cannot be read or has another header.
    """
    path = Path(path)
    faults: list[str] = []
    seen: dict[tuple[str, ...], int] = {}
    for first, texts in _parts(path):
        values, wrong = parse(texts)
        rows = zip(
            *(frame.itertuples(index=False, name=None) for frame in (texts, values)), strict=True
        )
        for position, (cells, row) in enumerate(rows):
            named = dict(zip(COLUMNS, row, strict=True))
            problems = [wrong[position]] if position in wrong else list(_problems(named))
            before = seen.setdefault(cells, first + position)
            if before != first + position:
                problems.append(f"the same row as line {before}")
            faults += [f"{path} line {first + position}: {problem}" for problem in problems]
    return faults


def _parts(path: Path) -> Iterator[tuple[int, pd.DataFrame]]:
    """Yield the number of the first line and the cells of parts of a file, as a CSV has them."""
    if path.suffix != DATASET:
        yield from read_texts(path)
        return
    with opened([path]) as store:
        texts = ", ".join(f"coalesce({name}::VARCHAR, '') AS {name}" for name in COLUMNS)
        texts = texts.replace(
            "coalesce(dirty::VARCHAR, '')",
            "CASE dirty WHEN true THEN 'True' WHEN false THEN 'False' ELSE '' END",
        )
        yield 1, store.answer(f"SELECT {texts} FROM rows ORDER BY place, line")


_FORMS = {
    "run_id": r"[0-9a-f]{12}",
    "commit": r"([0-9a-f]{40})?",
    "baseline_commit": r"([0-9a-f]{40}(-dirty)?)?",
    **dict.fromkeys(
        ("suite", "benchmark", "metric", "device", "machine", "python", "torch"), r".*\S.*"
    ),
}


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    for name, form in _FORMS.items():
        if not re.fullmatch(form, values[name]):
            yield f"{name} holds {values[name]!r}"
    low = values["ci_low"]
    high = values["ci_high"]
    if math.isnan(low) != math.isnan(high) or low > high:
        yield f"{low} to {high} is not an interval"
    params = json.loads(values["params"])
    folders = [param for param in _texts(params) if re.match(r"/|~|[A-Za-z]:\\", param)]
    if folders:
        yield f"params names a place on a machine: {folders[0]!r}"
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
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
