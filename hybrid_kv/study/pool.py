"""Where cells run: in processes of this machine, or as tasks of Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from hybrid_kv.study.cell import Done, run_cell
from hybrid_kv.study.matrix import Cell

Pool = Callable[[Sequence[Cell]], Iterator[tuple[Cell, Done]]]


def locally(jobs: int, limit: float) -> Pool:
    """`jobs` cells at a time; each has its share of the cores."""
    threads = max(1, (os.cpu_count() or 1) // jobs)

    def run(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Done]]:
        with ThreadPoolExecutor(jobs) as pool:
            open_cells: dict[Future[Done], Cell] = {
                pool.submit(run_cell, cell.command, limit, threads): cell for cell in cells
            }
            try:
                while open_cells:
                    for future in wait(open_cells, return_when=FIRST_COMPLETED).done:
                        yield open_cells.pop(future), future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    return run


def over_ray(address: str, limit: float, retries: int) -> Pool:
    """One task a cell, with a core and the GPUs that it needs; a task that is lost with its node starts on another.

    No more tasks are open than twice the cluster's cores: a driver that ends leaves little behind, and a list of a
    million cells stays here.
    """

    def run(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Done]]:
        import ray

        started = not ray.is_initialized()
        if started:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        try:
            task = ray.remote(run_cell)
            open_cells: dict[Any, Cell] = {}
            waiting = list(reversed(cells))
            while waiting or open_cells:
                most = max(2, 2 * int(ray.cluster_resources().get("CPU", 1)))
                while waiting and len(open_cells) < most:
                    cell = waiting.pop()
                    wanted = task.options(num_cpus=1, num_gpus=cell.gpus, max_retries=retries)
                    open_cells[wanted.remote(cell.command, limit, 1)] = cell
                (reference,), _ = ray.wait(list(open_cells), num_returns=1)
                cell = open_cells.pop(reference)
                try:
                    done = ray.get(reference)
                except ray.exceptions.RayError as error:
                    done = Done(None, {}, str(error).splitlines()[0], 0.0)
                yield cell, done
        finally:
            if started:
                ray.shutdown()

    return run
