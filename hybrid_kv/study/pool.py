"""Where cells run: in processes of this machine, or as tasks of Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hybrid_kv.study import work
from hybrid_kv.study.cell import Done, Running, run_cell
from hybrid_kv.study.matrix import Cell
from hybrid_kv.study.work import Lost, Task

Pool = Callable[[Sequence[Cell]], Iterator[tuple[Cell, Done]]]


def locally(jobs: int, limit: float) -> Pool:
    """`jobs` cells at a time; each has its share of the cores. They end with this iterator."""
    threads = max(1, (os.cpu_count() or 1) // jobs)

    def run(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Done]]:
        running = Running()
        with ThreadPoolExecutor(jobs) as executor:
            try:
                yield from _done(cells, lambda give: work.in_executor(executor, jobs, give), (limit, threads, running))
            finally:
                running.end_all()

    return run


def over_ray(address: str, limit: float, retries: int) -> Pool:
    """Each cell is a task; one that is lost with its node starts on another, `retries` times."""

    def run(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Done]]:
        yield from _done(cells, work.over_ray(address, retries), (limit, 1))

    return run


def _done(cells: Sequence[Cell], pool: work.Pool, how: tuple[Any, ...]) -> Iterator[tuple[Cell, Done]]:
    tasks = {Task(run_cell, (cell.command, *how), cell.gpus): cell for cell in cells}
    waiting = iter(tasks)
    for task, done in pool(lambda: next(waiting, None)):
        yield tasks[task], Done(None, {}, done.said, 0.0) if isinstance(done, Lost) else done
