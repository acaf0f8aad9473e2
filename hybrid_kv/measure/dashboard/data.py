"""The rows in `results/` as a frame: series, their last rows, and the rows of a page."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from hybrid_kv.errors import HybridKVError
from hybrid_kv.files import require_regular
from hybrid_kv.measure.results import NO_HEAD, Head
from hybrid_kv.measure.results.store import DATASET, NAMES, Store, opened

# A series is one check or benchmark on one machine. Of `params` these say how a number came about,
# not what it is of.
SERIES = ["suite", "benchmark", "metric", "case", "machine"]
NO_IDENTITY = {
    "receipt",
    "seconds",
    "baseline",
    "candidate",
    "candidate_commit",
    "reason",
    "gone",
    "unfit",
}
NO_IDENTITY |= {"outcome", "was", "p", "clock_mhz", "head_commit", "quarantined"}  # of a comparison
COMPARE = "compare"
CURVE = "operating_curve"
BISECT = "bisect"
SWARM = "swarm"
MUTANTS = "mutants"
# Ratios to some baseline, rates of the harness, counts that grow, and figures of an engine that is
# wrong on purpose: these have no level over time.
NO_LEVEL = (COMPARE, CURVE, BISECT, SWARM, MUTANTS)
ACCURACY = "accuracy"
# Compiled ahead of time: the same on every machine, and only what changed is appended.
STATIC_SUITE = "kernels"

MAX_ROWS = 300_000  # of a page; `choose_rows` has the rule


@dataclass(frozen=True)
class Results:
    """All rows of a folder.

    Attributes:
        rows: the columns of `results.COLUMNS`, in the order of the commits, those of one in order
            of time, and `parsed` (params as a dict), `case` (params that say what was measured, for
            the reader), `time` of the measurement and `moment`: when the commit was made, or `time`
            if the checkout lacks it. `machine` includes the device unless that is a CPU.
        files: names of the files that were read.
        foreign: names of CSV files of another kind, which were not.
        total: how many measurements the files have.
        rule: which of them `rows` holds, in words; empty: all.
    """

    rows: pd.DataFrame
    files: list[str]
    foreign: list[str]
    total: int
    rule: str = ""

    def of(self, suite: str, benchmark: str | None = None) -> pd.DataFrame:
        """Return the rows of a suite, in order."""
        rows = self.rows[self.rows["suite"] == suite]
        return rows if benchmark is None else rows[rows["benchmark"] == benchmark]

    def of_machine(self, machine: str) -> pd.DataFrame:
        """Return rows of a machine and those that belong to none; all rows for an empty name."""
        return self.rows[self.rows["machine"].isin([machine, ""])] if machine else self.rows

    @property
    def machines(self) -> list[str]:
        """Those with the newest rows first. What is the same on every machine belongs to none."""
        timed = self.rows[self.rows["machine"] != ""]
        return list(dict.fromkeys(timed["machine"].iloc[::-1]))


@dataclass(frozen=True)
class Files:
    """The files of a folder: those with rows, all of the schema, and CSVs of another kind."""

    read: list[Path]
    names: list[str]
    foreign: list[str]


def find_files(folder: Path) -> Files:
    """Find CSVs of the schema and data sets in a folder, or the folder if it is a data set.

    An empty file has no rows.

    Raises:
        HybridKVError: there is no such folder, or no file of the schema in it.
    """
    if folder.suffix == DATASET and folder.exists():
        return Files([folder], [folder.name], [])
    if not folder.is_dir():
        raise HybridKVError(
            f"{folder} is no folder with results; `hybrid-kv guard --record` makes one, --results "
            "names another"
        )
    files = Files([], [], [])
    for path in sorted([*folder.glob("*.csv"), *folder.glob(f"*{DATASET}")]):
        if path.suffix == DATASET:
            files.names.append(path.name)
            files.read.append(path)
            continue
        require_regular(path)
        with path.open("rb") as file:
            head = file.readline()
        if head[:7] != b"schema,"[: len(head)]:
            files.foreign.append(path.name)
            continue
        files.names.append(path.name)
        if head.endswith(b"\n"):  # A header without its end has no rows.
            files.read.append(path)
    if not files.names:
        raise HybridKVError(
            f"{folder} has no CSV of results; `hybrid-kv guard --results {folder}` makes one"
        )
    return files


def load(folder: Path, head: Head = NO_HEAD) -> Results:
    """Read the rows of a folder, or, of millions, those that `choose_rows` takes.

    Args:
        head: the order of its commits is that of the rows; without it they are in order of time.

    Raises:
        HybridKVError: as `find_files`, or a file is damaged.
    """
    files = find_files(folder)
    with opened(files.read) as store:
        chosen = choose_rows(store)
        frame = store.frame(f"SELECT {NAMES} FROM {chosen.source} ORDER BY place, line")
    return Results(
        prepare(frame, head.times()), files.names, files.foreign, chosen.total, chosen.rule
    )


@dataclass(frozen=True)
class Chosen:
    """Which of all rows become Python objects.

    Attributes:
        total: how many measurements there are, without the numbers behind a check of the guard.
        source: the chosen ones, for a query.
        rule: the same for the reader; empty: all.
    """

    total: int
    source: str = "rows"
    rule: str = ""


def choose_rows(store: Store, limit: int = MAX_ROWS) -> Chosen:
    """Return all rows, or whole runs: the newest of each suite on each machine, and others.

    The others are its fullest, and runs at equal distances. Changes alone are appended for compiled
    kernels, so the last row of each of their series is there, too.
    """
    behind = "suite = 'guard' AND contains(metric, ':')"  # as in `_fold_guard`
    ((size, total),) = store.run(f"SELECT count(*), count(*) FILTER (NOT ({behind})) FROM rows")
    if size <= limit:
        return Chosen(total)
    store.run(
        """CREATE TEMP TABLE runs AS SELECT *,
            row_number() OVER (of_one ORDER BY ended DESC, run_id) AS age,
            row_number() OVER (of_one ORDER BY size DESC, ended DESC, run_id) AS smallness
        FROM (
            SELECT suite, machine, device, run_id, max(time_utc) AS ended, count(*) AS size
            FROM rows GROUP BY ALL
        )
        WINDOW of_one AS (PARTITION BY suite, machine, device)"""
    )

    def fits(newest: int, step: int, share: float) -> bool:
        kept = f"sum(size) FILTER (age <= {newest} OR smallness = 1 OR age % {step} = 0)"
        ((size,),) = store.run(f"SELECT {kept} FROM runs")
        return bool((size or 0) <= share * limit)

    never = 1 << 40
    newest = next((n for n in (64, 32, 16, 8, 4, 2) if fits(n, never, 0.5)), 1)
    step = next((1 << n for n in range(1, 30) if fits(newest, 1 << n, 1.0)), never)
    store.run(f"DELETE FROM runs WHERE NOT (age <= {newest} OR smallness = 1 OR age % {step} = 0)")
    store.run(
        f"""CREATE TEMP TABLE chosen AS
        SELECT place, line FROM rows SEMI JOIN runs USING (suite, machine, device, run_id)
        UNION SELECT unnest(last) FROM (
            SELECT max(ROW(time_utc, place, line)) AS newest,
                {{'place': newest[2], 'line': newest[3]}} AS last
            FROM rows WHERE suite = '{STATIC_SUITE}' GROUP BY benchmark, metric, params, triton
        )"""
    )
    rule = (
        f"the newest {'run' if newest == 1 else f'{newest} runs'} of each suite on each machine, "
        "its fullest"
    )
    if step < never:
        rule += f", and each {step}th of the others"
    return Chosen(total, "rows SEMI JOIN chosen USING (place, line)", rule)


def prepare(frame: pd.DataFrame, times: Mapping[str, int] | None = None) -> pd.DataFrame:
    """Return rows of `results.COLUMNS`, in any order, as `Results` has them.

    Args:
        times: of commits, in seconds since 1970.
    """
    frame = frame.copy()
    # Parsed once per distinct text: a long history repeats the same few thousand.
    known = {text: json.loads(text) for text in frame["params"].unique()}
    frame["parsed"] = frame["params"].map(known)
    frame["case"] = frame["params"].map({text: _case(parsed) for text, parsed in known.items()})
    guard = frame["suite"] == "guard"  # whose seed may be another one every night
    of_check = {text: _case(parsed, {"seed", "limit"}) for text, parsed in known.items()}
    frame.loc[guard, "case"] = frame["params"].map(of_check)
    frame = _fold_guard(frame)
    static = frame["suite"] == STATIC_SUITE  # of the rows that are left
    on_device = ~frame["device"].isin(["", "cpu"]) & ~static
    frame.loc[on_device, "machine"] += ", " + frame.loc[on_device, "device"]
    frame.loc[static, "machine"] = ""
    frame["dirty"] = frame["dirty"].astype(bool)
    frame["value"] = frame["value"].astype(float)
    frame["time"] = pd.to_datetime(frame["time_utc"], format="ISO8601", utc=True)
    # Whole numbers: pandas rounds floats with missing ones in memory that it has not written.
    seconds = frame["commit"].map(times or {}).astype("Int64")
    made = pd.to_datetime(seconds, unit="s", utc=True)
    frame["moment"] = made.fillna(frame["time"])
    return frame.sort_values(["moment", "time"], kind="stable", ignore_index=True)


def _fold_guard(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the guard's checks, with the numbers of each among its parsed params.

    These are rows called `CHECK:NUMBER`.
    """
    guard = frame["suite"] == "guard"
    behind = guard & frame["metric"].str.contains(":", regex=False)
    numbers: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in each(frame[behind]):
        check, _, name = row.metric.partition(":")
        value = int(row.value) if float(row.value).is_integer() else float(row.value)
        numbers.setdefault((row.run_id, row.benchmark, check), {})[name] = value
    checks = zip(frame["run_id"], frame["benchmark"], frame["metric"], frame["parsed"], strict=True)
    parsed = [_with_numbers(params, numbers.get(tuple(key))) for *key, params in checks]
    frame["parsed"] = pd.Series(parsed, frame.index, dtype=object)
    return frame[~behind].reset_index(drop=True)


