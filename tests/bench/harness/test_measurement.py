"""Checks before and after each time; interleaved rivals; what the command prints and writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.harness.cells import Case, Count, WrongResultError, grid
from bench.harness.measurement import Counted, Measurement, groups, measure_together
from hybrid_kv.measure.results import Receipt
from hybrid_kv.measure.timing import together
from hybrid_kv.measure.timing.clock import Interval
from tests.support.cells import cell, failing_after, steady


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("error", [None, float("nan"), float("inf"), -1.0])
def test_a_result_that_is_wrong_before_or_after_has_no_time(
    count: int, error: float | None
) -> None:
    with pytest.raises(
        WrongResultError,
        match=r"offload/b\[x=1\]: (the injected mistake|an error of .* proves nothing)",
    ):
        measure_together([cell(lambda: failing_after(count, error), x=1)], 2)


def test_a_wrong_rival_takes_the_times_of_the_others() -> None:
    makes = {"engine": steady, "rival": lambda: failing_after(1)}
    with pytest.raises(WrongResultError, match="subject=rival"):
        measure_together([cell(make, subject=name) for name, make in makes.items()], 2)


def test_rows_carry_receipts_with_the_largest_error() -> None:
    errors = iter([2e-7, 5e-7])
    (one,) = measure_together([cell(lambda: Case(lambda: None, lambda: next(errors)), x=1)], 9)
    (row,) = one.rows()
    assert row.params["receipt"] == {
        "checked_before": True,
        "checked_after": True,
        "max_error": 5e-7,
    }
    assert (row.suite, row.benchmark, row.metric) == ("offload", "b", "cpu_time")
    assert (row.unit, row.n, row.better) == ("ns", 9, "lower")
    assert row.ci_low <= row.value <= row.ci_high


def test_seconds_become_nanoseconds() -> None:
    interval, share = Interval(2e-6, 1e-6, 3e-6), Interval(5.0, 4.0, 6.0)
    one = Measurement(
        cell(steady, promise=7.0, subject="r"),
        interval,
        share,
        9,
        Receipt(checked_before=True, checked_after=True, max_error=0.0),
    )
    time, times = one.rows()
    assert (time.value, time.ci_low, time.ci_high) == (2000, 1000, 3000)
    assert (times.value, times.ci_low, times.ci_high, times.verdict, times.unit) == (
        5,
        4,
        6,
        "fail",
        "time ratio",
    )


def test_a_rival_without_a_promise_has_a_ratio_for_the_reader_and_no_row_of_it() -> None:
    cells = [
        cell(steady, promise=None if name == "engine" else 0.0, subject=name)
        for name in ("engine", "rival")
    ]
    _, rival = measure_together(cells, 2)
    assert rival.ratio is not None and [row.metric for row in rival.rows()] == ["cpu_time"]


@pytest.mark.parametrize(
    ("high", "promise", "verdict"), [(6, 7, "fail"), (7, 7, "pass"), (1, None, ""), (1, 0.0, "")]
)
def test_verdicts(high: float, promise: float | None, verdict: str) -> None:
    one = Measurement(
        cell(steady, promise=promise),
        Interval(1, 1, 1),
        Interval(1, 1, high),
        9,
        Receipt(checked_before=True, checked_after=True, max_error=0),
    )
    assert one.verdict == verdict


def test_rivals_are_measured_with_their_engine() -> None:
    made = list(
        grid(
            "s",
            "b",
            "cpu",
            lambda seed, **_: steady(),
            {"x": (1, 2), "subject": ("rival", "engine")},
        )
    )
    assert [[one.params["x"] for one in group] for group in groups(made)] == [[1, 1], [2, 2]]


def test_a_ratio_is_how_many_times_the_engine_a_rival_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = {"rival": np.array([3.0, 9.0, 6.0]), "engine": np.array([1.0, 3.0, 2.0])}
    cells = [cell(steady, subject=name) for name in samples]
    monkeypatch.setattr(
        together, "measure", lambda *_: {one.key: samples[one.params["subject"]] for one in cells}
    )
    rival, engine = measure_together(cells, 9)
    assert (rival.ratio.value, rival.time.value, engine.time.value, engine.ratio) == (
        3.0,
        6.0,
        2.0,
        None,
    )
    (alone,) = measure_together(cells[:1], 9)
    assert (alone.ratio, alone.time.value) == (None, 6.0)


def test_one_thread_while_measuring_and_as_many_as_before_afterwards() -> None:
    seen = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measure_together(
            [cell(lambda: Case(lambda: seen.append(torch.get_num_threads()), lambda: 0.0), x=1)], 2
        )
        with pytest.raises(WrongResultError):
            measure_together([cell(lambda: failing_after(0), x=1)], 2)
        assert (set(seen), torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(threads)


def test_counts_become_rows() -> None:
    (one,) = measure_together(
        [cell(lambda: {"blocks": Count(3, "blocks", "higher")}, "count", x=1)], 2
    )
    assert isinstance(one, Counted)
    (row,) = one.rows()
    assert (row.metric, row.value, row.unit, row.better, row.params) == (
        "blocks",
        3,
        "blocks",
        "higher",
        {"x": 1},
    )
