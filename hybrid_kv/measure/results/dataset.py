"""A data set: rows as Parquet, each row once.

Files are `NAME.parquet/schema=1/suite=SUITE/month=2026-11/rows.parquet`.

Two rows are the same if all their cells are: what was merged before adds nothing, in whatever order
the rows of many machines come. A file is replaced as a whole, so a merge that is killed leaves each
file old or new, and is repeated. Writers take turns by `flock` on the folder, and wait for readers.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

from hybrid_kv.errors import ConfigError, HybridKVError
from hybrid_kv.files import new_folder, write_whole
from hybrid_kv.measure.results.schema import SCHEMA
from hybrid_kv.measure.results.store import (
    AS_PARQUET,
    DATASET,
    NAMES,
    Store,
    locked,
    opened,
    parquet_files,
    read_rows,
)

STATIC_SUITE = "kernels"  # of which only what changed is appended


def export_rows(files: Sequence[Path], target: Path) -> int:
    """Make a data set of rows of CSVs and data sets, whole or not at all; return their number.

    Raises:
        HybridKVError: a file cannot be read, or the data set not be written.
        ConfigError: there is something at `target`, or it is not the name of a data set.
    """
    _check_name(files, target)
    with opened(files) as store, new_folder(target) as made:
        count = _add(store, made)
        if not count:
            raise ConfigError(
                f"there are no rows in {', '.join(map(str, files))}; {target} was not made"
            )
        return count


def merge_rows(files: Sequence[Path], target: Path) -> int:
    """Add the rows of CSVs and other data sets that a data set lacks; return how many those were.

    Raises:
        HybridKVError: a file cannot be read, or the data set not be written.
        ConfigError: there is no data set.
    """
    _check_name(files, target)
    if not target.is_dir():
        raise ConfigError(f"{target} is not a data set; `hybrid-kv results export` makes one")
    with opened(files) as store, ExitStack() as lock:
        locked(target, fcntl.LOCK_EX, lock)
        parquet_files(target)
        return _add(store, target)


def export_file(files: Sequence[Path], target: Path) -> None:
    """Write rows as one Parquet file, whole or not at all; equal rows stay as many.

    Raises:
        HybridKVError: a file cannot be read, or the new one not be written.
    """
    partial_file = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with opened(files) as store:
            store.check()
            store.run(
                f"COPY (SELECT {NAMES} FROM rows) TO {store.name(partial_file)} ({AS_PARQUET})"
            )
        os.replace(partial_file, target)
    except OSError as error:
        raise HybridKVError(f"{target} cannot be written: {error.strerror}") from None
    finally:
        partial_file.unlink(missing_ok=True)


def trim_file(file: Path) -> tuple[int, int]:
    """Cut a CSV to the newest run of each benchmark on each machine, which is kept in git.

    Of static kernel metrics the newest row of each is kept. Nothing may append to the file
    meanwhile.

    Returns:
        The numbers of rows before and after.

    Raises:
        HybridKVError: the file cannot be read or written.
    """
    rows = read_rows(file)
    header, *lines = file.read_bytes().split(b"\n")
    benchmark = ["suite", "benchmark", "machine", "device"]
    of_newest = rows["run_id"] == rows.groupby(benchmark)["run_id"].transform("last")
    is_last = ~rows.duplicated([*benchmark, "params", "metric"], keep="last")
    kept = of_newest.where(rows["suite"] != STATIC_SUITE, is_last)
    chosen = [line for line, keep in zip(lines, kept, strict=False) if keep]
    write_whole(file, b"\n".join([header, *chosen, b""]))
    return len(rows), len(chosen)


def _check_name(files: Sequence[Path], target: Path) -> None:
    if target.suffix != DATASET:
        raise ConfigError(f"{target} must end in {DATASET}, by which a data set is known")
    for file in files:
        place = file.resolve()
        other = target.resolve()
        if place == other or place in other.parents or other in place.parents:
            raise ConfigError(
                f"{file} and {target} are one data set, or one is in the other; choose another "
                "place"
            )


def _add(store: Store, target: Path) -> int:
    store.check()
    added = 0
    months = store.run("SELECT DISTINCT suite, left(time_utc, 7) FROM rows ORDER BY ALL")
    for suite, month in months:
        folder = target / f"schema={SCHEMA}" / f"suite={quote(suite, safe='')}" / f"month={month}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            added += _add_month(store, folder, suite, month)
        except OSError as error:
            raise HybridKVError(f"{folder} cannot be written: {error.strerror}") from None
    return added


def _add_month(store: Store, folder: Path, suite: str, month: str) -> int:
    """Sort the rows of a suite and month into its file.

    The order is by time, then rows that were there, then as they came.
    """
    file = folder / f"rows{DATASET}"
    partial_file = folder / ".part"
    new = (
        f"SELECT {NAMES}, 1 AS source, place, line FROM rows WHERE suite = $suite AND "
        "left(time_utc, 7) = $month"
    )
    source = new
    before = 0
    if file.exists():
        old = f"read_parquet({store.name(file)}, file_row_number=true, hive_partitioning=false)"
        (before,) = store.run(f"SELECT count(*) FROM {old}")[0]
        source = (
            f"SELECT {NAMES}, 0 AS source, '' AS place, file_row_number AS line FROM {old} UNION "
            f"ALL {new}"
        )
    query = (
        f"SELECT {NAMES} FROM ({source}) GROUP BY {NAMES} ORDER BY time_utc, min(ROW(source, "
        "place, line))"
    )
    try:
        copied = store.run(
            f"COPY ({query}) TO {store.name(partial_file)} ({AS_PARQUET})",
            {"suite": suite, "month": month},
        )
        (after,) = copied[0]
        if after > before:
            os.replace(partial_file, file)
    finally:
        partial_file.unlink(missing_ok=True)
    return int(after - before)
