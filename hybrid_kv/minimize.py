"""Delta debugging (Zeller and Hildebrandt 2002), greedy: what of a failure can be left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def minimize(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """Those of the items that can't be missed: half of them is left out, then quarters, then one by one."""
    size = (len(items) + 1) // 2
    while size:
        start = 0
        while start < len(items):
            rest = [*items[:start], *items[start + size :]]
            if fails(rest):
                items = rest
            else:
                start += size
        size //= 2
    return items
