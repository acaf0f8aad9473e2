"""Delta debugging (Zeller and Hildebrandt 2002), greedy: it leaves out parts of a failing case.

The shrinker of `hypothesis` works on the choices of its own strategies, and our cases are drawn
from a seed or come from another engine.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

C = TypeVar("C")
T = TypeVar("T")


def minimize(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """Return the items that the failure needs.

    Half of them is left out, then quarters, then each by itself.
    """
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
    """A reduction of a failing case: pass after pass, until none helps or the time is up.

    Args:
        clock: seconds count on it.

    Attributes:
        case: the smallest one so far that fails.
        num_plays: cases that were played.
        seconds: of all runs.
        is_minimal: nothing more could go; else the time was up.
        tried: cases that are not played again, as text.
    """

    def __init__(
        self, case: C, seconds: float, clock: Callable[[], float] = time.process_time
    ) -> None:
        self.case = case
        self.num_plays = 0
        self.seconds = 0.0
        self.is_minimal = True
        self._clock = clock
        self._deadline = clock() + seconds
        self.tried: set[str] = set()

    @abstractmethod
    def play(self, case: C) -> C | None:
        """Return the part of the case that was played if it fails in the same way; else None."""

    @abstractmethod
    def passes(self) -> Sequence[Callable[[], object]]:
        """Return the passes in their order; each calls `fails` or `leave_out`."""

    def fails(self, case: C | None) -> bool:
        """Return whether a case fails in the same way; then it is the smallest so far.

        None and a case that was tried before do not.

        Raises:
            TimeUpError: it is too late to play it.
        """
        if case is None:
            return False
        key = repr(case)
        if key in self.tried:
            return False
        if self._clock() > self._deadline:
            raise TimeUpError
        self.tried.add(key)
        self.num_plays += 1
        failing = self.play(case)
        if failing is None:
            return False
        self.case = failing
        self.tried.add(repr(failing))
        return True

    def leave_out(self, items: Sequence[T], build: Callable[[Sequence[T]], C | None]) -> None:
        """Leave out as many items as possible; `build` makes a case of those that are kept."""

        def fails(kept: Sequence[T]) -> bool:
            return self.fails(build(kept))

        minimize(items, fails)

    def run(self) -> None:
        """Run all passes until none helps, or the time is up."""
        begin = self._clock()
        before = None
        try:
            while before is not self.case:
                before = self.case
                for run_pass in self.passes():
                    run_pass()
        except TimeUpError:
            self.is_minimal = False
        self.seconds += self._clock() - begin
