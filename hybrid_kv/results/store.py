"""Rows of CSVs and Parquet files as one table that DuckDB asks: only what is asked for becomes a Python object.

Every file has a number in a temporary folder: a Parquet file is linked there, of a CSV a Parquet copy is made. DuckDB
makes the copy of a CSV in which all is plainly right; any other is read line by line, which says what is wrong, or
drops a torn last line. A Parquet file is believed if its footer says that `hybrid_kv.results.dataset` wrote it, after
it had looked at every cell. While rows are read, writers of a data set wait; those of a CSV only while it is copied.
"""

from __future__ import annotations

import csv
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
from hybrid_kv.files import refuse_device
from hybrid_kv.results.read import read_lines
from hybrid_kv.results.schema import BOUND, COLUMNS, COUNT, FLAG, HEADER, NUMBER, SCHEMA, SCHEMA_COLUMNS, parsed

if TYPE_CHECKING:
    import duckdb
    import pandas as pd

_log = logging.getLogger("hybrid_kv.results")

MARK = "hybrid_kv_schema"  # a key in the footer of a Parquet file; its value is the schema
DATASET = ".parquet"  # what the name of a data set ends in, a folder or a file
_MEMORY = "400MB"  # of DuckDB; what needs more goes through the temporary folder
# The type of a column, and how its values are made of a CSV's text; `error` ends the copy.
_COUNT = "CASE WHEN regexp_full_match({0}, '[0-9]{{1,19}}') THEN {0}::BIGINT ELSE error({0}) END"
_FLAG = "CASE {0} WHEN 'True' THEN true WHEN 'False' THEN false ELSE error({0}) END"
_FINITE = r"'[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?'"
_IS_NUMBER = f"regexp_full_match({{0}}, {_FINITE}) AND isfinite({{0}}::DOUBLE)"
_NUMBER = f"CASE WHEN {_IS_NUMBER} THEN {{0}}::DOUBLE ELSE error({{0}}) END"
_BOUND = f"CASE WHEN {{0}} != '' THEN {_NUMBER} END"
_KINDS = {COUNT: ("BIGINT", _COUNT), FLAG: ("BOOLEAN", _FLAG), NUMBER: ("DOUBLE", _NUMBER), BOUND: ("DOUBLE", _BOUND)}
_SQL = {column.name: _KINDS.get(column.kind, ("VARCHAR", "{0}")) for column in SCHEMA_COLUMNS}
PARQUET_TYPES = {name: kind for name, (kind, _) in _SQL.items()}
_TEXTS = [column for column in SCHEMA_COLUMNS if _SQL[column.name][0] == "VARCHAR"]

NAMES = ", ".join(COLUMNS)
_VALUES = ", ".join(f"{value.format(name)} AS {name}" for name, (_, value) in _SQL.items())
_NOTHING = ", ".join(f"NULL::{kind} AS {name}" for name, (kind, _) in _SQL.items())
_AS_CSV = (
    "auto_detect=false, header=false, skip=1, delim=',', quote='\"', escape='\"', new_line='\\n', comment='', "
    f"strict_mode=true, null_padding=false, columns={dict.fromkeys(COLUMNS, 'VARCHAR')}, "
    f"force_not_null={list(COLUMNS)}"
)
# What DuckDB reads otherwise: it ends a line at a carriage return, and drops spaces around a quoted field. Searched for
# where there is a sign of it: the expression alone would take ten times as long as all the rest of a copy's checks.
_SIGNS = (b"\r", b' "', b'" ', b'\t"', b'"\t')
_READ_OTHERWISE = re.compile(rb'\r|[,\n][ \t]+"(?!"[^,\n])|"[ \t]+[,\n]')
AS_PARQUET = f"FORMAT parquet, COMPRESSION zstd, KV_METADATA {{{MARK}: '{SCHEMA}'}}"


def parquet_files(place: Path) -> list[Path]:
    """The files of a data set, in the order of their rows: itself, or those in the partitions of its folder.

    Raises:
        HybridKVError: a folder of another schema, or of another kind.
    """
    if not place.is_dir():
        return [place]
    for version in sorted(place.glob("*")):
        if version.name != f"schema={SCHEMA}":
            raise HybridKVError(
                f"{place} holds {version.name}; this version reads schema={SCHEMA}; is it another kind?"
            )
    return sorted(place.glob(f"schema={SCHEMA}/suite=*/month=*/rows{DATASET}"))


