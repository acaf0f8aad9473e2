"""Read a CSV of results line by line."""

from __future__ import annotations

import csv
import fcntl
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from hybrid_kv.errors import HybridKVError
from hybrid_kv.files import refuse_device
from hybrid_kv.results.schema import COLUMNS, check_header

_log = logging.getLogger("hybrid_kv.results")


def read_lines(path: Path, warn: Callable[[str], None] = _log.warning) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of every line but the header; a torn last line is left out with a warning.

    Raises:
        HybridKVError: the file cannot be read, has another header, or a line that is no CSV.
    """
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
        warn(f"{path}: a last line without an end is left out; the next append cuts it off")
