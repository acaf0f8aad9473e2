"""The only clock of the project's benchmarks.

Subjects run interleaved in one process, in a new random order each round, and are compared round by round: whatever
slows the machine slows all of them. The clock is the thread's CPU time, which a busy neighbour does not move.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

clock = time.thread_time


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Subject:
    """Something to time: `run` is called up to `max_repeats` times in a row, `reset` before that, untimed."""

    run: Callable[[], object]
    reset: Callable[[], object] = _nothing
    max_repeats: int = 1000

    def sample(self, repeats: int) -> float:
        """Seconds per call."""
        self.reset()
        run = self.run
        start = clock()
        for _ in range(repeats):
            run()
        return (clock() - start) / repeats


@dataclass(frozen=True)
class Interval:
    """A median and its 95% bootstrap interval."""

    value: float
    low: float
    high: float


def measure(
    subjects: Mapping[str, Subject], rounds: int, sample_seconds: float = 3e-4, seed: int = 0
) -> dict[str, npt.NDArray[np.float64]]:
    """Seconds per call of each subject in each round."""
    repeats = {}
    for name, subject in subjects.items():
        subject.sample(1)  # warm
        once = max(subject.sample(min(3, subject.max_repeats)), 1e-8)
        repeats[name] = int(min(subject.max_repeats, max(1, sample_seconds / once)))
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    order = list(subjects)
    rng = random.Random(seed)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            samples[name].append(subjects[name].sample(repeats[name]))
    return {name: np.array(values) for name, values in samples.items()}


def median(samples: npt.NDArray[np.float64], seed: int = 0, resamples: int = 1000) -> Interval:
    """The median of samples with its bootstrap interval."""
    picks = np.random.default_rng(seed).integers(0, len(samples), (resamples, len(samples)))
    low, high = np.quantile(np.median(samples[picks], axis=1), [0.025, 0.975])
    return Interval(float(np.median(samples)), float(low), float(high))


def ratio(subject: npt.NDArray[np.float64], base: npt.NDArray[np.float64]) -> Interval:
    """How many times longer `subject` takes than `base`: median over rounds of the round's own ratio."""
    return median(subject / base)
