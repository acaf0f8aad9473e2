"""Rows of CSVs and Parquet files as one table for queries of DuckDB.

Only answers become Python objects.

Every file has a number in a temporary folder: a Parquet file is linked there, the parts of a CSV
are checked and copied to Parquet. A Parquet file must have the columns of the schema, and cells
that a CSV may have: any program can write the footer by which it is known. While rows are read,
writers of a data set wait; those of a CSV only while it is copied.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_kv.errors import ConfigError, HybridKVError
from hybrid_kv.files import require_regular
from hybrid_kv.measure.results.read import read_frames
from hybrid_kv.measure.results.schema import COLUMNS, KINDS, SCHEMA, unfit

if TYPE_CHECKING:
    import duckdb
    import pandas as pd

_log = logging.getLogger("hybrid_kv.measure.results")

MARK = "hybrid_kv_schema"  # a key in the footer of a Parquet file; its value is the schema
DATASET = ".parquet"  # what the name of a data set ends in, a folder or a file
_MEMORY = "400MB"  # of DuckDB; what needs more goes through the temporary folder
NAMES = ", ".join(COLUMNS)
_TYPES = {name: kind.parquet for name, kind in KINDS.items()}
_NOTHING = ", ".join(f"NULL::{kind} AS {name}" for name, kind in _TYPES.items())
_VALUES = ", ".join(
    f"if(isnan({name}), NULL, {name}) AS {name}"
    if kind == "DOUBLE"
    else f"{name}::{kind} AS {name}"
    for name, kind in _TYPES.items()
)
_TEXTS = [name for name, kind in _TYPES.items() if kind == "VARCHAR"]
AS_PARQUET = f"FORMAT parquet, COMPRESSION zstd, KV_METADATA {{{MARK}: '{SCHEMA}'}}"


def parquet_files(place: Path) -> list[Path]:
    """Return the files of a data set in the order of their rows.

    They are itself, or those in its partitions.

    Raises:
        HybridKVError: a folder of another schema, or of another kind.
    """
    if not place.is_dir():
        return [place]
    for version in sorted(place.glob("*")):
        if version.name != f"schema={SCHEMA}":
            raise HybridKVError(
                f"{place} holds {version.name}; this version reads schema={SCHEMA}; is it another "
                "kind?"
            )
    return sorted(place.glob(f"schema={SCHEMA}/suite=*/month=*/rows{DATASET}"))


def locked(place: Path, how: int, locks: ExitStack) -> None:
    """Lock a data set by `flock` until `locks` end.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(place, os.O_RDONLY)
    locks.callback(os.close, descriptor)
    fcntl.flock(descriptor, how)


