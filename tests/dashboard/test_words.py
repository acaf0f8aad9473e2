"""How numbers are printed."""

from __future__ import annotations

import pytest

from hybrid_kv.dashboard.words import duration, number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (15122.4, "15,122"),
        (6.789, "6.79"),
        (0.0, "0"),
        (1.08e-13, "1.08e-13"),
        (0.00123, "0.00123"),
        (100.0, "100"),
        (99.96, "100"),
        (-2.5, "-2.5"),
        (float("nan"), "–"),
        (1e15, "1e+15"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


def test_durations() -> None:
    said = ", ".join(map(duration, (410.0, 6790.0, 15.1e6, 2e9, 0.5)))
    assert said == "410 ns, 6.79 µs, 15.1 ms, 2 s, 0.5 ns"
