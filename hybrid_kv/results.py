"""Append-only rows of measurements: one CSV, one schema, and no timing without proof that its result was right.

A row's `params` is compact JSON with sorted keys. A timing (a unit of time, or a ratio of times) can only be built by
`timing_row`, which asks for a `Receipt` and stores it in `params` under `receipt`; `Row` refuses a timing without one,
so "fast but wrong" cannot be written, and the proof travels with the number.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
import platform
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from functools import cache
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
TIME_UNITS = ("ns", "us", "ms", "s", "time ratio")
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
        return name
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
        if self.better not in ("lower", "higher", "equal"):
            raise ValueError(f"better={self.better!r}; use lower, higher or equal")
        if self.verdict not in ("pass", "fail", "void", ""):
            raise ValueError(f"verdict={self.verdict!r}; use pass, fail, void or nothing")
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


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise HybridKVError(f"results cannot be written to {path}: {error.strerror}; choose another file") from None


def check_writable(path: str | Path) -> None:
    """Raise now what `append_rows` would raise after the work: an unwritable folder, a file of another schema."""
    path = Path(path)
    existed = path.exists()
    descriptor = _open(path)
    try:
        _check_header(path, os.pread(descriptor, 4096, 0))
    finally:
        os.close(descriptor)
    if not existed and path.stat().st_size == 0:
        path.unlink()


def _check_header(path: Path, head: bytes) -> None:
    if not head:
        return
    found = head.decode("utf-8", "replace").splitlines()[0].split(",")
    for position, name in enumerate(COLUMNS):
        if position >= len(found) or found[position] != name:
            other = repr(found[position]) if position < len(found) else "nothing"
            raise HybridKVError(f"{path}: column {position + 1} must be {name!r}, found {other}; is it another file?")
    if len(found) > len(COLUMNS):
        raise HybridKVError(f"{path}: column {len(COLUMNS) + 1} {found[len(COLUMNS)]!r} is not in schema {SCHEMA}")


def append_rows(path: str | Path, rows: Sequence[Row]) -> None:
    """Append rows: whole, once, also with other processes appending to the same file.

    Raises:
        HybridKVError: the file cannot be written or has another header.
    """
    path = Path(path)
    source = provenance()
    shared = {f.name: getattr(source, f.name) for f in fields(source)}
    shared |= {"schema": SCHEMA, "time_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    for row in rows:
        own = {f.name: getattr(row, f.name) for f in fields(row)}
        writer.writerow({**shared, **own, "params": row.params_json})
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        head = os.pread(descriptor, 4096, 0)
        _check_header(path, head)
        data = text.getvalue().encode()
        if not head:
            data = (",".join(COLUMNS) + "\n").encode() + data
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except OSError as error:
        raise HybridKVError(f"results cannot be written to {path}: {error.strerror}") from None
    finally:
        os.close(descriptor)


def read_rows(path: str | Path) -> pd.DataFrame:
    """All rows of a file, in the order in which they were appended.

    Raises:
        HybridKVError: the file cannot be read or has another header.
    """
    import pandas as pd

    path = Path(path)
    try:
        with path.open("rb") as file:
            _check_header(path, file.read(4096) or b"\n")
    except OSError as error:
        raise HybridKVError(f"results cannot be read from {path}: {error.strerror}") from None
    texts = [c for c in COLUMNS if c not in ("schema", "dirty", "value", "ci_low", "ci_high", "n")]
    empty = {"ci_low": [""], "ci_high": [""]}
    types = dict.fromkeys(texts, str)
    frame = pd.read_csv(path, dtype=types, keep_default_na=False, na_values=empty, float_precision="round_trip")
    if (wrong := frame.loc[frame["schema"] != SCHEMA, "schema"]).size:
        raise HybridKVError(f"{path}: column 1 'schema' holds {wrong.iloc[0]}, this version reads {SCHEMA}")
    return frame
