"""Delta debugging (Zeller and Hildebrandt 2002), greedy: what of a failing case can be left out.

The shrinker of `hypothesis` works on the choices of its own strategies, and our cases are drawn from a seed or come
from another engine.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

C = TypeVar("C")
T = TypeVar("T")


def minimize(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """The items that the failure needs: half of them is left out, then quarters, then one by one."""
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


class TimeUpError(Exception):
    """The deadline has passed."""


class Shrinker(ABC, Generic[C]):
    """Reduces a failing case: pass after pass, until none helps or the time is up.

    Args:
        clock: seconds count on it.

    Attributes:
        case: the smallest one so far that fails.
        num_plays: cases that were played.
        seconds: of all runs.
        is_minimal: nothing more could go; else the time was up.
        tried: cases that are not played again, as text.
    """

    def __init__(self, case: C, seconds: float, clock: Callable[[], float] = time.process_time) -> None:
        self.case = case
        self.num_plays = 0
        self.seconds = 0.0
        self.is_minimal = True
        self._clock, self._deadline = clock, clock() + seconds
        self.tried: set[str] = set()

    @abstractmethod
    def play(self, case: C) -> C | None:
        """The case, or as much of it as was played, if it fails in the same way; else None."""

    @abstractmethod
    def passes(self) -> Sequence[Callable[[], object]]:
        """What is tried, in this order; each calls `fails` or `leave_out`."""

    def fails(self, case: C | None) -> bool:
        """Whether this one fails in the same way; then it is the smallest so far. None and one tried before do not.

        Raises:
            TimeUpError: it is too late to play it.
        """
        if case is None or (key := repr(case)) in self.tried:
            return False
        if self._clock() > self._deadline:
            raise TimeUpError
        self.tried.add(key)
        self.num_plays += 1
        found = self.play(case)
        if found is None:
            return False
        self.case = found
        self.tried.add(repr(found))
        return True

    def leave_out(self, items: Sequence[T], build: Callable[[Sequence[T]], C | None]) -> None:
        """As many of the items as possible; `build` makes a case of those that are kept."""
        minimize(items, lambda kept: self.fails(build(kept)))

    def run(self) -> None:
        """All passes until none helps, or the time is up."""
        begin, before = self._clock(), None
        try:
            while before is not self.case:
                before = self.case
                for one_pass in self.passes():
                    one_pass()
        except TimeUpError:
            self.is_minimal = False
        self.seconds += self._clock() - begin
