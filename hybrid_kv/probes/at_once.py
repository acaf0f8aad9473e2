"""Several settings of one engine at a time, each in a process that starts an engine of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from multiprocessing.queues import SimpleQueue

from hybrid_kv.errors import deaf_to_ctrl_c
from hybrid_kv.guard.workers import CONTEXT, processes
from hybrid_kv.probes.guarded import Guarded, Settings, ask
from hybrid_kv.probes.session import Outcome
from hybrid_kv.targets.kinds import kind_of

SECONDS = 0.2  # between two looks at the queue

_worker: tuple[Guarded, SimpleQueue[tuple[str, Outcome]]]


def ask_at_once(
    guarded: Guarded, matrix: Sequence[Settings], select: Sequence[str], report: Callable[[Outcome], None], jobs: int
) -> None:
    """`guarded.ask` for every setting. `guarded` and `report` get each outcome in this process, as it comes."""
    queue: SimpleQueue[tuple[str, Outcome]] = CONTEXT.SimpleQueue()
    kind, against = guarded.kind, guarded.against
    names = kind.name, getattr(kind, "python", None), against.name if against is not None else None
    doubted = [dtype for dtype, judge in guarded.judges.items() if not judge.trusted]
    sent = guarded.folder, guarded.seed, guarded.amount, guarded.thorough, guarded.shortest, guarded.version
    given = (*names, *sent, doubted, queue)
    with processes(min(jobs, len(matrix)), _start, *given) as pool:
        with deaf_to_ctrl_c():  # A submit may start a worker.
            in_flight = {pool.submit(_ask, settings, select) for settings in matrix}
        while in_flight:
            done, in_flight = wait(in_flight, timeout=SECONDS)
            # A worker has reported all before it is done: what is put into such a queue is in its pipe.
            while not queue.empty():
                guarded.version, outcome = queue.get()
                guarded.hear(outcome)
                report(outcome)
            for one in done:
                one.result()


def _start(
    kind: str,
    python: str | None,
    against: str | None,
    folder: str,
    seed: int,
    amount: int,
    thorough: bool,
    shortest: int,
    version: str,
    doubted: Sequence[str],
    queue: SimpleQueue[tuple[str, Outcome]],
) -> None:
    global _worker
    other = kind_of(against) if against is not None else None
    guarded = Guarded(kind_of(kind, python), folder, other, seed, amount, thorough)
    guarded.shortest, guarded.version = shortest, version
    for dtype in doubted:
        guarded.judge_of({"dtype": dtype}).trusted = False
    _worker = guarded, queue


def _ask(settings: Settings, select: Sequence[str]) -> None:
    guarded, queue = _worker
    try:
        ask(guarded, settings, select, lambda outcome: queue.put((guarded.version, outcome)))
    finally:
        guarded.close()
