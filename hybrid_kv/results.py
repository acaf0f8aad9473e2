"""Append-only rows of measurements: one CSV, one schema, and no timing without proof that its result was right.

A row's `params` is compact JSON with sorted keys. A timing (a unit of time, or a ratio of times) can only be built by
`timing_row`, which asks for a `Receipt` and stores it in `params` under `receipt`; `Row` refuses a timing without one,
so "fast but wrong" cannot be written, and the proof travels with the number.

A row is a line and a line a row, so that a writer killed in the middle leaves at most one line without an end; readers
leave it out, the next writer cuts it off. Writers take turns by `flock` on the file itself, which the kernel releases
when one dies; `O_APPEND` alone would not do, because a write may be split. There is no fsync: what a write has handed
to the kernel outlives the process, only a crash of the whole machine could lose it, and an fsync per row (milliseconds)
would cost more than most measurements.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import logging
import math
import os
import platform
import re
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybrid_kv.config import HybridKVError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
COLUMNS = tuple(
    [
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
    ]
)
TIME_UNITS = ("ns", "us", "ms", "s", "time ratio", "GB/s")
# `check_file` knows these; another one is added here, so that no timing hides behind its own spelling of "seconds".
UNITS = {*TIME_UNITS, "", "1/B", "B", "alarms", "answers", "bit", "blocks", "instructions", "logit", "modules"}
UNITS |= {
    "launches",
    "operations",
    "packages",
    "patterns",
    "questions",
    "registers",
    "requests",
    "settings",
    "share",
    "tokens",
}
UNITS |= {"views"}
_HEADER = (",".join(COLUMNS) + "\n").encode()
_log = logging.getLogger("hybrid_kv.results")
_REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Receipt:
    """Proof that a timed result was right: compared with its reference before and after the timing."""

    checked_before: bool
    checked_after: bool
    max_error: float

    def __post_init__(self) -> None:
        if not (self.checked_before and self.checked_after):
            raise ValueError("a timing must be checked before and after it was taken")
        if not math.isfinite(self.max_error) or self.max_error < 0:
            raise ValueError(f"max_error={self.max_error} proves nothing")


@dataclass(frozen=True)
class Provenance:
    """Where a run's numbers come from; the same for all rows of a run."""

    run_id: str
    commit: str
    dirty: bool
    device: str
    machine: str
    python: str
    torch: str
    triton: str


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(("git", *arguments), cwd=_REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _commit() -> str:
    """HEAD of the checkout this package lies in; empty for an installed package, also inside another checkout."""
    top = _git("rev-parse", "--show-toplevel")
    return (_git("rev-parse", "HEAD") or "") if top and Path(top).resolve() == _REPOSITORY else ""


def _machine() -> str:
    """CPU model and cores, never the host's name; `HYBRID_KV_MACHINE` replaces it."""
    if name := os.environ.get("HYBRID_KV_MACHINE"):
        return " ".join(name.split())
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model} x{os.cpu_count()}"


@cache
def provenance() -> Provenance:
    """Gathered once per process, so that a run has one `run_id`."""
    commit = _commit()
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = ""
    return Provenance(
        run_id=uuid.uuid4().hex[:12],
        commit=commit,
        dirty=bool(commit and _git("status", "--porcelain", "--", ".", ":!results")),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        machine=_machine(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=triton,
    )


@dataclass(frozen=True)
class Row:
    """One measurement. `better` is `lower`, `higher` or `equal`; `verdict` is `pass`, `fail`, `void` or empty."""

    suite: str
    benchmark: str
    metric: str
    value: float
    unit: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    ci_low: float | None = None
    ci_high: float | None = None
    n: int = 1
    better: str = "equal"
    verdict: str = ""
    baseline_commit: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"{self.benchmark} {self.metric}={self.value} is no measurement")
        if any(bound is not None and math.isinf(bound) for bound in (self.ci_low, self.ci_high)):
            raise ValueError(f"{self.benchmark} {self.metric}: {self.ci_low} to {self.ci_high} is no interval")
        if self.better not in ("lower", "higher", "equal"):
            raise ValueError(f"better={self.better!r}; use lower, higher or equal")
        if self.verdict not in ("pass", "fail", "void", ""):
            raise ValueError(f"verdict={self.verdict!r}; use pass, fail, void or nothing")
        for name in ("suite", "benchmark", "metric", "unit", "baseline_commit"):
            if not (text := getattr(self, name)).isprintable():
                raise ValueError(f"{name}={text!r} holds a line break or another sign that cannot be printed")
        _ = self.params_json  # What no JSON can hold, such as NaN, is refused now and not when the row is written.
        if self.unit in TIME_UNITS:
            proof = self.params.get("receipt")
            if not isinstance(proof, Mapping):
                raise ValueError(f"{self.benchmark} {self.metric} is a timing without a receipt; use timing_row")
            Receipt(**proof)

    @property
    def params_json(self) -> str:
        return json.dumps(self.params, sort_keys=True, separators=(",", ":"), allow_nan=False)


