"""`python -m bench.doctor [--trials N]`: whether `hybrid-kv doctor` tells a loaded machine from a quiet one.

Run it where nothing else runs. Half of the trials, in random order, are made while two busy processes per core run.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hybrid_kv.arguments import ArgumentParser
from hybrid_kv.errors import run_command
from hybrid_kv.timing.fitness import SECONDS, examine

PER_CORE = 2


def _spin(parent: int) -> None:
    while os.getppid() == parent:  # It must not outlive a trial that was killed.
        sum(range(100_000))


@contextmanager
def load(busy: bool) -> Iterator[None]:
    """Keep all cores busy, or none."""
    context = multiprocessing.get_context("spawn")
    count = PER_CORE * (os.cpu_count() or 1) if busy else 0
    processes = [context.Process(target=_spin, args=(os.getpid(),), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each trial and how many were told right; exit code 1 below 19 of 20."""
    parser = ArgumentParser("python -m bench.doctor", main.__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each trial")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    given = parser.parse_args(arguments)
    order = [number % 2 == 1 for number in range(given.trials)]
    random.Random(given.seed).shuffle(order)
    right = 0
    for busy in order:
        with load(busy):
            found = examine(given.seconds)
        right += bool(found.unfit) == busy
        print(f"{'loaded' if busy else 'quiet '}: {found.unfit or 'fit'}", flush=True)
    print(f"{right} of {given.trials} told right")
    return int(20 * right < 19 * given.trials)


if __name__ == "__main__":
    run_command(main)
