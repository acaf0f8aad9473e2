"""Append rows to a CSV so that none is torn, doubled or mixed with another writer's.

A row is a line and a line a row, so that a writer killed in the middle leaves at most one line
without an end; readers leave it out, the next writer cuts it off. Writers take turns by `flock` on
the file itself, which the kernel releases when one dies; `O_APPEND` alone would not do, because a
write may be split. There is no fsync: what a write has handed to the kernel outlives the process,
only a crash of the whole machine could lose it, and an fsync per row (milliseconds) would cost more
than most measurements.
"""

from __future__ import annotations

import csv
import fcntl
import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from hybrid_kv.errors import HybridKVError
from hybrid_kv.measure.results.origin import provenance
from hybrid_kv.measure.results.row import Row
from hybrid_kv.measure.results.schema import COLUMNS, HEADER, SCHEMA, check_header

_log = logging.getLogger("hybrid_kv.measure.results")


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open a file, made if there is none, for one writer at a time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise HybridKVError(
            f"results cannot be written to {path}: {error.strerror}; choose another file"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    except OSError as error:
        raise HybridKVError(f"results cannot be written to {path}: {error.strerror}") from None
    finally:
        os.close(descriptor)


def check_writable(path: str | Path) -> None:
    """Raise now what `append_rows` would raise after the work.

    That is for an unwritable folder, or a file of another schema.
    """
    path = Path(path)
    existed = path.exists()
    with _locked(path) as descriptor:
        check_header(path, os.pread(descriptor, 4096, 0))
    if not existed and path.stat().st_size == 0:
        path.unlink()


def append_rows(path: str | Path, rows: Sequence[Row], **replaced: object) -> None:
    """Append rows, each once, none between those of another process; all, or none if writing fails.

    A last line without an end is cut off first, with a warning. A process killed while it appends
    leaves whole rows.

    Args:
        replaced: columns that are not those of this process and of now, such as the commit that
            was measured.

    Raises:
        HybridKVError: the file cannot be written or has another header.
    """
    path = Path(path)
    data = encode_rows(rows, replaced)
    with _locked(path) as descriptor:
        check_header(path, os.pread(descriptor, 4096, 0))
        size = _cut_torn_line(path, descriptor)
        if size == 0:
            data = HEADER + data
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except BaseException:  # A full disk, or Ctrl-C between two parts of a split write.
            os.ftruncate(descriptor, size)
            raise


def encode_rows(rows: Sequence[Row], replaced: Mapping[str, object]) -> bytes:
    moment = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    shared = vars(provenance()) | {"schema": SCHEMA, "time_utc": moment, **replaced}
    lines = io.StringIO()
    writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
    for row in rows:
        writer.writerow({**shared, **vars(row), "params": row.params_json})
    return lines.getvalue().encode()


def _cut_torn_line(path: Path, descriptor: int) -> int:
    """Cut off what stands after the last line end; return the size that remains."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return size
    end = size
    torn = b""
    while end > 0 and b"\n" not in torn:
        start = max(0, end - 65536)
        torn = os.pread(descriptor, end - start, start) + torn
        end = start
    end += torn.rfind(b"\n") + 1
    _log.warning(
        "%s: a last line without an end was cut off: %r", path, torn[torn.rfind(b"\n") + 1 :][:200]
    )
    os.ftruncate(descriptor, end)
    return end
