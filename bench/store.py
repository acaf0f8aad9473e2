"""Costs of the store with many rows, each command in a fresh process.

    python -m bench.store [--rows N]

The rows are the committed ones, repeated night after night on four machines with times that move by
a few percent. They are written in pieces, as the CSVs of as many machines, and merged into one data
set, in a temporary folder.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness.arguments import ArgumentParser
from hybrid_kv.errors import HybridKVError, run_command
from hybrid_kv.measure.results import COLUMNS
from hybrid_kv.measure.results.store import opened
from hybrid_kv.measure.results.view import result_files
from hybrid_kv.measure.timing.clock import wall_clock

ROOT = Path(__file__).parents[1]
MACHINES = 4
PIECE = 1_000_000
_MOVED = (
    "CASE WHEN ci_low IS NULL THEN {0} ELSE {0} * (0.97 + 0.06 * (hash(nth) % 1000) / 1000) END"
)
_TIME = "'%Y-%m-%dT%H:%M:%SZ'"
# A night's rows of one machine: later, of another commit and run, what has an interval a few
# percent off.
MADE = {
    "run_id": "left(md5(concat(run_id, night, box)), 12)",
    "time_utc": f"strftime(strptime(time_utc, {_TIME}) + to_days(night::INTEGER), {_TIME})",
    "commit": "left(concat(md5(night::VARCHAR), md5(night::VARCHAR)), 40)",
    **{name: _MOVED.format(name) for name in ("value", "ci_low", "ci_high")},
    "machine": "'box ' || box",
    "dirty": "CASE WHEN dirty THEN 'True' ELSE 'False' END",
}


@dataclass(frozen=True)
class Cost:
    """The cost of one process: seconds on the wall and of the CPU, most bytes of memory."""

    wall: float
    cpu: float
    rss: int


def cost(arguments: Sequence[object], output: Path) -> Cost:
    """Run `hybrid-kv` with these arguments.

    Raises:
        HybridKVError: it failed.
    """
    began = wall_clock()
    command = [sys.executable, "-m", "hybrid_kv.cli", *map(str, arguments)]
    with output.open("w") as out:
        to_file = [(os.POSIX_SPAWN_DUP2, out.fileno(), 1)]
        child = os.posix_spawn(sys.executable, command, os.environ, file_actions=to_file)
        _, status, used = os.wait4(child, 0)
    if status:
        raise HybridKVError(
            f"hybrid-kv {' '.join(map(str, arguments))} failed: {output.read_text()[-300:]}"
        )
    return Cost(wall_clock() - began, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def write_piece(file: Path, first: int, count: int) -> None:
    """Write a CSV of rows `first` to `first + count` of the endless history."""
    columns = ", ".join(f"{MADE.get(name, name)} AS {name}" for name in COLUMNS)
    with opened(result_files([ROOT / "results"])) as store:
        ((size,),) = store.run("SELECT count(*) FROM rows")
        visits = f"range({first // size}, {(first + count) // size + 1}) AS visits(visit)"
        query = f"""SELECT {columns} FROM (
            SELECT *, visit // {MACHINES} AS night, visit % {MACHINES} AS box,
                visit * {size} + number AS nth
            FROM (
                SELECT *, row_number() OVER (ORDER BY time_utc, place, line) - 1 AS number
                FROM rows
            ), {visits}
        ) WHERE nth BETWEEN {first} AND {first + count - 1} ORDER BY nth"""
        store.run(f"COPY ({query}) TO {store.name(file)} (FORMAT csv, HEADER)")


def _apart(work: Callable[..., None], *arguments: object) -> None:
    """Call it in another process.

    What this one holds counts as the memory of each that it starts.
    """
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise HybridKVError(f"the rows were not made: exit code {process.exitcode}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the rows, merge them, ask for the last three, draw the report; print their costs."""
    parser = ArgumentParser("python -m bench.store", main.__doc__)
    parser.add_argument(
        "--rows", type=int, default=PIECE, help="how many; 10000000 take 5 GB of disk"
    )
    rows = parser.parse_args(arguments).rows
    with tempfile.TemporaryDirectory(prefix="hybrid-kv.bench.") as made:
        folder = Path(made)
        data, said = folder / "rows" / "all.parquet", folder / "said.txt"
        data.parent.mkdir()
        costs: list[tuple[str, Cost]] = []
        csv_bytes = 0
        for number, first in enumerate(range(0, rows, PIECE)):
            piece = folder / f"{number}.csv"
            _apart(write_piece, piece, first, min(PIECE, rows - first))
            csv_bytes += piece.stat().st_size
            command = "merge" if number else "export"
            costs.append(
                (
                    f"{command} of piece {number + 1}",
                    cost(["results", command, piece, "--to", data], said),
                )
            )
            if number == 0:
                costs.append(
                    ("results --last 3 of that CSV", cost(["results", piece, "--last", 3], said))
                )
            piece.unlink()
        parquet_bytes = sum(
            file.stat().st_size for file in data.rglob("*.parquet") if file.is_file()
        )
        print(
            f"{rows:,} rows: {csv_bytes / 1e6:,.1f} MB as CSV, "
            f"{parquet_bytes / 1e6:,.1f} MB as Parquet"
        )
        costs.append(("results --last 3", cost(["results", data, "--last", 3], said)))
        costs.append(
            ("report", cost(["report", "--results", data.parent, "--out", folder / "site"], said))
        )
        print("\n| command | s | CPU s | MB |\n|---|--:|--:|--:|")
        for name, one in costs:
            print(f"| {name} | {one.wall:.1f} | {one.cpu:.1f} | {one.rss / 1e6:,.0f} |")
        print(f"\npage: {(folder / 'site' / 'index.html').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    run_command(main)
