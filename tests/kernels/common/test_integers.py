"""Sizes at the numbers where they turn."""

from __future__ import annotations

import pytest

from hybrid_kv.kernels.common.integers import (
    cdiv,
    default_ring_len,
    next_power_of_2,
    shortest_ring_len,
)


@pytest.mark.parametrize(
    ("longest", "shortest", "default"),
    [(1, 2, 33), (2, 5, 34), (16, 47, 48), (17, 50, 50), (18, 53, 53), (40, 119, 119)],
)
def test_a_ring_holds_a_window_of_history_or_two_steps_but_a_token(
    longest: int, shortest: int, default: int
) -> None:
    assert (shortest_ring_len(longest), default_ring_len(longest)) == (shortest, default)


@pytest.mark.parametrize(
    ("n", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1023, 1024), (1025, 2048)]
)
def test_powers_of_two(n: int, power: int) -> None:
    assert next_power_of_2(n) == power


@pytest.mark.parametrize(
    ("a", "b", "quotient"), [(0, 3, 0), (1, 3, 1), (3, 3, 1), (4, 3, 2), (6, 3, 2)]
)
def test_ceiling_division(a: int, b: int, quotient: int) -> None:
    assert cdiv(a, b) == quotient
