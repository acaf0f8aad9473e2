"""Worker processes of the guard: on one thread each, deaf to Ctrl-C, ended with their block."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from threading import RLock
from typing import Any

import torch
from tqdm.auto import tqdm

MOST_WORKERS = 8
CONTEXT = get_context("spawn")  # Fork would hand on the locks of torch's threads.


def num_workers(jobs: int | None) -> int:
    """Return as many as given; else one per core, at most `MOST_WORKERS`."""
    return jobs or min(MOST_WORKERS, os.cpu_count() or 1)


def _nothing() -> None:
    pass


@contextmanager
def processes(
    count: int, start: Callable[..., object] = _nothing, *given: Any
) -> Iterator[Executor]:
    """Provide at most `count` processes; each calls `start` first.

    Shut the executor down to let them finish.
    """
    before = set(active_children())
    executor = ProcessPoolExecutor(
        count, mp_context=CONTEXT, initializer=_start, initargs=(start, given)
    )
    try:
        yield executor
    finally:
        # They ignore Ctrl-C, and a section takes minutes: their results are not needed.
        for child in set(active_children()) - before:
            child.terminate()
        executor.shutdown(cancel_futures=True)


def _start(start: Callable[..., object], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # Its own lock is one of the system's, which a process that is terminated leaves behind.
    tqdm.set_lock(RLock())
    start(*given)
