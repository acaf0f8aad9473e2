"""`python -m bench.scale [--tasks N]`: what a task, a cell, a row and a failure cost whoever keeps many cores busy.

CPU seconds of all processes that take part, so that a busy machine changes little. Without Ray its costs are left out.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.store import write_piece
from hybrid_kv.arguments import ArgumentParser
from hybrid_kv.errors import run_command
from hybrid_kv.guard.play import Differences, Failure
from hybrid_kv.guard.shrink import Shrunk
from hybrid_kv.guard.traffic import SEEDS_PER_BATCH, draw_swarm_scenario
from hybrid_kv.results.dataset import export_rows, merge_rows
from hybrid_kv.study.cell import run_cell
from hybrid_kv.study.swarm import Batch, Swarm, play_batch
from hybrid_kv.study.work import Give, Results, Task, over_ray

Cost = tuple[str, int, float]  # of what, how many, CPU seconds of all of them
SHARD_ROWS = 1000
WAITING = 20_000  # tasks: twice 10,000 cores


def used() -> float:
    """CPU seconds of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def swarm_costs(count: int) -> Iterator[Cost]:
    """A batch where it is played; then what results and failures cost the driver."""
    before = used()
    batch = play_batch(0, SEEDS_PER_BATCH)
    yield f"a batch of {SEEDS_PER_BATCH} seeds, where it is played", 1, used() - before
    yield "its result: counts, patterns, settings", count, _told([batch] * count)
    failure = Failure(draw_swarm_scenario(0), "tokens", "request 0 differs at output token 0")
    one = Batch(Differences([failure]), 0.0)
    yield "a failure: is its rule known? its seed is kept", count, max(0.0, _told([one] * (1 + count)) - _told([one]))


def _told(results: Sequence[Batch]) -> float:
    """CPU seconds of a swarm's driver that is told these results, searches for small cases aside."""

    def pool(give: Give) -> Results:
        failing = results[0].total.wrong
        yield from ((Task(play_batch), result) for result in results)
        for failure in failing:
            yield Task(play_batch, (failure,)), Shrunk(failure, 0, 0.0, is_minimal=False)

    with tempfile.TemporaryDirectory() as folder:
        before = used()
        Swarm(0, 1, Path(folder), lambda _: None, lambda *_: None).run(pool)
        return used() - before


def cell_costs(count: int) -> Iterator[Cost]:
    """A cell that does nothing, and one that only imports what a guard does."""
    for what, code, times in (("does nothing", "", count), ("imports the guard", "import hybrid_kv.guard.run", 3)):
        before = used()
        for _ in range(times):
            run_cell(lambda _, code=code: [sys.executable, "-c", code], 60, 1)  # type: ignore[misc]
        yield f"a local cell that {what}", times, used() - before


def store_costs(rows: int) -> Iterator[Cost]:
    """Shards merged into a data set with many rows, and again when they are there."""
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), Path(name) / "all.parquet"
        base, shard = folder / "base.csv", folder / "shard.csv"
        write_piece(base, 0, rows)
        write_piece(shard, rows, SHARD_ROWS)
        export_rows([base], data)
        for what in ("new", "there already"):
            before = used()
            merge_rows([shard], data)
            yield f"a row merged into {rows:,} from a shard of {SHARD_ROWS:,}, {what}", SHARD_ROWS, used() - before


def _nothing() -> None:
    pass


def ray_costs(count: int) -> Iterator[Cost]:
    """Tasks that do nothing, by the process that pays; and a look at many that wait."""
    import psutil
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:

        def tasks(number: int) -> None:
            left = iter([Task(_nothing)] * number)
            for _ in over_ray("auto", 0)(lambda: next(left, None)):
                pass

        def seconds() -> Counter[str]:
            found = Counter({"its driver": used()})
            for process in psutil.Process().children(recursive=True):
                times = process.cpu_times()
                name = {"gcs_server": "Ray's head (gcs_server)", "raylet": "its node (raylet)"}.get(process.name())
                found[name or "its workers and agents"] += times.user + times.system
            return found

        tasks(100)  # starts the workers
        before = seconds()
        tasks(count)
        for name, spent in (seconds() - before).items():
            yield f"a task of Ray that does nothing, for {name}", count, spent
        never = [ray.remote(_nothing).options(resources={"none": 1}).remote() for _ in range(WAITING)]
        start = used()
        for _ in range(5):
            ray.wait(never, num_returns=len(never), timeout=0)
        yield f"a look at {WAITING:,} open tasks, for the driver", 5, used() - start
    finally:
        ray.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each cost."""
    parser = ArgumentParser("python -m bench.scale", main.__doc__)
    parser.add_argument("--tasks", type=int, default=2000, help="results, failures and tasks of Ray that are timed")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the data set")
    given = parser.parse_args(arguments)
    print("| what | CPU ms of one |\n|---|--:|", flush=True)
    costs = [swarm_costs(given.tasks), cell_costs(20), store_costs(given.rows)]
    if find_spec("ray") is not None:
        costs.append(ray_costs(given.tasks))
    for part in costs:
        for what, number, spent in part:
            print(f"| {what} | {1000 * spent / number:.3g} |", flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
