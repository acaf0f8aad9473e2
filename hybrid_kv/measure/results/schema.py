"""The columns of a row, their kinds, and the units; `docs/results.md` gives their meaning.

A cell that its column does not take makes the whole file unreadable, so that readers can rely on
every cell.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_kv.errors import HybridKVError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
TIME_UNITS = ("ns", "us", "ms", "s", "time ratio", "GB/s")
# Another one is added here, so that no timing hides behind its own spelling of "seconds".
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
    "drafts",
    "instructions",
    "launches",
}
UNITS |= {
    "logit",
    "modules",
    "operations",
    "packages",
    "patterns",
    "questions",
    "registers",
    "requests",
    "settings",
}
UNITS |= {"allocations", "copies", "share", "tokens", "views", "waits"}
BETTER = ("lower", "higher", "equal")
VERDICTS = ("pass", "fail", "void", "")
MAX_COUNT = 2**63 - 1
MAX_DEPTH = 20  # of the brackets in params


@dataclass(frozen=True)
class ColumnKind:
    """The kind of a column's cells.

    Attributes:
        takes: what fits, for an error message.
        parse: a cell's text as a value; raises ValueError, KeyError or RecursionError for what does
            not fit.
        dtype: of the column in pandas.
        parquet: its type in Parquet.
    """

    takes: str
    parse: Callable[[str], Any]
    dtype: str = "object"
    parquet: str = "VARCHAR"


def _printable(cell: str) -> str:
    if not cell.isprintable():
        raise ValueError
    return cell


def _whole(cell: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", cell) or int(cell) > MAX_COUNT:
        raise ValueError
    return int(cell)


def _finite(cell: str) -> float:
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", cell) or math.isinf(
        float(cell)
    ):
        raise ValueError
    return float(cell)


def _bound(cell: str) -> float:
    return _finite(cell) if cell else math.nan


def _moment(cell: str) -> str:
    if not re.fullmatch(r"2[01]\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", cell, re.ASCII):
        raise ValueError
    datetime.fromisoformat(cell[:-1])
    return cell


def _among(*choices: str) -> Callable[[str], str]:
    return {choice: choice for choice in choices}.__getitem__


def _refused(constant: str) -> None:
    raise ValueError(f"params hold {constant}")


def _of_64_bits(digits: str) -> int:
    if abs(int(digits)) > MAX_COUNT:
        raise ValueError("params hold an integer of more than 64 bits")
    return int(digits)


@lru_cache(maxsize=4096)
def check_params(params: str) -> str:
    """Return the params, if they are a JSON object that every reader can hold.

    That is: not deep, finite, of 64 bits, Unicode.

    Raises:
        ValueError, RecursionError: it is not.
    """
    value = json.loads(params, parse_constant=_refused, parse_float=_finite, parse_int=_of_64_bits)
    json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    brackets = re.sub(r'"(\\.|[^"\\])*"', "", params)
    depth = max(accumulate((letter in "[{") - (letter in "]}") for letter in brackets))
    if not isinstance(value, dict) or depth > MAX_DEPTH:
        raise ValueError(f"params are no JSON object of at most {MAX_DEPTH} levels")
    return params


_COUNT = ColumnKind(f"a whole number from 0 to {MAX_COUNT}", _whole, "int64", "BIGINT")
_TEXT = ColumnKind("printable text", _printable)
_BOUND = ColumnKind("a finite number or nothing", _bound, "float64", "DOUBLE")
# docs/results.md says what each column means.
KINDS = {
    "schema": ColumnKind(
        f"{SCHEMA}, which this version reads", {str(SCHEMA): SCHEMA}.__getitem__, "int64", "BIGINT"
    ),
    "run_id": _TEXT,
    "time_utc": ColumnKind(
        "a UTC time of the years 2000 to 2199, such as 2026-11-21T06:02:47Z", _moment
    ),
    "commit": _TEXT,
    "dirty": ColumnKind(
        "True or False", {"True": True, "False": False}.__getitem__, "bool", "BOOLEAN"
    ),
    "suite": _TEXT,
    "benchmark": _TEXT,
    "params": ColumnKind(
        f"a JSON object at most {MAX_DEPTH} levels deep, its numbers finite and of 64 bits",
        check_params,
    ),
    "metric": _TEXT,
    "value": ColumnKind("a finite number", _finite, "float64", "DOUBLE"),
    "unit": ColumnKind(
        "a unit of hybrid_kv.measure.results.UNITS; add it there unless it is a time",
        _among(*UNITS),
    ),
    "ci_low": _BOUND,
    "ci_high": _BOUND,
    "n": _COUNT,
    "better": ColumnKind("lower, higher or equal", _among(*BETTER)),
    "verdict": ColumnKind("pass, fail, void or nothing", _among(*VERDICTS)),
    "baseline_commit": _TEXT,
    "device": _TEXT,
    "machine": _TEXT,
    "python": _TEXT,
    "torch": _TEXT,
    "triton": _TEXT,
}
COLUMNS = tuple(KINDS)
HEADER = (",".join(COLUMNS) + "\n").encode()


def check_header(path: Path, head: bytes) -> None:
    """Refuse another file; nothing, or the start of an unfinished header, is fine."""
    if HEADER.startswith(head):
        return
    names = head.decode("utf-8", "replace").split("\n")[0].split(",")
    for position, name in enumerate(COLUMNS):
        if position >= len(names) or names[position] != name:
            other = repr(names[position]) if position < len(names) else "nothing"
            raise HybridKVError(
                f"{path}: column {position + 1} must be {name!r}, found {other}; is it another "
                "file?"
            )
    if len(names) > len(COLUMNS):
        raise HybridKVError(
            f"{path}: column {len(COLUMNS) + 1} {names[len(COLUMNS)]!r} is not in schema {SCHEMA}"
        )


@lru_cache(maxsize=4096)
def unfit(name: str, cell: str | None) -> str:
    """Return why a column cannot have a cell, None being no text; empty: it can."""
    try:
        if cell is not None:
            KINDS[name].parse(cell)
            return ""
    except (ValueError, KeyError, RecursionError):
        pass
    shown = f"{cell[:60]}…" if cell and len(cell) > 60 else cell
    return f"column {name!r} holds {shown!r}; it takes {KINDS[name].takes}"


def parse(texts: pd.DataFrame) -> tuple[pd.DataFrame, dict[int, str]]:
    """Return the values of rows of text, and by position the faults of rows.

    The values of a row with a fault mean nothing.
    """
    import numpy as np
    import pandas as pd

    columns = {}
    wrong = dict[int, str]()
    for name, kind in KINDS.items():
        codes, uniques = pd.factorize(texts[name])
        values = []
        bad = {}
        for code, cell in enumerate(uniques):
            try:
                values.append(kind.parse(cell))
            except (ValueError, KeyError, RecursionError):
                values.append(0)
                bad[code] = unfit(name, cell)
        columns[name] = pd.Series(np.array(values, dtype=kind.dtype)[codes], dtype=kind.dtype)
        for position in np.flatnonzero(np.isin(codes, list(bad))) if bad else ():
            wrong.setdefault(int(position), bad[int(codes[position])])
    return pd.DataFrame(columns), wrong
