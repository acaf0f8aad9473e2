"""The only clock of the project's benchmarks.

Subjects run interleaved in one process, in a new random order each round, and are compared round by
round: whatever slows the machine slows all of them. The clock of host code is the thread's CPU
time, which a busy neighbour does not move. A GPU is timed by its own events, one launch at a time.
Before each, another buffer passes through the L2 cache: launches in a row would find what the one
before has left there, and while it passes the host has time to enqueue the launch and its events,
which would otherwise time Python.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.measure.timing.case import nothing

clock = time.thread_time
wall_clock = time.perf_counter  # for what other processes do


@dataclass(frozen=True)
class Subject:
    """Something to time: `run` is called up to `max_repeats` times in a row, `reset` before that.

    `reset` is not timed.
    """

    run: Callable[[], object]
    reset: Callable[[], object] = nothing
    max_repeats: int = 1000

    def sample(self, repeats: int) -> float:
        """Return seconds per call."""
        self.reset()
        run = self.run
        start = clock()
        for _ in range(repeats):
            run()
        return (clock() - start) / repeats


CACHES = 32  # what passes, in sizes of the L2 cache: 1.6 GB on an H200, 0.3 ms at its bandwidth


@cache
def passing_buffer() -> torch.Tensor:
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return torch.zeros(CACHES * size // 4, dtype=torch.int32, device="cuda")


def between_events(run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Call `run`, which launches, between two events that the device passes."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    return start, end


@dataclass(frozen=True)
class DeviceSubject(Subject):
    """A subject whose `run` launches work on the current CUDA device."""

    def sample(self, repeats: int) -> float:
        """Return seconds per call on the device; the host waits before and after each."""
        total = 0.0
        self.reset()
        for _ in range(repeats):
            torch.cuda.synchronize()
            passing_buffer().sum()  # Read: nothing of it need be written back while `run` runs.
            start, end = between_events(self.run)
            end.synchronize()
            total += start.elapsed_time(end) / 1000
        return total / repeats


@dataclass(frozen=True)
class EndToEnd:
    """Seconds of a call: the host's until it returns, the wall's until the device is done."""

    host: float
    wall: float


def end_to_end(run: Callable[[], object]) -> EndToEnd:
    """Time a call that launches work on the current CUDA device, which is idle before."""
    torch.cuda.synchronize()
    wall_start = wall_clock()
    host_start = clock()
    run()
    host = clock() - host_start
    torch.cuda.synchronize()
    return EndToEnd(host, wall_clock() - wall_start)


@dataclass(frozen=True)
class Interval:
    """A median and its 95% bootstrap interval."""

    value: float
    low: float
    high: float


def calibrate(subject: Subject, sample_seconds: float = 3e-4) -> int:
    """Return how often to run a subject so that a sample takes about `sample_seconds`; warm it."""
    subject.sample(1)
    once = max(subject.sample(min(3, subject.max_repeats)), 1e-8)
    return int(min(subject.max_repeats, max(1, sample_seconds / once)))


def measure(
    subjects: Mapping[str, Subject], repeats: Mapping[str, int], rounds: int
) -> dict[str, npt.NDArray[np.float64]]:
    """Return seconds per call of each subject in each round, of `repeats` calls in a row."""
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    order = list(subjects)
    rng = random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            samples[name].append(subjects[name].sample(repeats[name]))
    return {name: np.array(values) for name, values in samples.items()}


def median(samples: npt.NDArray[np.float64], seed: int = 0, resamples: int = 1000) -> Interval:
    """Return the median of samples with its bootstrap interval."""
    picks = np.random.default_rng(seed).integers(0, len(samples), (resamples, len(samples)))
    low, high = np.quantile(np.median(samples[picks], axis=1), [0.025, 0.975])
    return Interval(float(np.median(samples)), float(low), float(high))


def ratio(subject: npt.NDArray[np.float64], base: npt.NDArray[np.float64]) -> Interval:
    """Return how many times longer `subject` takes than `base`.

    It is the median over rounds of the round's own ratio.
    """
    return median(subject / base)