def _with_numbers(params: dict[str, Any], numbers: dict[str, Any] | None) -> dict[str, Any]:
    return {**params, **numbers, "limit": _limit(numbers)} if numbers else params


def _limit(numbers: dict[str, Any]) -> str:
    """Return a limit as the guard prints it."""
    signs = {"at_least": ">= ", "at_most": "<= ", "limit": ""}
    return next(
        (f"{sign}{numbers[name]:.3g}" for name, sign in signs.items() if name in numbers), ""
    )


def _case(params: dict[str, Any], without: Collection[str] = ()) -> str:
    named = ((name, value) for name, value in sorted(params.items()) if name not in NO_IDENTITY)
    return ", ".join(f"{name}={value}" for name, value in named if name not in without)


def column(rows: pd.DataFrame, name: str, *kinds: type) -> pd.Series[Any]:
    """Return a param of each row; None where it is missing or of another type."""
    values = [params.get(name) for params in rows["parsed"]]
    return pd.Series(
        [value if type(value) in kinds else None for value in values], rows.index, dtype=object
    )


def with_params(rows: pd.DataFrame, **kinds: type | tuple[type, ...]) -> pd.DataFrame:
    """Return rows with some of their params as columns of these types."""
    columns = {
        name: column(rows, name, *(kind if isinstance(kind, tuple) else (kind,)))
        for name, kind in kinds.items()
    }
    return rows.assign(**columns)


def each(rows: pd.DataFrame) -> Iterator[Any]:
    """Return the rows as named tuples."""
    return iter(rows.itertuples())


def newest_run(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the run that measured last."""
    return rows[rows["run_id"] == rows["run_id"].iloc[-1]] if len(rows) else rows


def fullest_run(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the newest of the runs with most rows.

    A quick run after it has not measured every cell.
    """
    if not len(rows):
        return rows
    sizes = rows.groupby("run_id", sort=False).size()
    full = rows[rows["run_id"].map(sizes) == sizes.max()]
    return newest_run(full)


def is_ours(case: str) -> bool:
    """Return whether the case is of the engine's code, not of another engine's."""
    return "subject=" not in case or "subject=engine" in case


def last_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the last row of each series."""
    return rows.drop_duplicates(SERIES, keep="last")