class Store:
    """The table `rows`: the schema's columns, and `place` and `line`, the order of appending."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, folder: Path) -> None:
        self._connection = connection
        self._folder = folder
        self._places: list[Path] = []
        self._links: dict[Path, Path] = {}
        self._foreign: list[int] = []  # those of `_places` that are linked
        # Printed when all files are read: an error of one of them is a single line.
        self._warnings: list[str] = []
        self.run(f"COPY (SELECT {_NOTHING} LIMIT 0) TO '{self._next(Path())}' ({AS_PARQUET})")

    def run(self, query: str, parameters: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Return all rows of an answer.

        Raises:
            HybridKVError: a file is damaged, or there is no space for what is too large for the
                memory.
        """
        with self._one_line():
            return self._connection.execute(query, parameters).fetchall()

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        """Raise errors of DuckDB in one line; they come with a query or a part of its answer."""
        import duckdb

        try:
            yield
        except duckdb.InterruptException:
            raise KeyboardInterrupt from None
        except duckdb.Error as error:
            raise HybridKVError(self._readable(error)) from None

    def _readable(self, error: Exception) -> str:
        """Return DuckDB's words in one line, with the user's names of the files."""

        def place(number: re.Match[str]) -> str:
            return str(self._places[int(number[1])])

        pattern = rf"{re.escape(str(self._folder))}/(\d+)\.parquet"
        message = re.sub(pattern, place, " ".join(str(error).split()))
        return f"results cannot be read: {message[:400]}"

    def records(
        self, query: str, parameters: Sequence[Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of an answer, not all at once."""
        with self._one_line():
            answer = self._connection.execute(query, parameters)
            names = [name for name, *_ in answer.description]
            rows = answer.fetchmany(4096)
        while rows:
            for row in rows:
                record = dict(zip(names, row, strict=True))
                for name, cell in record.items() if self._foreign else ():
                    self._check_cell(name, cell)
                yield record
            with self._one_line():
                rows = answer.fetchmany(4096)

    def frame(self, query: str = f"SELECT {NAMES} FROM rows ORDER BY place, line") -> pd.DataFrame:
        """Return an answer with the columns of the schema."""
        self.check()
        return self.answer(query).astype({name: kind.dtype for name, kind in KINDS.items()})

    def answer(self, query: str) -> pd.DataFrame:
        """Return an answer as a frame; equal texts are one object, which many rows share."""
        import pandas as pd

        known = dict[str, str]()
        parts = list[pd.DataFrame]()
        with self._one_line():
            answer = self._connection.execute(query)
            while True:
                chunk = answer.fetch_df_chunk(24)
                if chunk.empty and parts:
                    break
                for name in _TEXTS:
                    chunk[name] = pd.Series(
                        [known.setdefault(t, t) for t in chunk[name]], dtype="object"
                    )
                parts.append(chunk)
        return pd.concat(parts, ignore_index=True)

    # ---- files ----

    def name(self, file: Path) -> str:
        """Return a file's name in a query: through a link, so that it is not parsed."""
        link = self._folder / f"link{len(self._links)}"
        if file.parent not in self._links:
            link.symlink_to(file.parent.resolve())
            self._links[file.parent] = link
        return f"'{self._links[file.parent] / file.name}'"

    def add(self, file: Path, locks: ExitStack) -> None:
        """Add a CSV, or a data set, which stays locked."""
        if file.suffix != DATASET:
            for frame in read_frames(file, self._warnings.append):
                with self._one_line():
                    self._connection.register("part", frame)
                    self._connection.execute(
                        f"COPY (SELECT {_VALUES} FROM part) TO '{self._next(file)}' ({AS_PARQUET})"
                    )
            return
        try:
            if not file.is_dir():
                require_regular(file)
            locked(file, fcntl.LOCK_SH, locks)
            for parquet in parquet_files(file):
                require_regular(parquet)
                self._foreign.append(len(self._places))
                self._next(parquet).symlink_to(parquet.resolve())
        except OSError as error:
            raise HybridKVError(f"results cannot be read from {file}: {error.strerror}") from None

    def _next(self, place: Path) -> Path:
        self._places.append(place)
        return self._folder / f"{len(self._places) - 1:08}.parquet"

    def see(self) -> None:
        """Make the table of what was added."""
        for warning in self._warnings:
            _log.warning("%s", warning)
        every = f"{self._folder}/*.parquet"
        marks = self.run(
            f"SELECT file_name, value FROM parquet_kv_metadata('{every}') WHERE key = '{MARK}'"
        )
        known = {Path(os.fsdecode(name)).stem: bytes(value).decode() for name, value in marks}
        for number, place in enumerate(self._places):
            schema = known.get(f"{number:08}")
            if schema != str(SCHEMA):
                held = (
                    "no rows of `hybrid-kv results export`"
                    if schema is None
                    else f"schema {schema}"
                )
                raise HybridKVError(
                    f"{place} holds {held}; this version reads schema {SCHEMA} of that command"
                )
        self.run(
            f"CREATE VIEW rows AS SELECT {NAMES}, filename AS place, file_row_number AS line "
            f"FROM read_parquet('{every}', filename=true, file_row_number=true, "
            "hive_partitioning=false)"
        )
        for number in self._foreign:
            query = (
                "SELECT column_name, column_type FROM (DESCRIBE FROM "
                f"'{self._folder}/{number:08}.parquet')"
            )
            odd = dict(self.run(query)).items() ^ _TYPES.items()
            if odd:
                name, kind = min(odd)
                raise HybridKVError(
                    f"{self._places[number]}: column {name!r} as {kind} is missing or not in the "
                    "schema"
                )

    def check(self) -> None:
        """Refuse a cell that no CSV may have.

        `records` does so for those that it returns: for few of ten million rows.

        Raises:
            HybridKVError: the first, with its file and row.
        """
        for name, kind in KINDS.items() if self._foreign else ():
            # Each cell once; of numbers, which hardly repeat, the odd ones alone.
            odd = f"WHERE isfinite({name}) IS NOT TRUE" if kind.parquet == "DOUBLE" else ""
            for _ in self.records(f"SELECT DISTINCT {name} FROM rows {odd}"):
                pass

    def _check_cell(self, name: str, cell: Any) -> None:
        nothing = "" if KINDS[name].parquet == "DOUBLE" else None
        problem = unfit(name, nothing if cell is None else str(cell))
        if problem:
            query = f"SELECT place, line FROM rows WHERE {name} IS NOT DISTINCT FROM $cell LIMIT 1"
            ((place, line),) = self.run(query, {"cell": cell})
            raise HybridKVError(f"{self._places[int(Path(place).stem)]} row {line + 1}: {problem}")


@contextmanager
def opened(files: Sequence[Path]) -> Iterator[Store]:
    """Open the rows of CSVs and data sets, in this order.

    Raises:
        HybridKVError: a file cannot be read, has another header or schema, or a line that does not
            fit.
        ConfigError: a device.
    """
    import duckdb

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hybrid-kv.")))
        if "'" in str(folder) or set("*?[") & set(str(folder)):
            raise ConfigError(
                f"TMPDIR={folder.parent} holds a character that a query cannot; set another one"
            )
        connection = stack.enter_context(
            duckdb.connect(
                config={"memory_limit": _MEMORY, "temp_directory": str(folder / "spilled")}
            )
        )
        store = Store(connection, folder)
        for file in files:
            store.add(file, stack)
        store.see()
        yield store


def read_rows(path: str | Path) -> pd.DataFrame:
    """Return all rows of a CSV or a data set, in the order in which they were appended.

    Raises:
        HybridKVError: the file cannot be read, has another header, or a line that does not fit the
            schema.
    """
    with opened([Path(path)]) as store:
        return store.frame()


def read_beside(path: Path) -> pd.DataFrame:
    """Return all rows of the data set that is called like a CSV, then of that CSV.

    There are none where there is neither.

    Raises:
        HybridKVError: as `read_rows`.
    """
    with opened([place for place in (path.with_suffix(DATASET), path) if place.exists()]) as store:
        return store.frame()
