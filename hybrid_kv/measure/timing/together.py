"""Rivals timed in turns, in one run: whatever slows the machine slows all of them."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybrid_kv.measure.timing.case import TimedCase, checked
from hybrid_kv.measure.timing.clock import Subject, calibrate, measure
from hybrid_kv.threads import one_thread

FEWEST_ROUNDS = 9
SECONDS = 1.0  # of samples, after which a slow case has had its rounds


@dataclass(frozen=True)
class Timed:
    """Seconds per call of a case in each round, and the largest error before and after them."""

    samples: npt.NDArray[np.float64]
    error: float


def time_together(
    cases: Mapping[str, TimedCase], rounds: int, kind: type[Subject] = Subject
) -> dict[str, Timed]:
    """Time cases in turns, by name.

    Args:
        kind: of subject; a device's times its launches by events.

    Raises:
        WrongResultError: a result is wrong, before or after the timing; no case has a time then.
    """
    # One thread, as the clock sees only one, and a scheduler's process has no core to spare for
    # others. A second one also makes the times of small tensors bimodal: 0.25 or 8 ms were seen.
    with one_thread():
        before = {name: checked(name, case) for name, case in cases.items()}
        subjects = {
            name: kind(case.run, case.reset, case.max_repeats) for name, case in cases.items()
        }
        repeats = {name: calibrate(subject) for name, subject in subjects.items()}
        round_seconds = sum(repeats[name] * subject.sample(1) for name, subject in subjects.items())
        rounds = max(
            min(rounds, FEWEST_ROUNDS), min(rounds, int(SECONDS / max(round_seconds, 1e-9)))
        )
        gc.collect()
        samples = measure(subjects, repeats, rounds)
        return {
            name: Timed(samples[name], max(before[name], checked(name, case)))
            for name, case in cases.items()
        }