class Store:
    """The table `rows`: the columns of the schema, and `place` and `line`, the order in which they were appended."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, folder: Path) -> None:
        self._connection, self._folder = connection, folder
        self._places: list[Path] = []
        self._links: dict[Path, Path] = {}
        self._warnings: list[str] = []  # said when all files are read: an error of one of them is a single line
        self.run(f"COPY (SELECT {_NOTHING} LIMIT 0) TO '{self._next(Path())}' ({AS_PARQUET})")

    def run(self, query: str, parameters: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """All rows of an answer.

        Raises:
            HybridKVError: a file is damaged, or there is no space for what is too large for the memory.
        """
        with self._one_line():
            return self._connection.execute(query, parameters).fetchall()

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        """Errors of DuckDB, which come with a query or with a part of its answer."""
        import duckdb

        try:
            yield
        except duckdb.InterruptException:
            raise KeyboardInterrupt from None
        except duckdb.Error as error:
            raise HybridKVError(self._told(error)) from None

    def _told(self, error: Exception) -> str:
        """DuckDB's words in one line, with the user's names of the files."""
        text = re.sub(
            rf"{re.escape(str(self._folder))}/(\d+)\.parquet",
            lambda found: str(self._places[int(found[1])]),
            " ".join(str(error).split()),
        )
        return f"results cannot be read: {text[:400]}"

    def records(self, query: str, parameters: Sequence[Any] | None = None) -> Iterator[dict[str, Any]]:
        """The rows of an answer, not all at once."""
        with self._one_line():
            answer = self._connection.execute(query, parameters)
            names = [name for name, *_ in answer.description]
            rows = answer.fetchmany(4096)
        while rows:
            for row in rows:
                yield dict(zip(names, row, strict=True))
            with self._one_line():
                rows = answer.fetchmany(4096)

    def frame(self, query: str = f"SELECT {NAMES} FROM rows ORDER BY place, line") -> pd.DataFrame:
        """An answer with the columns of the schema; equal texts are one object, which many rows share."""
        import pandas as pd

        known, parts = dict[str, str](), list[pd.DataFrame]()
        with self._one_line():
            answer = self._connection.execute(query)
            while not (part := answer.fetch_df_chunk(24)).empty or not parts:
                for column in _TEXTS:
                    part[column.name] = pd.Series([known.setdefault(t, t) for t in part[column.name]], dtype="object")
                parts.append(part)
        types = {"BIGINT": "int64", "DOUBLE": "float64", "BOOLEAN": "bool", "VARCHAR": "object"}
        return pd.concat(parts, ignore_index=True).astype({name: types[kind] for name, (kind, _) in _SQL.items()})

    # ---- files ----

    def name(self, file: Path) -> str:
        """A file in a query: through a link, so that no sign in its name means anything there."""
        link = self._folder / f"link{len(self._links)}"
        if file.parent not in self._links:
            link.symlink_to(file.parent.resolve())
            self._links[file.parent] = link
        return f"'{self._links[file.parent] / file.name}'"

    def add(self, file: Path, locks: ExitStack, believe: bool) -> None:
        """A CSV, or a data set, which stays locked; its cells are looked at unless it is believed."""
        refuse_device(file)
        if file.suffix != DATASET:
            self._add_csv(file)
            return
        try:
            descriptor = os.open(file, os.O_RDONLY)
            locks.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError as error:
            raise HybridKVError(f"results cannot be read from {file}: {error.strerror}") from None
        for part in parquet_files(file):
            link = self._next(part)
            link.symlink_to(part.resolve())
            if not believe:
                self._refuse_odd(part, link)

    def _next(self, place: Path) -> Path:
        self._places.append(place)
        return self._folder / f"{len(self._places) - 1:08}.parquet"

    def _add_csv(self, file: Path) -> None:
        target = self._next(file)
        if _is_regular(file) and self._vouched(file, target):
            return
        plain = target.with_suffix(".csv")
        with plain.open("w", newline="") as made:
            writer = csv.writer(made, lineterminator="\n")
            writer.writerow(COLUMNS)
            for number, texts in read_lines(file, self._warnings.append):
                values = parsed(file, number, texts)
                writer.writerow(["" if value != value else value for value in values])
        self._copy(plain, target)
        plain.unlink()

    def _copy(self, file: Path, target: Path) -> None:
        self._connection.execute(
            f"COPY (SELECT {_VALUES} FROM read_csv('{file}', {_AS_CSV})) TO '{target}' ({AS_PARQUET})"
        )

    def _vouched(self, file: Path, target: Path) -> bool:
        """Copy a CSV; False if anything in it is not plainly right."""
        import duckdb

        link = target.with_suffix(".csv")
        link.symlink_to(file.resolve())
        try:
            with file.open("rb") as opened:
                fcntl.flock(opened, fcntl.LOCK_SH)  # No line of a writer that is at work looks torn.
                if opened.read(len(HEADER)) != HEADER:
                    return False
                lines, part = 0, b"\n"
                while more := opened.read(1 << 20) + opened.readline():
                    part = b"\n" + more
                    lines += more.count(b"\n")
                    if any(sign in part for sign in _SIGNS) and _READ_OTHERWISE.search(part):
                        return False
                if part[-1:] != b"\n":
                    return False
                self._copy(link, target)
            return lines == self.check(str(target))
        except duckdb.InterruptException:
            raise KeyboardInterrupt from None
        except (duckdb.Error, OSError, ValueError, KeyError, RecursionError):
            return False
        finally:
            link.unlink()

    def check(self, parquet: str) -> int:
        """Look at every text of Parquet files once; returns how many rows they have.

        Raises:
            ValueError, KeyError, RecursionError: one does not fit its column.
        """
        texts = ", ".join(f"list(DISTINCT {column.name})" for column in _TEXTS)
        query = f"SELECT count(*), count(*) FILTER (schema != {SCHEMA}), {texts} FROM read_parquet('{parquet}')"
        (found,) = self._connection.execute(query).fetchall()
        if found[1]:
            raise ValueError
        for column, values in zip(_TEXTS, found[2:], strict=True):
            for text in values or ():
                column.kind.parse(text)
        return int(found[0])

    def _refuse_odd(self, file: Path, link: Path) -> None:
        try:
            with self._one_line():
                self.check(str(link))
        except (ValueError, KeyError, RecursionError):
            raise HybridKVError(f"{file}: a cell does not fit; `hybrid-kv results --check` names it") from None

    def see(self) -> None:
        """Make the table of what was added."""
        for warning in self._warnings:
            _log.warning("%s", warning)
        every = f"{self._folder}/*.parquet"
        marks = self.run(f"SELECT file_name, value FROM parquet_kv_metadata('{every}') WHERE key = '{MARK}'")
        known = {Path(os.fsdecode(name)).stem: bytes(value).decode() for name, value in marks}
        for number, place in enumerate(self._places):
            if (schema := known.get(f"{number:08}")) != str(SCHEMA):
                held = "no rows of `hybrid-kv results export`" if schema is None else f"schema {schema}"
                raise HybridKVError(f"{place} holds {held}; this version reads schema {SCHEMA} of that command")
        self.run(
            f"CREATE VIEW rows AS SELECT {NAMES}, filename AS place, file_row_number AS line "
            f"FROM read_parquet('{every}', filename=true, file_row_number=true, hive_partitioning=false)"
        )


def _is_regular(file: Path) -> bool:
    """Neither a pipe, which can be read once, nor absent."""
    return file.is_file()


@contextmanager
def opened(files: Sequence[Path], believe: bool = True) -> Iterator[Store]:
    """The rows of CSVs and data sets, in this order.

    Args:
        believe: what says that this project wrote it; otherwise every cell of a data set is looked at, too.

    Raises:
        HybridKVError: a file cannot be read, has another header or schema, or a line that does not fit.
        ConfigError: a device.
    """
    import duckdb

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hybrid-kv.")))
        if "'" in str(folder) or set("*?[") & set(str(folder)):
            raise ConfigError(f"TMPDIR={folder.parent} holds a sign that a query cannot; set another one")
        connection = stack.enter_context(
            duckdb.connect(config={"memory_limit": _MEMORY, "temp_directory": str(folder / "spilled")})
        )
        store = Store(connection, folder)
        for file in files:
            store.add(file, stack, believe)
        store.see()
        yield store


def read_rows(path: str | Path) -> pd.DataFrame:
    """All rows of a CSV or a data set, in the order in which they were appended.

    Raises:
        HybridKVError: the file cannot be read, has another header, or a line that does not fit the schema.
    """
    with opened([Path(path)]) as store:
        return store.frame()


def read_beside(path: Path) -> pd.DataFrame:
    """All rows of the data set that is called like a CSV, then of that CSV; none where there is neither.

    Raises:
        HybridKVError: as `read_rows`.
    """
    with opened([place for place in (path.with_suffix(DATASET), path) if place.exists()]) as store:
        return store.frame()
