"""A stream of tasks over threads, processes or Ray, each returned as it ends.

As many are in flight as there is room for.

`Give` returns the next task when there is room, and again after each result, which may bring new
ones. So a million tasks need no list, and a result decides what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from hybrid_kv.errors import deaf_to_ctrl_c

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Task:
    """A call, and the GPUs that it needs for itself.

    For another machine its function must be one of a module.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    gpus: float = 0


@dataclass(frozen=True)
class Lost:
    """A task whose worker is gone, or that raised there; `reason` says why."""

    reason: str


Give = Callable[[], Task | None]  # None: nothing now
Results = Generator[tuple[Task, Any]]
Pool = Callable[[Give], Results]


def in_executor(executor: Executor, room: int, give: Give) -> Results:
    """Run tasks in threads or processes of this machine, `room` at a time.

    Raises:
        Exception: what a task raised.
    """

    def first_of(futures: Collection[Future[Any]]) -> Iterable[Future[Any]]:
        return wait(futures, return_when=FIRST_COMPLETED).done

    def start(task: Task) -> Future[Any]:
        with deaf_to_ctrl_c():  # A submit may start a process.
            return executor.submit(task.call, *task.args)

    def fixed_room() -> int:
        return room

    for task, future in _as_they_end(give, fixed_room, start, first_of):
        yield task, future.result()


def over_ray(address: str, retries: int) -> Pool:
    """Run each task on Ray, with a core and the GPUs that it needs.

    One that is lost with its node starts on another.

    No more tasks are open than twice the cluster's cores: a driver that ends leaves little behind.
    """

    def run(give: Give) -> Results:
        import ray

        started = not ray.is_initialized()
        if started:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        remote: dict[Callable[..., Any], Any] = {}

        def start(task: Task) -> Any:
            if task.call not in remote:
                remote[task.call] = ray.remote(task.call)
            options = {"num_cpus": 1, "num_gpus": task.gpus, "max_retries": retries}
            return remote[task.call].options(**options).remote(*task.args)

        def room() -> int:
            return max(2, 2 * int(ray.cluster_resources().get("CPU", 1)))

        def first_of(references: Collection[Any]) -> Iterable[Any]:
            every = list(references)
            ray.wait(every, num_returns=1)
            # All that have ended, since a look at twenty thousand costs as much for one of them.
            ended: list[Any] = ray.wait(every, num_returns=len(every), timeout=0)[0]
            return ended

        try:
            for task, reference in _as_they_end(give, room, start, first_of):
                yield task, _ray_result(reference)
        finally:
            if started:
                ray.shutdown()

    return run


def _ray_result(reference: Any) -> Any:
    """Return the result of a task of Ray, or that it is lost."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return Lost(str(error).strip().splitlines()[-1])  # after its traceback
    except ray.exceptions.RayError as error:
        return Lost(str(error).splitlines()[0])


def _as_they_end(
    give: Give,
    room: Callable[[], int],
    start: Callable[[Task], T],
    first_of: Callable[[Collection[T]], Iterable[T]],
) -> Iterator[tuple[Task, T]]:
    in_flight: dict[T, Task] = {}
    while True:
        for _ in range(room() - len(in_flight)):
            task = give()
            if task is None:
                break
            in_flight[start(task)] = task
        if not in_flight:
            return
        for handle in first_of(in_flight):
            yield in_flight.pop(handle), handle
