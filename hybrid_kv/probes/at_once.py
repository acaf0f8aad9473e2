"""Several settings at a time, each in a process that starts an engine of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, Protocol

from hybrid_kv.errors import deaf_to_ctrl_c
from hybrid_kv.guard.workers import CONTEXT, processes
from hybrid_kv.probes.guarded import UNHEARD, Guarded, Settings, ask
from hybrid_kv.probes.session import Outcome
from hybrid_kv.targets.kinds import kind_of
from hybrid_kv.targets.remote import share_loaders, shared_loaders

SECONDS = 0.2  # between two looks at the queue

_worker: tuple[list[Guarded], SimpleQueue[tuple[int, str, Outcome]]]


class InWaves(Protocol):
    """What `run.Run` is here."""

    guarded: Guarded
    select: Sequence[str]

    def waves(self) -> Iterator[list[Settings]]: ...

    def hear(self, outcome: Outcome) -> None: ...


def ask_at_once(runs: Sequence[InWaves], jobs: int) -> None:
    """`guarded.ask` for every setting of some runs, which get each outcome in this process, as it comes."""
    queue: SimpleQueue[tuple[int, str, Outcome]] = CONTEXT.SimpleQueue()
    in_flight: dict[Future[None], int] = {}
    ready = [_Waves(run.waves()) for run in runs]
    with processes(jobs, _start, [_given(run.guarded) for run in runs], shared_loaders(), queue) as pool:
        while True:
            for i, run in enumerate(runs):
                while len(in_flight) < jobs and (settings := ready[i].next(i in in_flight.values())) is not None:
                    doubted = [dtype for dtype, judge in run.guarded.judges.items() if not judge.trusted]
                    with deaf_to_ctrl_c():  # A submit may start a worker.
                        task = pool.submit(_ask, i, settings, run.select, run.guarded.shortest, doubted)
                    in_flight[task] = i
            if not in_flight:
                return
            done, _ = wait(in_flight, SECONDS, FIRST_COMPLETED)
            # A worker has reported all before it is done: what is put into such a queue is in its pipe.
            while not queue.empty():
                i, version, outcome = queue.get()
                runs[i].guarded.version = version if version != UNHEARD else runs[i].guarded.version
                runs[i].guarded.hear(outcome)
                runs[i].hear(outcome)
            for one in done:
                del in_flight[one]
                one.result()


class _Waves:
    """The settings of a run, one by one; those of the next wave when no one of the last is in flight."""

    def __init__(self, waves: Iterator[list[Settings]]) -> None:
        self._waves, self._left = waves, list[Settings]()

    def next(self, is_busy: bool) -> Settings | None:
        if not self._left and not is_busy:
            self._left = next((wave for wave in self._waves if wave), [])
        return self._left.pop(0) if self._left else None


def _given(guarded: Guarded) -> tuple[Any, ...]:
    """What makes an equal one in another process."""
    kind, against = guarded.kind, guarded.against
    names = kind.name, getattr(kind, "python", None), against.name if against is not None else None
    return *names, guarded.folder, guarded.seed, guarded.amount, guarded.thorough


def _start(
    given: Iterable[tuple[Any, ...]],
    loaders: Mapping[tuple[str, str], Path],
    queue: SimpleQueue[tuple[int, str, Outcome]],
) -> None:
    global _worker
    share_loaders(loaders)
    made = []
    for kind, python, against, folder, *drawn in given:
        other = kind_of(against) if against is not None else None
        made.append(Guarded(kind_of(kind, python), folder, other, *drawn))
    _worker = made, queue


def _ask(i: int, settings: Settings, select: Sequence[str], shortest: int, doubted: Sequence[str]) -> None:
    every, queue = _worker
    guarded = every[i]
    guarded.shortest = max(guarded.shortest, shortest)
    for dtype in doubted:
        guarded.judge_of({"dtype": dtype}).trusted = False
    try:
        ask(guarded, settings, select, lambda outcome: queue.put((i, guarded.version, outcome)))
    finally:
        guarded.close()
