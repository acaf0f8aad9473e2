"""What a failure does not need is left out, the first things first."""

from __future__ import annotations

from hybrid_kv.check.minimize import minimize


def test_what_is_needed_is_kept_and_nothing_else() -> None:
    assert minimize(range(20), lambda kept: {3, 11} <= set(kept)) == [3, 11]
    assert minimize("abc", lambda kept: True) == []
    assert minimize([1, 2, 3], lambda kept: False) == [1, 2, 3]
    assert minimize(range(9), lambda kept: len(kept) >= 2) == [7, 8]
