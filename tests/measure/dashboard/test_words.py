"""How numbers are printed."""

from __future__ import annotations

from hybrid_kv.measure.dashboard.series import Step
from hybrid_kv.measure.dashboard.words import duration, number, short_change


def test_a_change_is_short_whatever_its_size() -> None:
    steps = [
        Step(1, before, after)
        for before, after in ((100, 109), (100, 109.4), (1, 3.1), (100, 99.7), (0, 3))
    ]
    assert [short_change(step) for step in steps] == ["+9 %", "+9.4 %", "+210 %", "-0.3 %", "+3"]


def test_numbers_and_durations() -> None:
    values = (15122.4, 6.789, 0.0, 1.08e-13, 0.00123, 100.0, 99.96, -2.5, float("nan"), 1e15)
    assert " ".join(map(number, values)) == "15,122 6.79 0 1.08e-13 0.00123 100 100 -2.5 – 1e+15"
    said = ", ".join(map(duration, (410.0, 6790.0, 15.1e6, 2e9, 0.5)))
    assert said == "410 ns, 6.79 µs, 15.1 ms, 2 s, 0.5 ns"