def timing_row(*, receipt: Receipt, params: Mapping[str, Any] | None = None, **values: Any) -> Row:
    """A `Row` whose unit is a unit of time or `time ratio`, with the proof of its result in `params`."""
    proof = {f.name: getattr(receipt, f.name) for f in fields(receipt)}
    if values.get("unit") not in TIME_UNITS:
        raise ValueError(f"unit={values.get('unit')!r} is not a timing; use one of {', '.join(TIME_UNITS)}")
    return Row(params={**(params or {}), "receipt": proof}, **values)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, made if there is none, for one writer at a time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise HybridKVError(f"results cannot be written to {path}: {error.strerror}; choose another file") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    except OSError as error:
        raise HybridKVError(f"results cannot be written to {path}: {error.strerror}") from None
    finally:
        os.close(descriptor)


def check_writable(path: str | Path) -> None:
    """Raise now what `append_rows` would raise after the work: an unwritable folder, a file of another schema."""
    path = Path(path)
    existed = path.exists()
    with _locked(path) as descriptor:
        _check_header(path, os.pread(descriptor, 4096, 0))
    if not existed and path.stat().st_size == 0:
        path.unlink()


def _check_header(path: Path, head: bytes) -> None:
    """Refuse another file; nothing, or the start of a header that was not written to its end, is fine."""
    if _HEADER.startswith(head):
        return
    found = head.decode("utf-8", "replace").split("\n")[0].split(",")
    for position, name in enumerate(COLUMNS):
        if position >= len(found) or found[position] != name:
            other = repr(found[position]) if position < len(found) else "nothing"
            raise HybridKVError(f"{path}: column {position + 1} must be {name!r}, found {other}; is it another file?")
    if len(found) > len(COLUMNS):
        raise HybridKVError(f"{path}: column {len(COLUMNS) + 1} {found[len(COLUMNS)]!r} is not in schema {SCHEMA}")


def append_rows(path: str | Path, rows: Sequence[Row], *, commit: str | None = None) -> None:
    """Append rows, each once, none between those of another process; all of them, or none when writing fails.

    A last line without an end is cut off first, with a warning. A process killed while it appends leaves whole rows.

    Args:
        commit: what was measured, where that is not the checkout's HEAD.

    Raises:
        HybridKVError: the file cannot be written or has another header.
    """
    path = Path(path)
    data = _encoded(rows, {} if commit is None else {"commit": commit})
    with _locked(path) as descriptor:
        _check_header(path, os.pread(descriptor, 4096, 0))
        size = _cut_torn_line(path, descriptor)
        if size == 0:
            data = _HEADER + data
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except BaseException:  # A full disk, or Ctrl-C between two parts of a split write.
            os.ftruncate(descriptor, size)
            raise


def _encoded(rows: Sequence[Row], replaced: Mapping[str, Any]) -> bytes:
    source = provenance()
    shared = {f.name: getattr(source, f.name) for f in fields(source)}
    shared |= {"schema": SCHEMA, "time_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), **replaced}
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    for row in rows:
        own = {f.name: getattr(row, f.name) for f in fields(row)}
        writer.writerow({**shared, **own, "params": row.params_json})
    return text.getvalue().encode()


def _cut_torn_line(path: Path, descriptor: int) -> int:
    """Cut off what stands after the last line end; return the size that remains."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return size
    end, torn = size, b""
    while end > 0 and b"\n" not in torn:
        start = max(0, end - 65536)
        torn, end = os.pread(descriptor, end - start, start) + torn, start
    end += torn.rfind(b"\n") + 1
    _log.warning("%s: a last line without an end was cut off: %r", path, torn[torn.rfind(b"\n") + 1 :][:200])
    os.ftruncate(descriptor, end)
    return end


def _read_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of every line but the header; a torn last line is left out with a warning."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # No line of a writer that is at work looks torn.
            data = file.read()
    except OSError as error:
        raise HybridKVError(f"results cannot be read from {path}: {error.strerror}") from None
    _check_header(path, data[:4096])
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        _log.warning("%s: a last line without an end is left out; the next append cuts it off", path)
    if not whole:
        raise HybridKVError(f"{path} is empty: column 1 must be {COLUMNS[0]!r}; is it another file?")
    try:
        for number, line in enumerate(whole.decode().split("\n")[1:-1], 2):
            yield number, next(csv.reader([line], strict=True), [])
    except UnicodeDecodeError as error:
        raise HybridKVError(f"{path} is no text: byte {error.start} is not UTF-8") from None
    except csv.Error as error:
        raise HybridKVError(f"{path} line {number}: {error}") from None


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


def _parsed(path: Path, number: int, texts: list[str]) -> list[Any]:
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


def read_rows(path: str | Path) -> pd.DataFrame:
    """All rows of a file, in the order in which they were appended.

    Raises:
        HybridKVError: the file cannot be read, has another header, or a line that does not fit the schema.
    """
    import pandas as pd

    path = Path(path)
    rows = [_parsed(path, number, texts) for number, texts in _read_lines(path)]
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
            values = dict(zip(COLUMNS, _parsed(path, number, texts), strict=True))
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
    if values["unit"] not in UNITS:
        yield f"unit {values['unit']!r} is unknown; add it to hybrid_kv.results.UNITS if it is no time"
    low, high = values["ci_low"], values["ci_high"]
    if math.isnan(low) != math.isnan(high) or low > high:
        yield f"{low} to {high} is no interval"
    if values["n"] < 0:
        yield f"n is {values['n']}"
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
