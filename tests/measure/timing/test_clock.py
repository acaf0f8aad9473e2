"""What is sampled and how often; no test looks at how long anything takes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_kv.measure.timing import clock as clock_module
from hybrid_kv.measure.timing.clock import Subject, calibrate, measure, median, ratio
from tests.measure.timing.events import log_events


class Clock:
    """It moves on by one second whenever it is read, and by what is added to it."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that moves on by one second whenever it is read, and by what is added to it."""

    clock = Clock()
    monkeypatch.setattr(clock_module, "clock", clock)
    return clock


def test_a_sample_is_reset_once_and_counts_runs_alone(ticks: Clock) -> None:
    calls = []

    def reset() -> None:
        ticks.now += 100
        calls.append("reset")

    def run() -> None:
        ticks.now += 3
        calls.append("run")

    assert Subject(run, reset).sample(4) == (4 * 3 + 1) / 4
    assert calls == ["reset", *["run"] * 4]


def test_calibration_fills_the_sample_and_respects_the_case(ticks: Clock) -> None:
    def run() -> None:
        ticks.now += 2

    # Three runs and a reading of the clock: 7 / 3 seconds each.
    assert calibrate(Subject(run), 21.1) == 9
    assert calibrate(Subject(run, max_repeats=3), 21.1) == 3
    assert calibrate(Subject(run, max_repeats=1), 21.1) == 1
    assert calibrate(Subject(run), 1e-6) == 1


def test_measuring_interleaves_in_random_order() -> None:
    order = []
    subjects = {name: Subject(lambda name=name: order.append(name)) for name in "abc"}
    samples = measure(subjects, dict.fromkeys("abc", 1), rounds=8)
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys("abc", 8)
    rounds = ["".join(order[i : i + 3]) for i in range(0, 24, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 2


def test_ratio_is_that_of_rounds() -> None:
    base = np.array([1.0, 10.0, 2.0])
    assert ratio(3 * base, base).value == 3
    assert ratio(3 * base, base).low == ratio(3 * base, base).high == pytest.approx(3)
    one = median(np.arange(101.0))
    assert one.low < one.value == 50 < one.high


def test_a_launch_is_enqueued_while_other_buffers_pass_through_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing waits between them: on an idle device the events would time Python."""
    log = []
    log_events(monkeypatch, log, 4000.0)
    monkeypatch.setattr(
        clock_module, "passing_buffer", lambda: SimpleNamespace(sum=lambda: log.append("pass"))
    )
    subject = clock_module.DeviceSubject(lambda: log.append("run"), lambda: log.append("reset"))
    assert subject.sample(2) == 4.0
    assert log == ["reset", *["wait", "pass", "event", "run", "event", "wait"] * 2]


def test_what_passes_is_many_times_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(clock_module.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        clock_module.torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(L2_cache_size=4096),
    )
    zeros = clock_module.torch.zeros
    monkeypatch.setattr(
        clock_module.torch,
        "zeros",
        lambda size, dtype, device: made.append(device) or zeros(size, dtype=dtype),
    )
    assert clock_module.passing_buffer.__wrapped__().nbytes == 32 * 4096
    assert made == ["cuda"]


def test_end_to_end_begins_on_an_idle_device_and_ends_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, readings = [], iter([10.0, 13.0])

    def read() -> float:
        log.append("clock")
        return next(readings)

    log_events(monkeypatch, log, 0.0)
    walls = iter([1.0, 9.0])
    monkeypatch.setattr(clock_module, "clock", read)
    monkeypatch.setattr(clock_module, "wall_clock", lambda: log.append("wall") or next(walls))
    timed = clock_module.end_to_end(lambda: log.append("run"))
    assert log == ["wait", "wall", "clock", "run", "clock", "wait", "wall"]
    assert (timed.host, timed.wall) == (3.0, 8.0)


@pytest.mark.gpu
def test_a_gpu_subject_times_the_device() -> None:
    import torch

    x = torch.randn(4096, 4096, device="cuda")
    assert clock_module.DeviceSubject(lambda: x @ x).sample(3) > 0
