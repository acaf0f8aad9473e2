"""How numbers are printed."""

from __future__ import annotations

from hybrid_kv.dashboard.words import duration, number


def test_numbers_and_durations() -> None:
    values = (15122.4, 6.789, 0.0, 1.08e-13, 0.00123, 100.0, 99.96, -2.5, float("nan"), 1e15)
    assert " ".join(map(number, values)) == "15,122 6.79 0 1.08e-13 0.00123 100 100 -2.5 – 1e+15"
    said = ", ".join(map(duration, (410.0, 6790.0, 15.1e6, 2e9, 0.5)))
    assert said == "410 ns, 6.79 µs, 15.1 ms, 2 s, 0.5 ns"
