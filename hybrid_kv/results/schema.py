"""The columns of a row, what each may hold, and the units there are. `docs/results.md` has them as a table.

A cell that its column does not take makes the whole file unreadable: no reader has to think of it again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from hybrid_kv.errors import HybridKVError

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
BETTER = ("lower", "higher", "equal")
VERDICTS = ("pass", "fail", "void", "")
MAX_COUNT = 2**63 - 1
MAX_DEPTH = 20  # of the brackets in params


@dataclass(frozen=True)
class Kind:
    """What the cells of a column are.

    Attributes:
        name: of the type, for people.
        takes: what fits, for an error message.
        parse: a cell's text as a value; raises ValueError, KeyError or RecursionError for what does not fit.
    """

    name: str
    takes: str
    parse: Callable[[str], Any]


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        unit: of its values; empty: none.
        example: a cell that fits.
    """

    name: str
    kind: Kind
    meaning: str
    example: str
    unit: str = ""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError
    return text


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > MAX_COUNT:
        raise ValueError
    return int(text)


def _finite(text: str) -> float:
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text) or math.isinf(float(text)):
        raise ValueError
    return float(text)


def _bound(text: str) -> float:
    return _finite(text) if text else math.nan


def _moment(text: str) -> str:
    if not re.fullmatch(r"2[01]\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", text, re.ASCII):
        raise ValueError
    datetime.fromisoformat(text[:-1])
    return text


def _among(*texts: str) -> Callable[[str], str]:
    return {text: text for text in texts}.__getitem__


@lru_cache(maxsize=4096)
def check_params(text: str) -> str:
    """The text itself, if it is a JSON object that every reader can hold: not deep, finite, of 64 bits, Unicode.

    Raises:
        ValueError, RecursionError: it is not.
    """
    level: list[Any] = [json.loads(text)]
    if not isinstance(level[0], dict):
        raise ValueError("params are no JSON object")
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return text
        level = [_child for one in level for _child in _children(one)]
    raise ValueError(f"params are more than {MAX_DEPTH} levels deep")


def _children(value: Any) -> list[Any]:
    """What an object or a list holds; anything else is checked."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"params hold {value}")
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        raise ValueError("params hold an integer of more than 64 bits")
    if isinstance(value, str):
        value.encode()  # Half of a surrogate pair is no text.
    return []


TEXT = Kind("text", "printable text", _printable)
COUNT = Kind("integer", f"a whole number from 0 to {MAX_COUNT}", _whole)
NUMBER = Kind("number", "a finite number", _finite)
BOUND = Kind("number or nothing", "a finite number or nothing", _bound)
TIME = Kind("UTC time", "a UTC time of the years 2000 to 2199, such as 2026-11-21T06:02:47Z", _moment)
FLAG = Kind("flag", "True or False", {"True": True, "False": False}.__getitem__)
PARAMS = Kind(
    "JSON object",
    f"a JSON object at most {MAX_DEPTH} levels deep, its numbers finite and of 64 bits",
    check_params,
)
UNIT = Kind("unit", "a unit of hybrid_kv.results.UNITS; add it there if it is no time", _among(*UNITS))

SCHEMA_COLUMNS = (
    Column("schema", COUNT, "Version of these columns.", "1"),
    Column("run_id", TEXT, "The same for all rows of one process.", "14ffc6c09624"),
    Column("time_utc", TIME, "When the row was written.", "2026-11-21T06:04:26Z"),
    Column(
        "commit", TEXT, "What was measured; empty for an installed package.", "8a89dd635bef6d27f12f306b1e34b79852f72011"
    ),
    Column("dirty", FLAG, "The tree had changes that the commit has not.", "False"),
    Column("suite", TEXT, "The command or the file of `bench/` that measured.", "state_update"),
    Column("benchmark", TEXT, "What was measured: a kernel, a task, a check of the guard.", "slots"),
    Column(
        "params", PARAMS, "The case: shapes, modes, subjects. A timing's `receipt` is here.", '{"K":3,"num_reqs":16}'
    ),
    Column("metric", TEXT, "A key that never changes; the report makes prose of it.", "cpu_time"),
    Column("value", NUMBER, "The figure: a median for timings.", "6790.4", "as `unit`"),
    Column("unit", UNIT, "Of `value` and its interval; empty for a plain number.", "ns"),
    Column("ci_low", BOUND, "Lower end of the 95 % interval.", "6710.2", "as `unit`"),
    Column("ci_high", BOUND, "Upper end of the 95 % interval.", "6880.0", "as `unit`"),
    Column("n", COUNT, "How many rounds, questions or requests the figure is of.", "25"),
    Column("better", Kind("word", "lower, higher or equal", _among(*BETTER)), "Which way is better.", "lower"),
    Column(
        "verdict",
        Kind("word", "pass, fail, void or nothing", _among(*VERDICTS)),
        "Of a check; `void`: it did not see what it must see, so it has not passed.",
        "pass",
    ),
    Column("baseline_commit", TEXT, "What it was compared with; ends in `-dirty` for a changed tree.", ""),
    Column("device", TEXT, "The GPU, or `cpu`.", "NVIDIA H200"),
    Column("machine", TEXT, "CPU model and cores, never a host's name.", "AMD EPYC x2"),
    Column("python", TEXT, "Version of Python.", "3.11.7"),
    Column("torch", TEXT, "Version of torch.", "2.13.0+cpu"),
    Column("triton", TEXT, "Version of Triton; empty without it.", "3.7.1"),
)
COLUMNS = tuple(column.name for column in SCHEMA_COLUMNS)
HEADER = (",".join(COLUMNS) + "\n").encode()


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


def parsed(path: Path, number: int, texts: list[str]) -> list[Any]:
    """The values of a line's cells.

    Raises:
        HybridKVError: one does not fit its column; with the file, the line, the cell and what fits.
    """
    if len(texts) != len(COLUMNS):
        raise HybridKVError(f"{path} line {number}: {len(texts)} fields instead of {len(COLUMNS)}")
    values: list[Any] = []
    for column, text in zip(SCHEMA_COLUMNS, texts, strict=True):
        try:
            values.append(column.kind.parse(text))
        except (ValueError, KeyError, RecursionError):
            cell = repr(text if len(text) <= 60 else text[:60] + "…")
            raise HybridKVError(
                f"{path} line {number}: column {column.name!r} holds {cell}; it takes {column.kind.takes}"
            ) from None
    if values[0] != SCHEMA:
        raise HybridKVError(f"{path} line {number}: column 'schema' holds {values[0]}, this version reads {SCHEMA}")
    return values
