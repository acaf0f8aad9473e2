"""Read a CSV of results, and say what is wrong with one."""

from __future__ import annotations

import csv
import fcntl
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_kv.config import HybridKVError
from hybrid_kv.files import refuse_device
from hybrid_kv.results.row import Row
from hybrid_kv.results.schema import COLUMNS, check_header, parsed

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger("hybrid_kv.results")


def _read_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of every line but the header; a torn last line is left out with a warning."""
    refuse_device(path)
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # No line of a writer that is at work looks torn.
            data = file.read()
    except OSError as error:
        raise HybridKVError(f"results cannot be read from {path}: {error.strerror}") from None
    check_header(path, data[:4096])
    whole = data[: data.rfind(b"\n") + 1]
    if not whole:
        raise HybridKVError(f"{path} is empty: column 1 must be {COLUMNS[0]!r}; is it another file?")
    try:
        for number, line in enumerate(whole.decode().split("\n")[1:-1], 2):
            yield number, next(csv.reader([line], strict=True), [])
    except UnicodeDecodeError as error:
        raise HybridKVError(f"{path} is no text: byte {error.start} is not UTF-8") from None
    except csv.Error as error:
        raise HybridKVError(f"{path} line {number}: {error}") from None
    if len(whole) < len(data):
        _log.warning("%s: a last line without an end is left out; the next append cuts it off", path)


def read_rows(path: str | Path) -> pd.DataFrame:
    """All rows of a file, in the order in which they were appended.

    Raises:
        HybridKVError: the file cannot be read, has another header, or a line that does not fit the schema.
    """
    import pandas as pd

    path = Path(path)
    rows = [parsed(path, number, texts) for number, texts in _read_lines(path)]
    numbers = dict.fromkeys(("value", "ci_low", "ci_high"), "float64")
    types = {"schema": "int64", "dirty": "bool", "n": "int64", **numbers}
    columns = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
    frame = pd.DataFrame({name: list(values) for name, values in zip(COLUMNS, columns, strict=True)})
    return frame.astype({name: types.get(name, "str") for name in COLUMNS})


def check_file(path: str | Path) -> list[str]:
    """What is wrong with a file of results, one line each: schema, types, receipts, units, verdicts, provenance.

    Raises:
        HybridKVError: the file cannot be read or has another header.
    """
    path = Path(path)
    found: list[str] = []
    seen: dict[tuple[str, ...], int] = {}
    for number, texts in _read_lines(path):
        try:
            values = dict(zip(COLUMNS, parsed(path, number, texts), strict=True))
        except HybridKVError as error:
            found.append(str(error))
            continue
        found += [f"{path} line {number}: {problem}" for problem in _problems(values)]
        if (first := seen.setdefault(tuple(texts), number)) != number:
            found.append(f"{path} line {number}: the same row as line {first}")
    return found


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
