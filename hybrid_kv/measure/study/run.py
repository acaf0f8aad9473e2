"""A study from its first cell to its rows, on this machine or on Ray.

A cell's folder, `FOLDER/cells/ID`, is renamed into place whole: it is the only state. What has one
is not run again, and the data set holds each row once: a study may be stopped and begun anew at any
time, even on another machine.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hybrid_kv.errors import HybridKVError
from hybrid_kv.measure.results.dataset import export_rows, merge_rows
from hybrid_kv.measure.study import work
from hybrid_kv.measure.study.cell import Done, Running, run_cell
from hybrid_kv.measure.study.matrix import StudyCell
from hybrid_kv.measure.study.work import Lost, Task

Pool = Callable[[Sequence[StudyCell]], Iterator[tuple[StudyCell, Done]]]

DONE = "done.json"
REFUSED = 2


def run_study(
    cells: Sequence[StudyCell],
    folder: Path,
    pool: Pool,
    retries: int,
    report: Callable[[StudyCell, Done], None],
) -> dict[str, dict[str, Any]]:
    """Run the cells without a result; return the record of each.

    A cell without a result is tried again `retries` times; not after exit code 2: it cannot run.

    Raises:
        HybridKVError: the folder cannot be written.
    """
    place = folder / "cells"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HybridKVError(f"{place} cannot be written: {error.strerror}") from None
    lost: dict[str, Done] = {}
    for _ in range(1 + retries):
        refused = {name for name, done in lost.items() if done.code == REFUSED}
        left = [
            cell
            for cell in cells
            if cell.id not in refused and not (place / cell.id / DONE).exists()
        ]
        if not left:
            break
        for cell, done in pool(left):
            report(cell, done)
            if done.is_result:
                _keep(cell, done, place)
            else:
                lost[cell.id] = done
    known = {}
    for cell in cells:
        file = place / cell.id / DONE
        failure = (
            {"code": lost[cell.id].code, "said": lost[cell.id].tail} if cell.id in lost else {}
        )
        known[cell.id] = (
            json.loads(file.read_text()) if file.exists() else {"command": cell.text, **failure}
        )
    return known


def _keep(cell: StudyCell, done: Done, place: Path) -> None:
    made = Path(tempfile.mkdtemp(dir=place, prefix=".part-"))
    try:
        for name, data in done.files.items():
            (made / name).write_bytes(data)
        about = {
            "command": cell.text,
            "levels": dict(cell.levels),
            "code": done.code,
            "seconds": done.seconds,
        }
        (made / DONE).write_text(
            json.dumps({**about, "host": done.host, "said": done.tail}, indent=1)
        )
        made.chmod(0o755)
        os.rename(made, place / cell.id)
    except OSError as error:
        if not (place / cell.id / DONE).exists():  # another driver of the same study was first
            raise HybridKVError(f"{place / cell.id} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def gather(folder: Path, cells: Sequence[StudyCell]) -> int:
    """Bring the rows of all cells into `FOLDER/rows.parquet`; return how many were new."""
    files = [file for cell in cells for file in sorted((folder / "cells" / cell.id).glob("*.csv"))]
    target = folder / "rows.parquet"
    if not files:
        return 0
    return merge_rows(files, target) if target.exists() else export_rows(files, target)


# Where cells run.


def locally(jobs: int, limit: float) -> Pool:
    """Run `jobs` cells at a time, each with its share of the cores; they end with this iterator."""
    threads = max(1, (os.cpu_count() or 1) // jobs)

    def run(cells: Sequence[StudyCell]) -> Iterator[tuple[StudyCell, Done]]:
        running = Running()
        with ThreadPoolExecutor(jobs) as executor:
            try:
                in_threads = partial(work.in_executor, executor, jobs)
                yield from _done(cells, in_threads, (limit, threads, running))
            finally:
                running.end_all()

    return run


def over_ray(address: str, limit: float, retries: int) -> Pool:
    """Run each cell as a task; one lost with its node starts on another, `retries` times."""

    def run(cells: Sequence[StudyCell]) -> Iterator[tuple[StudyCell, Done]]:
        yield from _done(cells, work.over_ray(address, retries), (limit, 1))

    return run


def _done(
    cells: Sequence[StudyCell], pool: work.Pool, how: tuple[Any, ...]
) -> Iterator[tuple[StudyCell, Done]]:
    tasks = {Task(run_cell, (cell.command, *how), cell.gpus): cell for cell in cells}
    waiting = iter(tasks)

    def give() -> Task | None:
        return next(waiting, None)

    for task, done in pool(give):
        yield tasks[task], Done(None, {}, done.reason, 0.0) if isinstance(done, Lost) else done
